"""KV blocks in the memory of the host: their way there and back, and whether it pays.

It knows blocks, arrays and seconds. When a block goes and comes is for the prefix cache and the scheduler to say.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jpaged.cache import KVLayout
from jpaged.prefix import Block, PrefixCache
from jpaged.schedule import Schedule
from jpaged.state import DecodeState
from jpaged.step import Steps

BATCH = 16  # blocks that go at once


class Swapper:
    """Moves blocks.

    Args:
      layout: Of the KV cache.
      steps: The compiled functions that read and write blocks.
      cache: The prefix cache, which is told what came back and what was lost.

    Attributes:
      costs: What moving was measured to take.
    """

    def __init__(self, layout: KVLayout, steps: Steps, cache: PrefixCache):
        self._layout, self._steps, self._cache = layout, steps, cache
        self._space = SwapSpace()
        self.costs = Costs()

    def store(self, state: DecodeState, planned: Schedule) -> tuple[list[list[Block]], list[jax.Array]]:
        """Begins to copy what the plan is about to drop; returns the blocks of each array, and the arrays."""
        self.discard()
        batches, arrays = [], []
        stores = [(block, id) for block, id in planned.stores if block.stored]  # who wanted others may be gone by now
        for batch in _batches(stores):
            ids = np.full(BATCH, self._layout.num_blocks, np.int32)
            ids[: len(batch)] = [id for _, id in batch]
            arrays.append(self._steps.read(state.cache, ids))
            batches.append([block for block, _ in batch])
        for block, _ in stores:
            self._space.order(block)
        return batches, arrays

    def discard(self) -> None:
        """Gives up copies that nobody wants any more."""
        for block in self._cache.discards():
            self._space.discard(block)

    def take(self, batches: Sequence[list[Block]], arrays: Sequence[jax.Array]) -> None:
        """Keeps copies that have arrived. For which there is no memory, those blocks are lost."""
        for blocks, array in zip(batches, arrays, strict=True):
            try:
                data = np.asarray(array)
            except MemoryError:
                data = [None] * len(blocks)
            for block, part in zip(blocks, data, strict=False):
                if not self._space.put(block, part):
                    self._cache.lose(block)

    def lay_out(
        self, planned: Schedule, on_their_way: Iterable[tuple[list[list[Block]], list[jax.Array]]]
    ) -> list[tuple[list[Block], np.ndarray]]:
        """What the plan fetches, as arrays for `Steps.fetch`, with the blocks in each.

        Args:
          planned: The plan.
          on_their_way: What `store` has returned and `take` not got yet: it may be wanted back already.
        """
        if any(self._space.is_ordered(block) for block in planned.fetches):
            for batches, arrays in on_their_way:
                self.take(batches, arrays)
        found: list[tuple[Block, np.ndarray]] = []
        for block in planned.fetches:
            data = self._space.get(block)
            if data is not None:
                found.append((block, data))
            else:
                self._cache.lose(block)
        laid_out = []
        for batch in _batches(found):
            blocks = [block for block, _ in batch]
            try:
                part = self._empty()
            except MemoryError:
                for block in blocks:
                    self._space.discard(block)
                    self._cache.lose(block)
                continue
            for place, (_, data) in enumerate(batch):
                part[place] = data
            laid_out.append((blocks, part))
        return laid_out

    def arrived(self, batches: Sequence[list[Block]], ids: Sequence[np.ndarray]) -> None:
        """Tells the cache of blocks that are on the device again."""
        pairs = [
            pair
            for blocks, found in zip(batches, ids, strict=True)
            for pair in zip(blocks, found.tolist(), strict=False)
        ]
        assert all(id < self._layout.num_blocks for _, id in pairs), "no room for blocks that the books had room for"
        self._cache.arrive(pairs)

    def measure(self, state: DecodeState) -> DecodeState:
        """Times the way there and back, compiling it first. Nothing changes, but the state is another array."""
        nothing = np.full(BATCH, self._layout.num_blocks, np.int32)
        for _ in range(2):
            begin = time.perf_counter()
            data = np.asarray(self._steps.read(state.cache, nothing))
            state, ids = self._steps.fetch(state, data, np.int32(0))
            jax.block_until_ready(ids)
            seconds = time.perf_counter() - begin
        self.costs.move = seconds / BATCH
        return state

    def _empty(self) -> np.ndarray:
        layers, _, size, two, heads, dim = self._layout.canonical_shape
        return np.zeros((BATCH, layers, size, two, heads, dim), jax.numpy.dtype(self._layout.dtype))


class SwapSpace:
    """Copies of blocks. They arrive as parts of arrays, some while after they were ordered."""

    def __init__(self) -> None:
        self._kept: dict[Block, np.ndarray] = {}
        self._ordered: dict[Block, None] = {}

    def __len__(self) -> int:
        return len(self._kept) + len(self._ordered)

    def order(self, block: Block) -> None:
        """A copy of it is on its way."""
        self._ordered[block] = None

    def put(self, block: Block, data: np.ndarray | None) -> bool:
        """Takes a copy, if anybody still wants it. False if there is no memory for it, or there was none before."""
        if block not in self._ordered:
            return True
        del self._ordered[block]
        try:
            copy = None if data is None else np.array(data)  # of its own: the part would keep the whole
        except MemoryError:
            copy = None
        if copy is not None:
            self._kept[block] = copy
        return copy is not None

    def get(self, block: Block) -> np.ndarray | None:
        """Its KV; None if it was lost."""
        return self._kept.get(block)

    def is_ordered(self, block: Block) -> bool:
        return block in self._ordered

    def discard(self, block: Block) -> None:
        self._kept.pop(block, None)
        self._ordered.pop(block, None)


@dataclasses.dataclass
class Costs:
    """What was measured of computing tokens and of moving blocks.

    Attributes:
      compute: Seconds of a token in steps that compute prompts, a mean in which older steps count less and less.
      move: Seconds of a block on its way to the host and back.
    """

    compute: float | None = None
    move: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        """A step with prompts has computed so many tokens, those of sequences that decode among them."""
        new = seconds / max(1, tokens)
        self.compute = new if self.compute is None else 0.8 * self.compute + 0.2 * new

    def prefer_swap(self, tokens: int, blocks: int) -> bool:
        """Whether moving these blocks takes less time than computing these tokens; while something is not known, no."""
        if self.compute is None or self.move is None or not blocks:
            return False
        return blocks * self.move < tokens * self.compute


def _batches(items: Sequence) -> list[Sequence]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
