"""A step's orders as one packed int32 array: how the host fills it in and the device reads it.

One array is one transfer. The layout is static per bucket of shapes; the sections stand one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from flax import struct
from jaxtyping import Array, Int32


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """The static sizes of a plan: the key of a compiled step.

    Attributes:
      slots: S.
      rows: R, padded.
      tokens: T prompt tokens, padded; 0 for a plan that only decodes.
      admissions: Sequences that may start, padded; 0 for a plan that only decodes.
      sampler_width: Integers that one sequence's sampling settings take.
    """

    slots: int
    rows: int
    tokens: int
    admissions: int
    sampler_width: int

    @functools.cached_property
    def sections(self) -> dict[str, tuple[int, ...]]:
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
      nexts_R: The prompt token that follows a row's chunk; 0 where there is none.
      tokens_T: The prompt tokens of the rows that prefill, in their places in the ragged batch.
      admit_J: Slots that start a sequence; S for padding.
      samplers_JW: Their packed sampling settings.
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


def blank(shape: PlanShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """An idle plan, and views of its sections for the host to write into."""
    packed = np.zeros(shape.size, np.int32)
    views = _cut(packed, shape)
    views["slots"][:] = shape.slots
    views["admit"][:] = shape.slots
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
