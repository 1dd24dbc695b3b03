"""A step's orders as one packed int32 array: how the host fills it in and the device reads it.

One array is one transfer. The layout is static per bucket of shapes; the sections stand one after another.

Here X counts blocks that sequences start with and H the tokens in them, B blocks that the cache keeps or gives up, and
W the numbers of a row of sampling settings. R2 and X2 are R and the numbers of a beam, or 0 in a plan without beams.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from flax import struct
from jaxtyping import Array, Int32

from jpaged import beam


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """The static sizes of a plan: the key of a compiled step.

    Attributes:
      slots: S.
      rows: R, padded.
      tokens: T prompt tokens, padded; 0 for a plan that only decodes.
      admissions: Sequences that may start, padded; 0 for a plan that only decodes.
      sampler_width: Integers that one sequence's sampling settings take.
      known: Tokens that starting sequences may find computed, padded; 0 for a plan that only decodes.
      keeps: Blocks that the cache may keep, padded, and as many that it may drop.
      block_size: Tokens of a block.
      beams: W, the greatest width of a group of beams; 0 for a plan without any.
    """

    slots: int
    rows: int
    tokens: int
    admissions: int
    sampler_width: int
    known: int
    keeps: int
    block_size: int
    beams: int = 0

    @functools.cached_property
    def sections(self) -> dict[str, tuple[int, ...]]:
        beam_rows = self.rows if self.beams else 0
        return {
            "steps": (),
            "free": (self.slots,),
            "slots": (self.rows,),
            "counts": (self.rows,),
            "flags": (self.rows,),
            "nexts": (self.rows,),
            "tokens": (self.tokens,),
            "admit": (self.admissions,),
            "samplers": (self.admissions, self.sampler_width),
            "sources": (self.rows,),
            "attached": (self.admissions,),
            "attach_ids": (self.known // self.block_size,),
            "known": (self.known,),
            "keep": (self.keeps,),
            "drop": (self.keeps,),
            "beams": (self.admissions, beam.packed_width(self.beams) if self.beams else 0),
            "leaders": (beam_rows,),
            "numbers": (beam_rows,),
            "scores": (beam_rows,),
        }

    @functools.cached_property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.sections.values())


PREFILLS, SAMPLES = 1, 2  # bits of a row's flags


class Plan(struct.PyTreeNode):
    """A plan unpacked.

    Attributes:
      steps: Decode steps at the most.
      free_S: 1 for slots to free before all else.
      slots_R: The slot of each row; S for padding.
      counts_R: Tokens of each row in this step.
      flags_R: ``PREFILLS``: they are prompt tokens. ``SAMPLES``: a token follows them.
      nexts_R: The known token that follows a row's chunk; 0 where there is none. A twin's: its stream of randomness, or
        if it knows its next token, that.
      tokens_T: The prompt tokens of the rows that prefill, in their places in the ragged batch.
      admit_J: Slots that start a sequence; S for padding.
      samplers_JW: Their packed sampling settings.
      sources_R: The row whose twin each row becomes once this step's tokens are computed; its own number otherwise.
      attached_J: Blocks with which each of these sequences begins.
      attach_X: Their ids, one sequence after another.
      known_H: The tokens in them, one sequence after another.
      keep_B, drop_B: Blocks that the cache keeps, and gives up; NULL for padding.
      beams_JX: What the sequences that start are as beams, packed.
      leaders_R, numbers_R: See `beam.members`; R for rows that are no beams.
      scores_R: Of each beam that starts as a twin, its sum, by its bits.
    """

    steps: Int32[Array, ""]
    free_S: Int32[Array, " S"]
    slots_R: Int32[Array, " R"]
    counts_R: Int32[Array, " R"]
    flags_R: Int32[Array, " R"]
    nexts_R: Int32[Array, " R"]
    tokens_T: Int32[Array, " T"]
    admit_J: Int32[Array, " J"]
    samplers_JW: Int32[Array, "J W"]
    sources_R: Int32[Array, " R"]
    attached_J: Int32[Array, " J"]
    attach_X: Int32[Array, " X"]
    known_H: Int32[Array, " H"]
    keep_B: Int32[Array, " B"]
    drop_B: Int32[Array, " B"]
    beams_JX: Int32[Array, "J X2"]
    leaders_R: Int32[Array, " R2"]
    numbers_R: Int32[Array, " R2"]
    scores_R: Int32[Array, " R2"]


def blank(shape: PlanShape, null: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """An idle plan, and views of its sections for the host to write into; ``null`` is the id that names no block."""
    packed = np.zeros(shape.size, np.int32)
    views = _cut(packed, shape)
    views["slots"][:] = shape.slots
    views["admit"][:] = shape.slots
    views["sources"][:] = np.arange(shape.rows)
    views["keep"][:] = views["drop"][:] = null
    views["leaders"][:] = shape.rows
    return packed, views


def unpack(packed: Int32[Array, " size"], shape: PlanShape) -> Plan:
    """The sections of a packed plan, on the device."""
    return Plan(*_cut(packed, shape).values())


def _cut(packed, shape: PlanShape) -> dict:
    start, parts = 0, {}
    for name, dims in shape.sections.items():
        size = math.prod(dims)
        parts[name] = packed[start : start + size].reshape(dims)
        start += size
    return parts
