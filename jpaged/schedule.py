"""One step as the scheduler plans it: who takes part, who starts, which memory comes and goes. Records only."""

from __future__ import annotations

import dataclasses

import numpy as np

from jpaged.groups import Group, Sequence
from jpaged.prefix import Block


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step may hold: tokens, sequences that start and blocks that they start with, decode steps in one dispatch,
    and blocks that the cache may keep or drop."""

    tokens: int
    starts: int
    attached: int
    decode_steps: int
    keeps: int
    drops: int


@dataclasses.dataclass(frozen=True)
class Start:
    """A sequence that starts, with so many tokens in blocks that are there already."""

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
