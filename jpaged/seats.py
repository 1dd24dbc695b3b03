"""Who sits in which slot, how far each has come, and by how much they can still grow. Arrays over slots, no policy."""

from __future__ import annotations

import numpy as np

from jpaged.groups import Group, Sequence
from jpaged.ledger import Ledger, blocks_for


class Seats:
    """The slots.

    Args:
      num_slots: How many there are.
      ledger: Where their lengths are booked.

    Attributes:
      occupants: The sequence in each slot, or None.
      started_S: Whether it has begun to compute.
      prefill_S: Tokens that it has to compute before one can be sampled; 0 for a twin that has not begun.
      limit_S: The most tokens whose KV it can hold.
    """

    def __init__(self, num_slots: int, ledger: Ledger):
        self._ledger = ledger
        self.occupants: list[Sequence | None] = [None] * num_slots
        self.started_S = np.zeros(num_slots, np.bool_)
        self.prefill_S = np.zeros(num_slots, np.int64)
        self.limit_S = np.zeros(num_slots, np.int64)
        self._savers: dict[Group, None] = {}  # groups that save blocks by sharing

    @property
    def empty(self) -> list[int]:
        return [slot for slot, occupant in enumerate(self.occupants) if occupant is None]

    @property
    def are_prefilling(self) -> bool:
        """Whether anybody has prompt tokens to compute."""
        ledger = self._ledger
        return bool((~self.started_S | (ledger.bound_S < self.prefill_S))[self.prefill_S > 0].any())

    def decoding(self, beams: list[Group]) -> np.ndarray:
        """Slots that have a token to run. Beams have when all of their group do."""
        bound_S = self._ledger.bound_S
        ready_S = self.started_S & (bound_S >= self.prefill_S) & (bound_S < self.limit_S)
        for group in beams:
            slots = _slots(group)
            ready_S[slots] = ready_S[slots].all()
        return np.flatnonzero(ready_S)

    def runs(self, sequence: Sequence) -> bool:
        return sequence.slot is not None and bool(self.started_S[sequence.slot])

    def take(self, sequence: Sequence, slot: int) -> None:
        """A sequence gets a slot."""
        sequence.slot = slot
        self.occupants[slot] = sequence
        self.prefill_S[slot] = 0 if sequence.is_twin else sequence.prefill_len
        self.limit_S[slot] = sequence.limit

    def start(self, sequence: Sequence, tokens: int) -> None:
        """It begins, with so many tokens and the blocks that it holds."""
        slot = sequence.slot
        self.started_S[slot] = True
        self.prefill_S[slot] = sequence.prefill_len
        self._ledger.bound_S[slot], self._ledger.held_S[slot] = tokens, len(sequence.held)
        sequence.kv_len = tokens

    def leave(self, sequence: Sequence) -> bool:
        """It gives up its slot; whether it had begun, so that there is something to free."""
        slot = sequence.slot
        assert slot is not None
        started = bool(self.started_S[slot])
        self.occupants[slot] = None
        self.started_S[slot] = False
        for array in (self.prefill_S, self.limit_S, self._ledger.bound_S, self._ledger.held_S):
            array[slot] = 0
        sequence.slot, sequence.held, sequence.expected, sequence.twins, sequence.kv_len = None, [], [], [], 0
        return started

    def grow(self, slots: np.ndarray, steps: int) -> None:
        """Books so many tokens more for these slots, or as many as up to their limits."""
        bound_S = self._ledger.bound_S
        bound_S[slots] = np.minimum(bound_S[slots] + steps, self.limit_S[slots])

    def growth(self, slots: np.ndarray, steps: int) -> int:
        """The most blocks that they need for that, and that groups may need beside for what they share no more."""
        return self._lengthening(slots, steps) + sum(min(g.saved, self._loss(g, steps)) for g in self._savers)

    def next_growth(self, slots: np.ndarray) -> int:
        """The blocks that they will need next, one each, after they have grown by a token: none at their limits."""
        size, limit = self._ledger.block_size, self.limit_S[slots]
        after = np.minimum(self._ledger.bound_S[slots] + 1, limit)
        return int((blocks_for(limit, size) > blocks_for(after, size)).sum())

    def save(self, group: Group, blocks: int) -> None:
        """A group saves so many blocks, at the least."""
        self._ledger.saved += max(0, blocks) - group.saved
        group.saved = max(0, blocks)
        if group.saved:
            self._savers[group] = None
        else:
            self._savers.pop(group, None)

    def unshare(self, slots: np.ndarray, steps: int, beams: list[Group]) -> list[Group]:
        """Books what groups may lose of what they save, before `grow`; returns the groups of beams that grow, each with
        one more of `Group.losses`."""
        growing = set(slots.tolist()) if self._savers or beams else set()
        beams = [group for group in beams if group.sequences[0].slot in growing]
        for group in {**self._savers, **dict.fromkeys(beams)}:
            loss = self._loss(group, steps)
            self.save(group, group.saved - loss)
            if group in beams:
                group.losses.append(loss)
        return beams

    def _loss(self, group: Group, steps: int) -> int:
        """The most blocks by which a group can grow beyond what its lengths say, for it may have to unshare."""
        slots = _slots(group)
        return steps * len(slots) - self._lengthening(slots, steps)

    def _lengthening(self, slots: np.ndarray, steps: int) -> int:
        bound, size = self._ledger.bound_S[slots], self._ledger.block_size
        return int((blocks_for(np.minimum(bound + steps, self.limit_S[slots]), size) - blocks_for(bound, size)).sum())


def _slots(group: Group) -> np.ndarray:
    return np.array([sequence.slot for sequence in group.sequences], np.int64)
