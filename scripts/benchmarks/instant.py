"""A device that needs no time: it answers a plan as the compiled steps would, and counts what it took to do so.

With it in place of an engine's steps, what remains of a step's time is the host's own work. Every sequence generates
the same token until it has as many as it was to; of block ids only the number matters, and they never come back.
"""

from __future__ import annotations

import collections
import time
from typing import Any, cast

import jax
import numpy as np

from jpaged import plan as plans
from jpaged import sampling
from jpaged.engine import Engine
from jpaged.plan import PlanShape
from jpaged.step import StepOutput

TOKEN = 65


class Ready:
    """An array that has arrived: the part of `jax.Array` that the engine uses."""

    def __init__(self, array: np.ndarray | np.generic):
        self._array = array

    def copy_to_host_async(self) -> None:
        """Nothing is left to copy."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._array)


class InstantSteps:
    """Takes the place of `jpaged.step.Steps`.

    Args:
      engine: Whose plans it answers.
      output_len: Tokens of every sequence.

    Attributes:
      seconds: What answering took, to be taken off.
      traces: As of `Steps`, and empty.
      plans: Of each plan, whether it was for "prefill" or "decode", and how many sequences took part.
    """

    def __init__(self, engine: Engine, output_len: int):
        config = engine.config
        assert config.num_blocks is not None
        self._num_blocks, self._block_size, self._most = config.num_blocks, config.block_size, config.decode_steps
        self._rows = sampling.RowLayout.of(config, engine.loaded.model.spec.vocab_size)
        self._output_len = output_len
        self._lens_S = np.zeros(config.max_num_seqs, np.int64)
        self._made_S = np.zeros(config.max_num_seqs, np.int64)
        self._next_id = 0
        self._blank: dict[tuple[int, int], Any] = {}
        self.seconds = 0.0
        self.traces: collections.Counter = collections.Counter()
        self.plans: list[tuple[str, int]] = []

    def prefill(self, weights: Any, state: Any, packed: np.ndarray, shape: PlanShape) -> tuple[Any, StepOutput]:
        """As `Steps.prefill`."""
        begin = time.perf_counter()
        plan = self._begin(packed, shape)
        real_R, slots_R = self._real(plan)
        self.plans.append(("prefill", len(slots_R)))
        samples_R = (plan.flags_R[real_R] & plans.SAMPLES) != 0
        filled_R = self._grow(shape, real_R, slots_R, plan.counts_R[real_R])
        self._made_S[slots_R] += samples_R
        made_KR = np.zeros((1, shape.rows), np.bool_)
        made_KR[0, real_R] = samples_R
        return self._answer(state, made_KR, filled_R, real_R, slots_R, begin)

    def decode(self, weights: Any, state: Any, packed: np.ndarray, shape: PlanShape) -> tuple[Any, StepOutput]:
        """As `Steps.decode`."""
        begin = time.perf_counter()
        plan = self._begin(packed, shape)
        real_R, slots_R = self._real(plan)
        self.plans.append(("decode", len(slots_R)))
        counts_R = np.minimum(int(plan.steps), self._output_len - self._made_S[slots_R])
        filled_R = self._grow(shape, real_R, slots_R, counts_R)
        self._made_S[slots_R] += counts_R
        made_KR = np.zeros((self._most, shape.rows), np.bool_)
        made_KR[:, real_R] = np.arange(self._most)[:, None] < counts_R[None]
        return self._answer(state, made_KR, filled_R, real_R, slots_R, begin)

    def _grow(self, shape: PlanShape, real_R: np.ndarray, slots_R: np.ndarray, counts_R: np.ndarray) -> np.ndarray:
        """Lengthens sequences; how many blocks each row has filled by it."""
        filled_R = np.zeros(shape.rows, np.int64)
        before = self._lens_S[slots_R]
        self._lens_S[slots_R] += counts_R
        filled_R[real_R] = self._lens_S[slots_R] // self._block_size - before // self._block_size
        return filled_R

    def _begin(self, packed: np.ndarray, shape: PlanShape) -> Any:
        plan: Any = plans.unpack(cast(Any, packed), shape)
        started = plan.admit_J[plan.admit_J < shape.slots]
        for empty in (plan.free_S > 0, started):
            self._lens_S[empty] = 0
            self._made_S[empty] = 0
        return plan

    @staticmethod
    def _real(plan: Any) -> tuple[np.ndarray, np.ndarray]:
        real_R = np.flatnonzero(plan.counts_R)
        return real_R, plan.slots_R[real_R]

    def _answer(
        self,
        state: Any,
        made_KR: np.ndarray,
        filled_R: np.ndarray,
        real_R: np.ndarray,
        slots_R: np.ndarray,
        begin: float,
    ) -> tuple[Any, StepOutput]:
        done_R = np.ones(made_KR.shape[1], np.bool_)
        done_R[real_R] = self._made_S[slots_R] >= self._output_len
        used = int((-(-self._lens_S // self._block_size)).sum())
        if made_KR.shape not in self._blank:
            blank = jax.eval_shape(lambda: sampling.blank(self._rows, made_KR.shape))
            ready = jax.tree.map(lambda leaf: Ready(np.zeros(leaf.shape, leaf.dtype)), blank)
            self._blank[made_KR.shape] = ready.replace(token_R=Ready(np.full(made_KR.shape, TOKEN, np.int32)))
        sampled: Any = self._blank[made_KR.shape]
        filled = int(filled_R.sum())
        self._next_id += filled
        parts: dict[str, Any] = {
            "made_KR": Ready(made_KR),
            "done_R": Ready(done_R),
            "steps": Ready(np.int32(made_KR.shape[0])),
            "num_free": Ready(np.int32(self._num_blocks - used)),
            "num_tokens": Ready(np.int32(self._lens_S.sum())),
            "num_seqs": Ready(np.int32(np.count_nonzero(self._lens_S))),
            "ok": Ready(np.bool_(True)),
            "filled_R": Ready(filled_R),
            "filled_Z": Ready(np.arange(self._next_id - filled, self._next_id)),
        }
        output = StepOutput(sampled=sampled, prompt_logprobs=None, beams=None, own_R=None, **parts)
        self.seconds += time.perf_counter() - begin
        return state, output
