"""One step as the scheduler plans it: who takes part, who starts, which memory comes and goes. Records only."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jpaged.groups import Group, Sequence
from jpaged.prefix import Block


@dataclasses.dataclass(frozen=True)
class StepLimits:
    """What a step may hold.

    Attributes:
      tokens: Tokens that it computes.
      starts: Sequences that start.
      attached: Blocks that they start with, all together.
      decode_steps: Decode steps of one dispatch.
      cache_changes: Blocks that the cache may keep, and as many that it may give up; at least one for each slot, or
        sequences that all need one would wait for ever.
    """

    tokens: int
    starts: int
    attached: int
    decode_steps: int
    cache_changes: int

    @classmethod
    def of(
        cls, *, tokens: int, starts: int, attached: int, decode_steps: int, slots: int, block_size: int
    ) -> StepLimits:
        """With room for all blocks that two steps can fill, for so many may be read between one plan and the next."""
        filled = tokens // block_size + slots * -(-decode_steps // block_size)
        return cls(tokens, starts, attached, decode_steps, 2 * filled)


@dataclasses.dataclass(frozen=True)
class Start:
    """A sequence that starts, in which slot, and the blocks of its beginning that are there already."""

    sequence: Sequence
    slot: int
    block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One step.

    Attributes:
      keeps: Blocks that the cache keeps from now on.
      freed: Slots to free.
      drops: Blocks that the cache gives up.
      stores: Blocks, and their ids so far, that the host copies before all this.
      fetches: Blocks that come back from the host after the step, to whatever place is free.
      started: Sequences that start, except twins.
      sequences: The sequence of each row; rows that prefill come first, then twins.
      slots_R: Its slot.
      starts_R: Its tokens before the step; an upper bound for rows that decode.
      counts_R: Tokens that it computes: a chunk of its prompt, none for a twin, or 1.
      sources_R: The row whose twin it becomes after the step's tokens are computed; its own number otherwise.
      prefills_R: Whether its tokens are prompt tokens.
      samples_R: Whether a token is sampled after them.
      steps: Decode steps; 1 if any row prefills.
      has_beams: Whether any sequence that takes part or starts is a beam.
      beams: Groups of beams that select in this step.
      paused: Groups that had to pause before it.
    """

    keeps: tuple[int, ...]
    freed: tuple[int, ...]
    drops: tuple[int, ...]
    stores: tuple[tuple[Block, int], ...]
    fetches: tuple[Block, ...]
    started: tuple[Start, ...]
    sequences: tuple[Sequence, ...]
    slots_R: np.ndarray
    starts_R: np.ndarray
    counts_R: np.ndarray
    sources_R: np.ndarray
    prefills_R: np.ndarray
    samples_R: np.ndarray
    steps: int
    has_beams: bool = False
    beams: tuple[Group, ...] = ()
    paused: tuple[Group, ...] = ()

    @property
    def decodes_only(self) -> bool:
        return not (self.prefills_R.any() or self.started)


@dataclasses.dataclass
class Draft:
    """A step as it is being planned.

    Attributes:
      tokens, free: Tokens and free blocks that are left; fewer than none: idle ones must go.
      chunks: Sequences whose prompts go on, from where, by how much.
      starts: Sequences that start.
      fetches: Blocks that come back from the host.
      is_blocked: Whether somebody needs a block more than there are; nobody after that may take one.
    """

    tokens: int
    free: int
    chunks: list[tuple[Sequence, int, int]] = dataclasses.field(default_factory=list)
    starts: list[Start] = dataclasses.field(default_factory=list)
    fetches: list[Block] = dataclasses.field(default_factory=list)
    is_blocked: bool = False


class Rows:
    """The rows of a step as they are put together: prompts' chunks first, then twins, then what decodes."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._numbers: list[tuple[int, int, int]] = []  # start, count, source
        self._samples: list[bool] = []
        self._num_chunks = 0

    def chunk(self, sequence: Sequence, start: int, count: int, *, samples: bool) -> None:
        """Adds so many tokens of a prompt, from where it stands; before any twin."""
        self._sequences.append(sequence)
        self._numbers.append((start, count, self._num_chunks))
        self._samples.append(samples)
        self._num_chunks += 1

    def twin(self, sequence: Sequence, start: int, source: int, *, samples: bool) -> None:
        """Adds what becomes the twin of a row, with so many tokens."""
        self._sequences.append(sequence)
        self._numbers.append((start, 0, source))
        self._samples.append(samples)

    def finish(self, slots: np.ndarray, sequences: list[Sequence], starts: np.ndarray) -> dict[str, Any]:
        """Fields of a `Schedule`, once those that decode are added, one token each."""
        ahead, count = len(self._sequences), len(slots)
        numbers = np.array(self._numbers, np.int64).reshape(ahead, 3)
        return {
            "sequences": (*self._sequences, *sequences),
            "slots_R": np.concatenate([np.array([each.slot for each in self._sequences], np.int64), slots]),
            "starts_R": np.concatenate([numbers[:, 0], starts]),
            "counts_R": np.concatenate([numbers[:, 1], np.ones(count, np.int64)]),
            "sources_R": np.concatenate([numbers[:, 2], np.arange(ahead, ahead + count)]),
            "prefills_R": np.arange(ahead + count) < self._num_chunks,
            "samples_R": np.concatenate([np.array(self._samples, np.bool_), np.ones(count, np.bool_)]),
        }
