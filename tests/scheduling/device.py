"""A device in plain Python: it carries out schedules to the letter, and knows what is in every block.

It generates tokens by a rule of the text so far, so that whoever reads a block that holds another text is found out.
Nothing here knows how the scheduler thinks.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from jpaged.groups import Group, Sequence
from jpaged.prefix import Block, Chain, PrefixCache, sha256
from jpaged.schedule import Schedule, StepLimits
from jpaged.scheduler import Scheduler


def next_token(text: list[int], stream: int) -> int:
    """What the model says after a text; samples of one prompt differ."""
    return (sum((i + 1) * token for i, token in enumerate(text[-7:])) + 3 * stream + len(text)) % 5


def selected(texts: list[list[int]]) -> list[tuple[int, int]]:
    """Which beam each beam goes on from, and its token. Some die, some go on twice."""
    seed = sum(texts[0][-3:]) + len(texts[0])
    return [
        (parent := (j * (1 + seed % 3) + seed) % len(texts), next_token(texts[parent], j)) for j in range(len(texts))
    ]


@dataclasses.dataclass
class Sample:
    """A sample as its caller sees it."""

    prompt: list[int]
    stream: int
    max_tokens: int
    ends: int  # after so many tokens, which only the device knows
    beams: int = 0  # how many there are, if it is one
    tokens: list[int] = dataclasses.field(default_factory=list)
    over: str | None = None

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def expected(self) -> list[int]:
        if self.beams:
            texts = [list(self.prompt)] * self.beams
            for _ in range(min(self.ends, self.max_tokens)):
                texts = [texts[parent] + [token] for parent, token in selected(texts)]
            return texts[self.stream][len(self.prompt) :]
        text = list(self.prompt)
        while len(text) < len(self.prompt) + min(self.ends, self.max_tokens):
            text.append(next_token(text, self.stream))
        return text[len(self.prompt) :]


@dataclasses.dataclass
class Slot:
    """A sequence on the device: its table, and its tokens with the one to run next."""

    sample: Sample
    table: list[int] = dataclasses.field(default_factory=list)
    length: int = 0
    text: list[int] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.text) >= len(self.sample.prompt) + min(self.sample.ends, self.sample.max_tokens)


class Device:
    """Blocks with contents and references; see `jpaged.tables` for the rules."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int):
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self.contents: list[list[int]] = [[] for _ in range(num_blocks)]
        self.slots: list[Slot | None] = [None] * num_slots
        self.kept: collections.Counter[int] = collections.Counter()
        self.host: dict[Block, list[int]] = {}
        self.lost: list[Block] = []
        self.forgets = 0.0  # how likely it is that the host has no memory for a block

    @property
    def used(self) -> int:
        return sum(refs > 0 for refs in self.refs)

    def check(self) -> None:
        """References are holders."""
        holders = collections.Counter(self.kept)
        for slot in self.slots:
            if slot is not None:
                assert len(slot.table) == -(-slot.length // self.block_size)
                holders.update(slot.table)
        assert [holders[id] for id in range(len(self.refs))] == self.refs
        assert all(count <= 1 for count in self.kept.values())

    def run(self, plan: Schedule) -> Ran:
        """Carries out a step."""
        for block, id in plan.stores:
            assert self.refs[id] and len(self.contents[id]) == self.block_size
            if random.random() < self.forgets:
                self.lost.append(block)
            else:
                self.host[block] = list(self.contents[id])
        for id in plan.keeps:
            assert self.refs[id] > 0
            self.refs[id] += 1
            self.kept[id] += 1
        for number in plan.freed:
            slot = self.slots[number]
            assert slot is not None
            self._release(slot.table)
            self.slots[number] = None
        for id in plan.drops:
            assert self.kept[id] == 1
            self.kept[id] -= 1
            self._release([id])
        for start in plan.started:
            assert self.slots[start.slot] is None
            sample: Sample = start.sequence.key
            slot = self.slots[start.slot] = Slot(sample)
            for id in start.block_ids:
                assert self.refs[id] > 0, "attached to a block that is free"
                self.refs[id] += 1
                slot.table.append(id)
            slot.length = len(start.block_ids) * self.block_size
            slot.text = [token for id in start.block_ids for token in self.contents[id]]
            assert slot.text == sample.text[: slot.length], "another's text"
        found = []
        beams = {sequence for group in plan.beams for sequence in group.sequences}
        for row, sequence in enumerate(plan.sequences):
            number, source = int(plan.slots_R[row]), int(plan.sources_R[row])
            before = 0
            made: list[int] = []
            if source != row:
                assert self.slots[number] is None
                twin = self.slots[int(plan.slots_R[source])]
                assert twin is not None
                slot = self.slots[number] = Slot(sequence.key, list(twin.table), twin.length, twin.text[: twin.length])
                for id in slot.table:
                    self.refs[id] += 1
                before = slot.length
                if plan.samples_R[row] and sequence not in beams:
                    made.append(next_token(slot.text, slot.sample.stream))
                    slot.text.append(made[0])
                elif not plan.samples_R[row]:
                    slot.text.append(slot.sample.text[slot.length])
            else:
                slot = self.slots[number]
                assert slot is not None and slot.sample is sequence.key
                before = slot.length
                if plan.prefills_R[row]:
                    assert slot.length == plan.starts_R[row]
                    count = int(plan.counts_R[row])
                    ends = before + count
                    slot.text[before:] = slot.sample.text[before : ends if plan.samples_R[row] else ends + 1]
                    self._grow(slot, count)
                    if plan.samples_R[row] and sequence not in beams:
                        made.append(next_token(slot.text, slot.sample.stream))
                        slot.text.append(made[0])
                elif sequence not in beams:
                    for _ in range(plan.steps):
                        if not slot.done:
                            self._grow(slot, 1)
                            made.append(next_token(slot.text, slot.sample.stream))
                            slot.text.append(made[-1])
            filled = slot.table[before // self.block_size : slot.length // self.block_size]
            found.append((sequence, slot.length - before, made, filled, slot.done))
        rows = {sequence: row for row, sequence in enumerate(plan.sequences)}
        saved = []
        for group in plan.beams:
            members = [rows[sequence] for sequence in group.sequences]
            slots = [self._slot(plan, row) for row in members]
            lengths = [slot.length for slot in slots]
            decodes = not plan.prefills_R[members[0]]
            for _ in range(plan.steps):
                if not slots[0].done:
                    for slot in slots if decodes else []:
                        self._grow(slot, 1)
                    self._select(slots)
            for row, slot, length in zip(members, slots, lengths, strict=True):
                grown = slot.length - length if decodes else found[row][1]
                made = slot.text[len(slot.sample.prompt) :]
                found[row] = (*found[row][:1], grown, made, found[row][3], slot.done)
            full = group.fork_len // self.block_size
            own = [id for slot in slots for id in slot.table[full:]]
            saved.append((group, len(own) - len(set(own))))
        back = []
        for block in plan.fetches:
            if block in self.lost:
                continue
            new = self._take()
            self.contents[new], self.kept[new] = list(self.host[block]), 1
            back.append((block, new))
        return Ran(found, saved, back)

    def _slot(self, plan: Schedule, row: int) -> Slot:
        slot = self.slots[int(plan.slots_R[row])]
        assert slot is not None
        return slot

    def _select(self, slots: list[Slot]) -> None:
        assert len({slot.length for slot in slots}) == 1
        chosen = selected([slot.text for slot in slots])
        tables, texts = [list(slot.table) for slot in slots], [list(slot.text) for slot in slots]
        for parent, _ in chosen:
            for id in tables[parent]:
                self.refs[id] += 1
        for slot, (parent, token) in zip(slots, chosen, strict=True):
            self._release(slot.table)
            slot.table, slot.text = list(tables[parent]), [*texts[parent], token]

    def _grow(self, slot: Slot, count: int) -> None:
        for _ in range(count):
            if slot.length % self.block_size == 0:
                slot.table.append(self._take())
            elif self.refs[slot.table[-1]] > 1:
                shared = slot.table[-1]
                slot.table[-1] = self._take()
                self.contents[slot.table[-1]] = list(self.contents[shared])
                self._release([shared])
            self.contents[slot.table[-1]].append(slot.text[slot.length])
            slot.length += 1

    def _take(self) -> int:
        free = [id for id, refs in enumerate(self.refs) if refs == 0]
        assert free, "out of blocks"
        id = random.choice(free)
        self.refs[id], self.contents[id] = 1, []
        return id

    def _release(self, ids: list[int]) -> None:
        for id in ids:
            assert self.refs[id] > 0
            self.refs[id] -= 1


@dataclasses.dataclass
class Ran:
    """What a step did.

    Attributes:
      rows: Of each row: the sequence, by how much it grew, the tokens it made (a beam: all that it has), the blocks it
        filled; if it is over.
      saved: Blocks that groups of beams save by sharing, behind the full blocks of their prompts.
      back: Blocks that came back from the host, and their ids.
    """

    rows: list[tuple[Sequence, int, list[int], list[int], bool]]
    saved: list[tuple[Group, int]]
    back: list[tuple[Block, int]]


class Server:
    """Scheduler and device, with steps read ``late`` steps after they were dispatched, as the engine does."""

    def __init__(
        self,
        *,
        slots: int,
        blocks: int,
        block_size: int,
        tokens: int,
        decode_steps: int,
        retains=True,
        hash=sha256,
        room=0,
        cache_changes: int | None = None,
    ):
        self.block_size, self.room, self._retains, self._hash = block_size, room, retains, hash
        limits = StepLimits.of(
            tokens=tokens, starts=2, attached=1000, decode_steps=decode_steps, slots=slots, block_size=block_size
        )
        if cache_changes is not None:
            limits = dataclasses.replace(limits, cache_changes=cache_changes)
        self.cache = PrefixCache(retains=retains, room=room)
        self.scheduler = Scheduler(slots, blocks, block_size, limits, self.cache, lambda tokens, blocks: room > 0)
        self.device = Device(blocks, block_size, slots)
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: collections.deque = collections.deque()
        self.plans: list[Schedule] = []
        self._arrivals = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens that did not have to be computed."""
        return sum(len(start.block_ids) for plan in self.plans for start in plan.started) * self.block_size

    @property
    def preemptions(self) -> int:
        return sum(len(plan.paused) for plan in self.plans)

    @property
    def fetched(self) -> int:
        """Blocks that came back from the host."""
        return sum(len(plan.fetches) for plan in self.plans)

    @property
    def busy(self) -> bool:
        return bool(self.in_flight) or not self.scheduler.is_idle

    def submit(
        self, prompt: list[int], max_tokens: int, n: int = 1, rank: float = 0, ends: int = 1000, beams=False
    ) -> list[Sample]:
        self._arrivals += 1
        group = Group(rank=(rank, self._arrivals), are_beams=beams, fork_len=len(prompt))
        samples = [
            Sample(prompt, stream, max_tokens, ends if beams else ends + stream, n if beams else 0)
            for stream in range(n)
        ]
        for sample in samples:
            chain = Chain(self.block_size, b"" if self._retains else b"%d" % self._arrivals, self._hash)
            chain.extend(prompt)
            limit = len(prompt) + max_tokens - 1
            sequence = Sequence(sample, group, chain, len(prompt), limit, is_twin=sample.stream > 0)
            group.sequences.append(sequence)
            self.sequences[id(sample)] = sequence
        self.scheduler.submit(group)
        return samples

    def abort(self, samples: list[Sample]) -> None:
        alive = [sample for sample in samples if sample.over is None]
        self.scheduler.finish(*(self.sequences.pop(id(sample)) for sample in alive))
        for sample in alive:
            sample.over = "abort"

    def step(self, late: int = 1) -> None:
        plan = self.scheduler.schedule(in_flight=bool(self.in_flight))
        self.discard()
        if plan is not None:
            assert plan.counts_R.sum() <= self.scheduler._limits.tokens
            self.plans.append(plan)
            self.in_flight.append(self.device.run(plan))
            self.device.check()
        if self.in_flight and (len(self.in_flight) > late or plan is None):
            self.read()
        self.discard()

    def discard(self) -> None:
        """The host gives up copies that nobody wants any more."""
        for block in self.cache.discards():
            self.device.host.pop(block, None)

    def read(self) -> None:
        ran = self.in_flight.popleft()
        finished = []
        for sequence, grown, made, filled, over in ran.rows:
            sample = sequence.key
            if sequence.slot is None:
                continue
            first = sequence.kv_len
            sequence.kv_len += grown
            if sample.over is not None:
                continue
            sample.tokens = made if sample.beams and made else sample.tokens + made
            if over:
                sample.over = "length"
                finished.append(self.sequences.pop(id(sample)))
            if not sample.beams:
                sequence.chain.extend(sample.text)
            self.scheduler.filled(sequence, first // self.block_size, filled)
            if sequence.kv_len >= sequence.prefill_len:
                self.scheduler.computed(sequence)
        for group, blocks in ran.saved:
            if group in self.scheduler.running:
                self.scheduler.shared(group, blocks)
        self.cache.arrive(ran.back)
        for block in self.device.lost:
            self.cache.lose(block)
        self.device.lost.clear()
        self.scheduler.finish(*finished)
        if not self.in_flight:
            self.balance()

    def balance(self) -> None:
        """With nothing in flight the books are exact, but for what the next plan gives back."""
        leaving = [s for s in self.scheduler._leaving] + list(self.scheduler._freed)
        exact = len(self.device.refs) - self.device.used
        assert self.scheduler.ledger.free <= exact or leaving
        if not leaving and not any(sequence_shares(s) for s in self.scheduler.occupants):
            assert self.scheduler.ledger.free == exact, (self.scheduler.ledger.free, exact)


def sequence_shares(sequence: Sequence | None) -> bool:
    """Whether its last block may still be its twins'."""
    return sequence is not None and sequence.kv_len in (sequence.prefill_len, sequence.group.fork_len)
