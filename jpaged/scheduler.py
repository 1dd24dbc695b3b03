"""Who runs in the next step, and who must pause: on the host, in integers.

Groups run in order of rank, with prompts in chunks: a step's token budget goes to running sequences first, one token
each, then to prompts under way, then to new ones while they fit. Memory is booked by counts (`ledger`); when those who
run need more than there is, the last in rank pauses, the whole group, and later computes its tokens again, or gets
their blocks back from the host. Some group always advances: the first never pauses while there is another, and what can
never fit has been refused.

It knows lengths, slots and digests; it knows neither tokens, nor text, nor the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np

from jpaged.groups import Group, Sequence
from jpaged.ledger import Ledger, blocks_for
from jpaged.prefix import Block, Found, PrefixCache
from jpaged.schedule import Draft, Rows, Schedule, Start, StepLimits
from jpaged.seats import Seats

MOST_OVERTAKEN = 64  # groups that wait for others' blocks and are passed over in one step, for each look costs time


class Scheduler:
    """Groups that wait and groups that run.

    Args:
      num_slots: Sequences that can run at once.
      num_blocks, block_size: Of the pool.
      limits: Of a step.
      cache: The prefix cache.
      prefers_swap: Whether a group that pauses, with so many tokens in so many blocks of the cache's books, should have
        these copied to the host if they must go, rather than compute its tokens again.

    Attributes:
      waiting, running: Groups in order of rank.
    """

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        limits: StepLimits,
        cache: PrefixCache,
        prefers_swap: Callable[[int, int], bool] = lambda tokens, blocks: False,
    ):
        self._limits, self._cache, self._prefers_swap = limits, cache, prefers_swap
        self._ledger = Ledger(num_blocks, block_size, num_slots, cache)
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self._seats = Seats(num_slots, self._ledger)
        self._leaving: list[Sequence] = []
        self._freed: list[int] = []  # slots that the next plan frees
        self._keeps: list[int] = []
        self._paused: list[Group] = []  # before the next plan
        self._beams: list[Group] = []  # groups of beams that run

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def occupants(self) -> list[Sequence | None]:
        """The sequence in each slot, or None."""
        return self._seats.occupants

    @property
    def idle_blocks(self) -> int:
        """Blocks that only the prefix cache holds."""
        return self._cache.idle

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self._leaving or self._freed or self._keeps)

    def kept_ids(self) -> list[int]:
        """Blocks of which the cache has a reference by now, if every plan was dispatched."""
        coming = set(self._keeps)
        return [id for id in self._cache.kept_ids if id not in coming]

    def submit(self, *groups: Group) -> None:
        """Groups that wait from now on."""
        for group in groups:
            bisect.insort(self.waiting, group, key=lambda group: group.rank)

    def finish(self, *sequences: Sequence) -> None:
        """These are over; the next step frees what they hold. Each has been submitted, and is told once."""
        for sequence in sequences:
            group = sequence.group
            group.sequences.remove(sequence)
            self._seats.save(group, 0)  # what it shared may be another's own from now on
            self._cache.unwant(sequence.wanted)
            sequence.wanted = []
            if sequence.slot is not None:
                self._leaving.append(sequence)
        for group in {sequence.group: None for sequence in sequences}:
            if not group.sequences:
                if group in self.running:
                    self._stop(group)
                else:
                    self.waiting.remove(group)

    def computed(self, sequence: Sequence) -> None:
        """All that the sequence was to prefill is there; nobody has to wait for more."""
        self._cache.disappoint(sequence.expected)
        sequence.expected = []

    def filled(self, sequence: Sequence, first: int, block_ids: list[int]) -> None:
        """A sequence that runs has filled these blocks of its table, from column ``first``. Those that its chain does
        not speak for, past a stop, stay out of the books."""
        if first != len(sequence.held):  # behind what beams share nothing is booked
            return
        new = self._cache.add(block_ids[: len(sequence.chain) - first], sequence.chain, sequence.held)
        self._ledger.held_S[sequence.slot] += len(new)
        if sequence.twins:
            self._share(sequence, new)

    def _share(self, sequence: Sequence, new: list[Block]) -> None:
        """Enters blocks that a sequence has filled for the twins that share them, too."""
        both = new[: max(0, sequence.group.fork_len // self._ledger.block_size - (len(sequence.held) - len(new)))]
        twins = [twin for twin in sequence.twins if twin.slot is not None]
        for twin in twins:
            twin.held += both
            self._ledger.held_S[twin.slot] += len(both)
            self._cache.hold(both)
        self._seats.save(sequence.group, sequence.group.saved - len(twins) * len(both))  # they are in the books now

    def shared(self, group: Group, blocks: int) -> None:
        """A step of a group of beams was read, after which they saved so many blocks by sharing what is not booked."""
        group.losses.popleft()
        self._seats.save(group, blocks - sum(group.losses))

    def schedule(self, *, in_flight: bool) -> Schedule | None:
        """Plans the next step, which from now on counts as dispatched.

        Args:
          in_flight: Whether steps are yet to be read.

        Returns:
          None if there is nothing to do until a step in flight is read, or nothing at all.
        """
        self._keeps += self._cache.keeps(self._limits.cache_changes - len(self._keeps))
        for sequence in self._leaving:
            self._vacate(sequence)
        self._leaving.clear()
        paused = False
        while True:
            decoding = self._seats.decoding(self._beams)
            draft = Draft(self._limits.tokens - len(decoding), self._ledger.free - self._seats.growth(decoding, 1))
            if self._within_reach(draft) >= 0:
                self._continue_prompts(draft)
                if self.waiting and not paused and not draft.is_blocked:
                    self._admit(draft, self._seats.next_growth(decoding))
                if len(decoding) or draft.chunks or draft.fetches or not self.running:
                    break
            if in_flight:
                return None
            self._pause(self.running[-1])
            paused = True
        if not (len(decoding) or draft.chunks or draft.fetches or self._freed or self._keeps):
            return None
        return self._book_step(draft, decoding)

    def _within_reach(self, draft: Draft, taken: int = 0) -> int:
        """Blocks that the step can still have, once so many that are idle are taken."""
        return draft.free + min(self._cache.idle - taken, self._limits.cache_changes)

    def _continue_prompts(self, draft: Draft) -> None:
        """Plans the next chunks of the groups that run, in order of rank."""
        if not self._seats.are_prefilling:
            return
        for group in self.running:
            for sequence in group.sequences:
                if draft.tokens <= 0 or draft.is_blocked:
                    return
                slot = sequence.slot
                assert slot is not None
                if not self._seats.started_S[slot]:
                    if not sequence.is_twin and not (group.alone and any(map(self._seats.runs, group.sequences))):
                        self._start(draft, sequence)
                    if group.alone:
                        break
                elif self._ledger.bound_S[slot] < sequence.prefill_len:
                    self._chunk(draft, sequence)

    def _start(self, draft: Draft, sequence: Sequence) -> None:
        """Plans a sequence's first chunk, behind the blocks that are there already, unless others compute the next."""
        if len(draft.starts) >= self._limits.starts:
            return
        hits, away, comes = self._find(sequence)
        if comes or sum(len(start.block_ids) for start in draft.starts) + len(hits) > self._limits.attached:
            return
        if away:
            self._fetch(draft, away)
            return
        taken = sum(block.users == 0 for block in hits)  # what was idle is no longer to be had
        first, target = len(hits) * self._ledger.block_size, sequence.target()
        if self._reach(self._within_reach(draft, taken), first) <= 0:
            draft.is_blocked = True
            return
        slot = sequence.slot
        assert slot is not None
        self._cache.hold(hits)
        self._cache.unwant(sequence.wanted)
        sequence.held, sequence.wanted = hits, []
        self._seats.start(sequence, first)
        sequence.expected = sequence.chain.digests[len(hits) : target // self._ledger.block_size]
        self._cache.expect(sequence.expected)
        draft.starts.append(Start(sequence, slot, tuple(block.id for block in hits if block.id is not None)))
        self._chunk(draft, sequence)

    def _find(self, sequence: Sequence) -> Found:
        """What a sequence can begin with. The last token is always computed, for its logits, and so is its block."""
        if not sequence.group.reads_cache:
            return Found([], [], comes=False)
        return self._cache.find(sequence.chain, (sequence.target() - 1) // self._ledger.block_size)

    def _fetch(self, draft: Draft, away: list[Block]) -> None:
        """Plans the way back of as many blocks as there is room for."""
        fetched = away[: max(0, self._within_reach(draft))]
        self._cache.fetch(fetched)
        draft.fetches += fetched
        draft.free -= len(fetched)
        draft.is_blocked = len(fetched) < len(away)

    def _reach(self, blocks: int, tokens: int) -> int:
        """By how much a sequence of so many tokens can grow with so many blocks more."""
        return (int(blocks_for(tokens, self._ledger.block_size)) + blocks) * self._ledger.block_size - tokens

    def _chunk(self, draft: Draft, sequence: Sequence) -> None:
        first = int(self._ledger.bound_S[sequence.slot])
        count = min(draft.tokens, sequence.target(first) - first, self._reach(self._within_reach(draft), first))
        if count <= 0:
            draft.is_blocked = True
            return
        size = self._ledger.block_size
        draft.free -= blocks_for(first + count, size) - blocks_for(first, size)
        draft.tokens -= count
        draft.chunks.append((sequence, first, count))

    def _admit(self, draft: Draft, reserved: int) -> None:
        """Gives slots to groups that wait, in order of rank, until one does not fit.

        Who waits for a block that another computes is overtaken. Those that run keep what their prompts still need, and
        the blocks that are reserved for those that decode, lest somebody pauses at once.
        """
        empty = self._seats.empty
        size, index = self._ledger.block_size, 0
        spare = draft.free + self._cache.idle - reserved
        missing_S = blocks_for(self._seats.prefill_S, size) - blocks_for(self._ledger.bound_S, size)
        spare -= int(np.maximum(0, missing_S).sum())
        spare += sum(blocks_for(first + n, size) - blocks_for(first, size) for _, first, n in draft.chunks)
        while index < min(len(self.waiting), MOST_OVERTAKEN) and draft.tokens > 0 and not draft.is_blocked:
            group = self.waiting[index]
            if len(group.sequences) > len(empty) or len(draft.starts) >= self._limits.starts:
                return
            hits, away, comes = self._find(group.sequences[0])
            if comes:
                index += 1
                continue
            need = int(blocks_for(group.sequences[0].prefill_len, size)) - sum(block.users > 0 for block in hits)
            shared = group.fork_len // size
            need += sum(max(1, int(blocks_for(s.prefill_len, size)) - shared) for s in group.sequences[1:])
            # While nobody runs, only the first may take more than there is: two would take it from each other for ever.
            if need > spare and (self.running or draft.chunks or index):
                return
            spare -= need
            if away:
                self._fetch(draft, away)
                index += 1
                continue
            del self.waiting[index]
            self._run(group)
            for sequence in group.sequences:
                self._seats.take(sequence, empty.pop(0))
            self._start(draft, group.sequences[0])

    def _book_step(self, draft: Draft, decoding: np.ndarray) -> Schedule:
        """Enters the step into the books."""
        ledger, rows = self._ledger, Rows()
        for sequence, first, count in draft.chunks:
            ledger.bound_S[sequence.slot] = first + count
        steps = 1
        if len(decoding) and not draft.chunks and not self.waiting:
            steps, room = self._limits.decode_steps, ledger.free + min(self._cache.idle, self._limits.cache_changes)
            while steps > 1 and self._seats.growth(decoding, steps) > room:
                steps //= 2
        bound = ledger.bound_S[decoding]
        beams = self._seats.unshare(decoding, steps, self._beams)
        self._seats.grow(decoding, steps)
        drops, stores = self._cache.evict(max(0, -ledger.free))
        forks: list[tuple[int, Sequence]] = []
        for row, (sequence, first, count) in enumerate(draft.chunks):
            group, end = sequence.group, first + count
            samples = end == sequence.prefill_len and not group.resumes_beams
            rows.chunk(sequence, first, count, samples=samples)
            if end == group.fork_len:
                forks += [(row, twin) for twin in self._fork(sequence)]
            if group.are_beams and samples:
                group.losses.append(0)
                beams.append(group)
        for source, twin in forks:
            rows.twin(twin, twin.group.fork_len, source, samples=not twin.group.resumes_beams)
        freed, self._freed = tuple(self._freed), []
        paused, self._paused = tuple(self._paused), []
        keeps, self._keeps = tuple(self._keeps), []
        occupants: list[Any] = self.occupants  # of slots that decode, so there are some
        fields = rows.finish(decoding, [occupants[slot] for slot in decoding.tolist()], bound)
        taking_part = (*fields["sequences"], *(start.sequence for start in draft.starts)) if self._beams else ()
        return Schedule(
            keeps=keeps,
            freed=freed,
            drops=tuple(drops),
            stores=tuple((block, id) for block, id in stores if block.stored),  # twins want nothing back any more
            fetches=tuple(draft.fetches),
            started=tuple(draft.starts),
            steps=steps,
            has_beams=any(sequence.group.are_beams for sequence in taking_part),
            beams=tuple(beams),
            paused=paused,
            **fields,
        )

    def _fork(self, source: Sequence) -> list[Sequence]:
        """The twins that start once a group's prompt is computed: they hold what their source holds."""
        group = source.group
        twins = [sequence for sequence in group.sequences if sequence.is_twin]
        for twin in twins:
            twin.is_twin = False
            self._cache.unwant(twin.wanted)
            twin.held, twin.wanted = list(source.held), []
            self._cache.hold(twin.held)
            self._seats.start(twin, group.fork_len)
        source.twins = twins
        # A last block that is not full becomes each one's own: at once in beams that go on, else when they next grow.
        size = self._ledger.block_size
        shared = group.fork_len // size if group.resumes_beams else blocks_for(group.fork_len, size)
        if twins:
            self._seats.save(group, len(twins) * (shared - len(source.held)))
        return twins

    def _pause(self, group: Group) -> None:
        """Takes the memory of a group, which will compute its tokens again. No step is in flight.

        A group that cannot even run by itself goes on one sequence after another.
        """
        if len(self.running) == 1:
            assert len(group.sequences) > 1, "a sequence that the pool cannot hold was let in"
            group.alone = True
        held = {block: None for sequence in group.sequences for block in sequence.held}
        swaps = self._prefers_swap(sum(sequence.kv_len for sequence in group.sequences), len(held))
        for sequence in group.sequences:
            if sequence.kv_len >= sequence.prefill_len:
                group.resumes = True
                sequence.prefill_len = sequence.kv_len + (not group.are_beams)  # the last token has no KV yet
            if group.resumes_beams:
                sequence.is_twin = sequence is not group.sequences[0]
            if swaps and sequence.held:
                sequence.wanted = list(sequence.held)
                self._cache.want(sequence.wanted)
            self._vacate(sequence)
        self._seats.save(group, 0)
        group.losses.clear()
        self._stop(group)
        self.submit(group)
        self._paused.append(group)

    def _run(self, group: Group) -> None:
        bisect.insort(self.running, group, key=lambda group: group.rank)
        if group.are_beams:
            self._beams.append(group)

    def _stop(self, group: Group) -> None:
        self.running.remove(group)
        if group.are_beams:
            self._beams.remove(group)

    def _vacate(self, sequence: Sequence) -> None:
        """Releases what a sequence holds; the next plan frees its slot."""
        slot = sequence.slot
        assert slot is not None
        self._cache.release(sequence.held)
        self._cache.disappoint(sequence.expected)
        if self._seats.leave(sequence):
            self._freed.append(slot)
