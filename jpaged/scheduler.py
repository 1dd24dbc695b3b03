"""Who runs in the next step: `(queue, budget) -> (queue, schedule)`, pure and on the host.

First come, first served, with prompts in chunks: a step's token budget goes to running sequences first, one token each,
then to prompts under way, then to new ones while they fit. A sequence is admitted only if the pool can hold all that
it and the others may grow to, so that a full pool makes requests wait and never deadlocks. It knows lengths and slots;
it knows neither tokens, nor text, nor the device.
"""

import dataclasses
from typing import Any

import numpy as np

from jpaged.budget import Budget, blocks_for


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """One sample of a request, as the scheduler sees it.

    Attributes:
      key: Whose it is; the scheduler only hands it on.
      prompt_len: Tokens to prefill.
      limit: The most tokens whose KV it can ever hold: prompt and output, less the last, which nothing attends to.
    """

    key: Any
    prompt_len: int
    limit: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step may hold: tokens, sequences that start, and decode steps in one dispatch."""

    tokens: int
    admissions: int
    decode_steps: int


@dataclasses.dataclass(frozen=True)
class Queue:
    """Who waits and who runs. Arrays are never written in place.

    Attributes:
      waiting: In order of arrival.
      running: The sequence in each slot, or None.
      leaving: Slots whose sequence is over; the next step frees them.
      order_S: When each slot's sequence came; meaningless for an empty slot.
      prompt_S, limit_S: Its prompt length and limit; 0 for an empty slot.
      arrivals: Sequences admitted so far.
    """

    waiting: tuple[Sequence, ...]
    running: tuple[Sequence | None, ...]
    leaving: tuple[int, ...]
    order_S: np.ndarray
    prompt_S: np.ndarray
    limit_S: np.ndarray
    arrivals: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.leaving and all(sequence is None for sequence in self.running)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One step.

    Attributes:
      freed: Slots to free before all else.
      admitted: (slot, sequence) that start.
      slots_R: The slot of each row; rows that prefill come first.
      starts_R: Its tokens before the step; an upper bound for rows that decode.
      counts_R: Tokens that it computes: a chunk of its prompt, or 1.
      prefills_R: Whether they are prompt tokens.
      samples_R: Whether a token is sampled after them.
      steps: Decode steps; 1 if any row prefills.
    """

    freed: tuple[int, ...]
    admitted: tuple[tuple[int, Sequence], ...]
    slots_R: np.ndarray
    starts_R: np.ndarray
    counts_R: np.ndarray
    prefills_R: np.ndarray
    samples_R: np.ndarray
    steps: int

    @property
    def decodes_only(self) -> bool:
        return not self.prefills_R.any()


def create(num_slots: int) -> Queue:
    """Nobody waits, nobody runs."""
    zeros = np.zeros(num_slots, np.int64)
    return Queue((), (None,) * num_slots, (), zeros, zeros, zeros)


def submit(queue: Queue, sequences: tuple[Sequence, ...]) -> Queue:
    """Appends sequences to those that wait."""
    return dataclasses.replace(queue, waiting=queue.waiting + sequences)


def finish(queue: Queue, slots: list[int]) -> Queue:
    """The sequences in these slots are over; the next step frees them."""
    return dataclasses.replace(queue, leaving=(*queue.leaving, *slots))


def withdraw(queue: Queue, keys: set) -> Queue:
    """Takes sequences that wait out of the queue."""
    return dataclasses.replace(queue, waiting=tuple(s for s in queue.waiting if s.key not in keys))


def schedule(queue: Queue, budget: Budget, limits: Limits, step: int) -> tuple[Queue, Budget, Schedule | None]:
    """Plans step number ``step``.

    Returns:
      The queue and the budget once it is dispatched, and the step, or None if there is nothing to do.
    """
    if queue.leaving:
        freed = list(queue.leaving)
        queue = _vacate(queue, freed)
        budget = budget.dispatch(step, freed, np.empty(0, np.int64), np.empty(0, np.int64))
    else:
        freed = []
    held_S = queue.limit_S > 0
    prefilling_S = held_S & (budget.bound_S < queue.prompt_S)
    decoding = np.flatnonzero(held_S & ~prefilling_S & (budget.bound_S < queue.limit_S))
    room = limits.tokens - len(decoding)

    chunks: list[tuple[int, int]] = []
    under_way = np.flatnonzero(prefilling_S)
    for slot in under_way[np.argsort(queue.order_S[under_way], kind="stable")].tolist():
        if room <= 0:
            break
        count = min(room, int(queue.prompt_S[slot] - budget.bound_S[slot]))
        chunks.append((slot, count))
        room -= count
    queue, admitted = _admit(queue, budget, limits, room)
    for slot, sequence in admitted:
        count = min(room, sequence.prompt_len)
        chunks.append((slot, count))
        room -= count

    if not len(decoding) and not chunks and not freed:
        return queue, budget, None
    steps = limits.decode_steps if len(decoding) and not chunks else 1
    slots_R = np.concatenate([np.array([slot for slot, _ in chunks], np.int64), decoding])
    counts_R = np.concatenate([np.array([count for _, count in chunks], np.int64), np.ones(len(decoding), np.int64)])
    prefills_R = np.arange(len(slots_R)) < len(chunks)
    starts_R = budget.bound_S[slots_R]
    ends_R = np.minimum(starts_R + np.where(prefills_R, counts_R, steps), queue.limit_S[slots_R])
    budget = budget.dispatch(step, [], slots_R, ends_R)
    return (
        queue,
        budget,
        Schedule(
            freed=tuple(freed),
            admitted=tuple(admitted),
            slots_R=slots_R,
            starts_R=starts_R,
            counts_R=counts_R,
            prefills_R=prefills_R,
            samples_R=~prefills_R | (ends_R == queue.prompt_S[slots_R]),
            steps=steps,
        ),
    )


def _vacate(queue: Queue, slots: list[int]) -> Queue:
    running, prompt_S, limit_S = list(queue.running), queue.prompt_S.copy(), queue.limit_S.copy()
    for slot in slots:
        running[slot] = None
    prompt_S[slots] = 0
    limit_S[slots] = 0
    return dataclasses.replace(queue, running=tuple(running), leaving=(), prompt_S=prompt_S, limit_S=limit_S)


def _admit(queue: Queue, budget: Budget, limits: Limits, room: int) -> tuple[Queue, list[tuple[int, Sequence]]]:
    """Gives empty slots to those who wait, in order, until one does not fit."""
    if not queue.waiting or room <= 0:
        return queue, []
    unpromised = budget.free - budget.promised(queue.limit_S)
    empty = [slot for slot, sequence in enumerate(queue.running) if sequence is None]
    admitted: list[tuple[int, Sequence]] = []
    for slot, sequence in zip(empty[: limits.admissions], queue.waiting, strict=False):
        need = int(blocks_for(np.int64(sequence.limit), budget.block_size))
        if need > unpromised or room <= 0:
            break
        admitted.append((slot, sequence))
        unpromised -= need
        room -= sequence.prompt_len
    if not admitted:
        return queue, []
    running = list(queue.running)
    order_S, prompt_S, limit_S = queue.order_S.copy(), queue.prompt_S.copy(), queue.limit_S.copy()
    for number, (slot, sequence) in enumerate(admitted, queue.arrivals):
        running[slot] = sequence
        order_S[slot], prompt_S[slot], limit_S[slot] = number, sequence.prompt_len, sequence.limit
    return dataclasses.replace(
        queue,
        waiting=queue.waiting[len(admitted) :],
        running=tuple(running),
        order_S=order_S,
        prompt_S=prompt_S,
        limit_S=limit_S,
        arrivals=queue.arrivals + len(admitted),
    ), admitted
