"""The prefix cache, on the host: which full blocks hold which tokens, who holds them, which may go, and where to.

It knows digests of tokens, block ids and counts of holders. It knows neither sequences nor slots, nor the device: that
an id is live there, and gets the reference that `PrefixCache.keeps` promises, is for whoever plans steps, and so is
the memory of the host, to which blocks go that somebody wants back.

A block is found by the digest of its tokens and of all before them (chained, as in vLLM's automatic prefix caching),
and its tokens are compared: no collision, however unlikely, makes a sequence read another's text.
"""

from __future__ import annotations

import array
import collections
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Chain:
    """The full blocks of one text: for each, its content and the digest of it and of all before it.

    Args:
      block_size: Tokens of a block.
      salt: What else must be equal for two texts to share KV: the model, an adapter, a tenant.
      hash: Bytes to a digest.
    """

    def __init__(self, block_size: int, salt: bytes = b"", hash: Callable[[bytes], bytes] = sha256):
        self._block_size, self._salt, self._hash = block_size, salt, hash
        self.contents: list[bytes] = []
        self.digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self.digests)

    def twin(self) -> Chain:
        """Another text that begins as this one does."""
        twin = Chain(self._block_size, self._salt, self._hash)
        twin.contents, twin.digests = list(self.contents), list(self.digests)
        return twin

    def extend(self, tokens: Sequence[int], start: int = 0) -> None:
        """Takes in the full blocks of a text that begins as before; ``tokens`` may leave out the first ``start`` of it,
        if these are in blocks that are known."""
        size, first = self._block_size, len(self.digests)
        last = (start + len(tokens)) // size
        if last <= first:
            return
        data, width = array.array("i", tokens[first * size - start : last * size - start]).tobytes(), 4 * size
        digest = self.digests[-1] if first else self._hash(self._salt)
        for place in range(0, len(data), width):
            content = data[place : place + width]
            digest = self._hash(digest + content)
            self.contents.append(content if self.contents else self._salt + content)
            self.digests.append(digest)


class Block:
    """A full block whose tokens are known.

    Attributes:
      id: Its id; None while it is not on the device.
      content: Its tokens; the first of a text has the salt as well.
      before: The block before it in its text; None for the first.
      digest: What it is found by; None if another block has that place, and once it is forgotten.
      users: Running sequences that hold it.
      kept: Whether the cache holds a reference of its own.
      wanted: Sequences that have paused and want it back.
      stored: Whether the host has a copy of its KV, or will.
      coming: Whether it is on its way from there to the device.
    """

    __slots__ = ("before", "coming", "content", "digest", "id", "kept", "stored", "users", "wanted")

    def __init__(self, id: int, content: bytes, before: Block | None):
        self.id: int | None = id
        self.content, self.before = content, before
        self.digest: bytes | None = None
        self.users, self.kept = 1, False
        self.wanted, self.stored, self.coming = 0, False, False


class Found(NamedTuple):
    """What there is of the beginning of a text.

    Attributes:
      hits: Blocks on the device.
      away: Those behind them that only the host has.
      comes: Whether the one behind the hits is being computed or fetched.
    """

    hits: list[Block]
    away: list[Block]
    comes: bool


class PrefixCache:
    """All blocks whose tokens are known.

    Args:
      retains: Whether blocks stay when their last holder goes, until they are evicted, least recently used first.
      room: Blocks that the host has memory for.

    Attributes:
      live: Blocks that are held or kept, or on their way to the device.
    """

    def __init__(self, *, retains: bool, room: int = 0):
        self._retains, self._room = retains, room
        self._found: dict[bytes, Block] = {}
        self._idle: dict[Block, None] = {}  # kept and held by nobody, least recently used first
        self._fresh: collections.deque[Block] = collections.deque()  # to be kept, in the order of their texts
        self._expected: collections.Counter[bytes] = collections.Counter()
        self._stored: dict[Block, None] = {}  # of which the host has a copy, those that went first first
        self._discards: list[Block] = []
        self.live = 0

    @property
    def stored(self) -> int:
        """Blocks of which the host has a copy, or will."""
        return len(self._stored)

    @property
    def idle(self) -> int:
        """Blocks that can be evicted."""
        return len(self._idle)

    @property
    def kept_ids(self) -> list[int]:
        """Blocks of which the cache has a reference, or will by the next plan."""
        return [block.id for block in self._found.values() if block.kept and block.id is not None]

    def match(self, chain: Chain, most: int) -> list[Block]:
        """The blocks that hold the beginning of a text, as far as there are such, ``most`` at the most: on the device,
        and behind them on the host."""
        blocks: list[Block] = []
        before = None
        for digest, content in zip(chain.digests[:most], chain.contents, strict=False):
            block = self._found.get(digest)
            if block is None or block.before is not before or block.content != content:
                break
            blocks.append(before := block)
        return blocks

    def find(self, chain: Chain, most: int) -> Found:
        """What there is of the first ``most`` blocks of a text."""
        blocks = self.match(chain, most)
        count = next((i for i, block in enumerate(blocks) if block.id is None), len(blocks))
        hits, behind = blocks[:count], blocks[count:]
        if behind:
            return Found(hits, [block for block in behind if block.id is None and not block.coming], behind[0].coming)
        return Found(hits, [], count < min(most, len(chain)) and chain.digests[count] in self._expected)

    def expect(self, digests: Iterable[bytes]) -> None:
        """Says that somebody is about to compute these blocks."""
        self._expected.update(digests)

    def disappoint(self, digests: Iterable[bytes]) -> None:
        """Takes that back, whether they have come or not."""
        for digest in digests:
            if self._expected[digest] > 1:
                self._expected[digest] -= 1
            else:
                del self._expected[digest]

    def add(self, ids: Sequence[int], chain: Chain, held: list[Block]) -> list[Block]:
        """Blocks that a sequence has filled, the next of its text, which ``chain`` knows so far. They are put behind
        those that it held."""
        first, last = len(held), held[-1] if held else None
        for index, id in enumerate(ids, first):
            digest, before = chain.digests[index], last
            last = Block(id, chain.contents[index], before)
            held.append(last)
            if digest not in self._found and (before is None or before.digest is not None):
                last.digest = digest
                self._found[digest] = last
                if self._retains:
                    self._fresh.append(last)
        self.live += len(ids)
        return held[first:]

    def hold(self, blocks: Iterable[Block]) -> None:
        """One more sequence holds these."""
        for block in blocks:
            if block.users == 0:
                del self._idle[block]
            block.users += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """One sequence less holds these blocks of its text. Its end becomes idle first, so no block outlives the one
        before it."""
        for block in reversed(blocks):
            block.users -= 1
            if block.users == 0:
                if block.kept:
                    self._idle[block] = None
                else:
                    self.live -= 1
                    self._forget(block)

    def keeps(self, most: int) -> list[int]:
        """Ids that the next plan must keep, ``most`` at the most. To be asked before its sequences are released."""
        kept: list[int] = []
        while self._fresh and len(kept) < most:
            block = self._fresh.popleft()
            if block.users:
                assert block.id is not None  # what is held is on the device
                block.kept = True
                kept.append(block.id)
        return kept

    def evict(self, count: int) -> tuple[list[int], list[tuple[Block, int]]]:
        """Gives up so many idle blocks.

        Returns:
          Their ids, which the next plan must drop; and of those that are wanted the ones, with their ids, that must be
          copied to the host before.
        """
        dropped, stores = [], []
        for block in [block for block, _ in zip(self._idle, range(count), strict=False)]:
            del self._idle[block]
            id, block.kept = block.id, False
            assert id is not None
            dropped.append(id)
            block.id = None
            if block.wanted and not block.stored and self._makes_room():
                block.stored = True
                self._stored[block] = None
                stores.append((block, id))
            self.live -= 1
            if not block.stored:
                self._forget(block)
        return dropped, [(block, id) for block, id in stores if block.stored]

    def _makes_room(self) -> bool:
        """Whether the host has room for one more copy, if need be in place of another: ends go before beginnings, and
        without its beginning an end is of no use."""
        if self.stored < self._room:
            return True
        oldest = next((block for block in self._stored if not block.coming), None)
        if oldest is not None:
            self._discard(oldest)
        return oldest is not None

    def want(self, blocks: Iterable[Block]) -> None:
        """One more sequence has paused that wants these back."""
        for block in blocks:
            block.wanted += 1

    def unwant(self, blocks: Sequence[Block]) -> None:
        """One less."""
        for block in reversed(blocks):
            block.wanted -= 1
            if not block.wanted and block.stored and not block.coming:
                self._discard(block)

    def fetch(self, blocks: Iterable[Block]) -> None:
        """Says that these are on their way from the host to the device."""
        for block in blocks:
            block.coming = True
            self.live += 1

    def arrive(self, arrivals: Sequence[tuple[Block, int]]) -> None:
        """Blocks that were fetched, in the order of their texts, are on the device again, by these ids.

        They become idle as if they had been released just now: ends before beginnings, and all before what they follow.
        """
        for block, id in reversed(arrivals):
            block.id, block.coming, block.kept = id, False, True
            self._idle[block] = None
            if not block.wanted:
                self._discard(block)
        fetched = {block for block, _ in arrivals}
        for block in [block.before for block, _ in arrivals if block.before not in fetched]:
            while block is not None:
                if block in self._idle:
                    del self._idle[block]
                    self._idle[block] = None
                block = block.before

    def lose(self, block: Block) -> None:
        """The host could not keep its copy of a block; if the block was on its way, it will not come."""
        if not block.stored:
            return
        block.stored = False
        del self._stored[block]
        if block.coming:
            block.coming = False
            self.live -= 1
        if block.id is None:
            self._forget(block)

    def discards(self) -> list[Block]:
        """Blocks whose copies the host can do without from now on."""
        discards, self._discards = self._discards, []
        return discards

    def _discard(self, block: Block) -> None:
        block.stored = False
        del self._stored[block]
        self._discards.append(block)
        if block.id is None:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self._found[block.digest]
            block.digest = None
