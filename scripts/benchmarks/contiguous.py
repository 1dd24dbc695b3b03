"""The baseline: static batches over a contiguous KV cache, with the same model, weights, dtype and jit as the engine.

A contiguous cache is a paged one with one block a sequence, as long as the longest may get. The rest is what one writes
first in JAX, written well: prompts are padded to the longest of their batch and computed in one step, decode runs K
steps a dispatch in a loop on the device, attention is one batched product a layer and reads no further than the longest
sequence has come (rounded up to a power of two). What it cannot do is let a request leave before its batch, or take
another in: memory and time are those of the longest.

Here P counts positions that attention reads, Q queries of a row, and X those of a row that read one KV head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jpaged import cache as kv
from jpaged import dtypes
from jpaged.cache import KVCache, KVLayout, Scalar
from jpaged.config import DType
from jpaged.model import AttentionView, LoadedModel

from .measure import Run, Served
from .workloads import Workload

LEAST_READ = 128  # positions that attention reads at the least
PROMPT_MULTIPLE = 16


class ContiguousView(AttentionView):
    """What the layers of a model attend through: every row has as many queries, and one block that holds all of it.

    Attributes:
      reads: Positions that attention reads; static.
    """

    reads: int = struct.field(pytree_node=False, default=0)

    def attend(
        self,
        layer: Scalar,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        **options: Any,
    ) -> tuple[Float[Array, "T H D"], ContiguousView]:
        """Stores the keys and values, then attends to each row's own, causally.

        Raises:
          ValueError: the model wants more of attention than that.
        """
        if options:
            wanted = ", ".join(options)
            raise ValueError(f"the baseline's attention does not know {wanted}; try a model without, such as 'default'")
        num_rows, num_kv_heads, head_dim = self.kv_lens_R.shape[0], *k.shape[1:]
        height, group = q.shape[0] // num_rows, q.shape[1] // num_kv_heads
        positions_RQ = (self.kv_lens_R - height)[:, None] + jnp.arange(height, dtype=jnp.int32)[None, :]
        block_T = jnp.repeat(self.block_tables_RM[:, 0], height)
        cache = kv.write(self.cache, layer, k, v, block_T, positions_RQ.reshape(-1))
        k_RKPD, v_RKPD = (cache.data[cache.layout.index(L=layer, C=c, B=slice(self.reads))] for c in (0, 1))

        q_RQKGD = q.reshape(num_rows, height, num_kv_heads, group, head_dim)
        q_RKXD = q_RQKGD.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, height * group, head_dim)
        scores_RKXP = _product("rkxd,rkpd->rkxp", q_RKXD.astype(k_RKPD.dtype), k_RKPD) * head_dim**-0.5
        seen_RQP = jnp.arange(self.reads, dtype=jnp.int32)[None, None, :] <= positions_RQ[..., None]
        seen_RKXP = jnp.repeat(seen_RQP, group, axis=1)[:, None]
        weights_RKXP = jax.nn.softmax(jnp.where(seen_RKXP, scores_RKXP, -1e30), axis=-1)
        out_RKXD = _product("rkxp,rkpd->rkxd", weights_RKXP.astype(v_RKPD.dtype), v_RKPD)
        out_RQKGD = out_RKXD.reshape(num_rows, num_kv_heads, height, group, head_dim).transpose(0, 2, 1, 3, 4)
        return out_RQKGD.reshape(q.shape).astype(q.dtype), self.replace(cache=cache)


class StaticBatches:
    """Greedy generation in static batches.

    Args:
      loaded: The model.
      slots: Sequences of a batch.
      max_len: Positions of the cache for each of them.
      dtype: Of the cache.
      decode_steps: K, the most decode steps of one dispatch.
    """

    def __init__(self, loaded: LoadedModel, *, slots: int, max_len: int, dtype: DType, decode_steps: int):
        self._loaded, self._decode_steps = loaded, decode_steps
        spec = loaded.model.spec
        self._rows = max(slots, dtypes.min_rows(dtype))
        self._max_len = -(-max_len // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        layout = KVLayout(
            num_layers=spec.num_layers,
            num_blocks=self._rows,
            block_size=self._max_len,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            order="LCNKBD",
        )
        # Where the weights are, and bound to it as they are: else the first call has an executable of its own.
        self._cache = jax.device_put(kv.create(layout), jax.tree.leaves(loaded.weights)[0].sharding)
        self._prefill = jax.jit(self._prefill_fn, donate_argnames="cache")
        self._decode = jax.jit(self._decode_fn, static_argnames="reads", donate_argnames="cache")

    def run(self, workload: Workload, arrivals: Sequence[float] | None = None) -> Run:
        """All requests, in order of arrival: as many as have come, up to the slots, make the next batch.

        Args:
          workload: What to serve.
          arrivals: Seconds at which each request comes, ascending; None: all at once.
        """
        served = [Served(arrival) for arrival in arrivals or [0.0] * len(workload.prompts)]
        begin, spent, first = time.perf_counter(), np.zeros(2), 0
        while first < len(served):
            time.sleep(max(0.0, served[first].arrival - (time.perf_counter() - begin)))
            now = time.perf_counter() - begin
            last = first + 1
            while last < min(len(served), first + workload.slots) and served[last].arrival <= now:
                last += 1
            spent += self.run_batch(
                workload.prompts[first:last], workload.outputs[first:last], served[first:last], begin
            )
            first = last
        decoded = workload.output_tokens - len(served)
        return Run(
            served,
            max(one.deltas[-1][0] for one in served),
            prefill_rate=workload.prompt_tokens / float(spent[0]),
            decode_rate=decoded / float(spent[1]) if decoded else None,
        )

    def warmup(self, workload: Workload) -> None:
        """Compiles every shape that batches of these requests can have, however they fall together."""
        weights, lens_S = self._loaded.weights, np.ones(self._rows, np.int32)
        token_S = None
        for length in {self._padded(len(prompt)) for prompt in workload.prompts}:
            tokens_SQ = np.zeros((self._rows, length), np.int32)
            self._cache, token_S = self._prefill(weights, self._cache, tokens_SQ, lens_S)
        for reads in {self._reads(length) for length in range(1, self._max_len + 1)}:
            self._cache, *_ = self._decode(weights, self._cache, token_S, lens_S, np.int32(1), reads=reads)

    def run_batch(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], served: Sequence[Served], begin: float
    ) -> tuple[float, float]:
        """One batch until its longest is done; what a request was not to generate is thrown away.

        Returns:
          Seconds of prefill and of decode.
        """
        padded = self._padded(max(map(len, prompts)))
        tokens_SQ = np.zeros((self._rows, padded), np.int32)
        lens_S = np.ones(self._rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_SQ[row, : len(prompt)] = prompt
            lens_S[row] = len(prompt)
        start = time.perf_counter()
        self._cache, token_S = self._prefill(self._loaded.weights, self._cache, tokens_SQ, lens_S)
        self._hand_out(np.asarray(token_S)[None], outputs, served, begin)
        middle = time.perf_counter()
        left = max(outputs) - 1
        while left > 0:
            steps = min(left, self._decode_steps)
            reads = self._reads(int(lens_S[: len(prompts)].max()) + steps)
            self._cache, token_S, tokens_KS = self._decode(
                self._loaded.weights, self._cache, token_S, lens_S, np.int32(steps), reads=reads
            )
            lens_S = lens_S + np.int32(steps)
            self._hand_out(np.asarray(tokens_KS)[:steps], outputs, served, begin)
            left -= steps
        return middle - start, time.perf_counter() - middle

    @staticmethod
    def _padded(longest: int) -> int:
        return -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE

    def _reads(self, longest: int) -> int:
        return min(self._max_len, max(LEAST_READ, 1 << (longest - 1).bit_length()))

    @staticmethod
    def _hand_out(tokens_KS: np.ndarray, outputs: Sequence[int], served: Sequence[Served], begin: float) -> None:
        now = time.perf_counter() - begin
        for row, one in enumerate(served):
            one.receive(now, tokens_KS[: outputs[row] - len(one.tokens), row].tolist())

    def _prefill_fn(self, weights: Any, cache: KVCache, tokens_SQ: Array, lens_S: Array) -> tuple[KVCache, Array]:
        num_slots, height = tokens_SQ.shape
        view = self._view(cache, jnp.full(num_slots, height, jnp.int32), height, height)
        positions_T = jnp.tile(jnp.arange(height, dtype=jnp.int32), num_slots)
        hidden_TE, view = self._loaded.model.hidden(weights, tokens_SQ.reshape(-1), positions_T, view)
        last_S = jnp.arange(num_slots, dtype=jnp.int32) * height + lens_S - 1
        return view.cache, self._greedy(weights, hidden_TE[last_S])

    def _decode_fn(
        self, weights: Any, cache: KVCache, token_S: Array, lens_S: Array, steps: Array, *, reads: int
    ) -> tuple[KVCache, Array, Array]:
        kept_KS = jnp.zeros((self._decode_steps, token_S.shape[0]), jnp.int32)

        def one(k: Array, carry: tuple[KVCache, Array, Array]) -> tuple[KVCache, Array, Array]:
            cache, token_S, kept_KS = carry
            view = self._view(cache, lens_S + k + 1, 1, reads)
            hidden_SE, view = self._loaded.model.hidden(weights, token_S, lens_S + k, view)
            token_S = self._greedy(weights, hidden_SE)
            return view.cache, token_S, kept_KS.at[k].set(token_S)

        return lax.fori_loop(jnp.int32(0), steps, one, (cache, token_S, kept_KS))

    @staticmethod
    def _view(cache: KVCache, kv_lens_S: Array, height: int, reads: int) -> ContiguousView:
        num_slots = kv_lens_S.shape[0]
        return ContiguousView(
            cache=cache,
            block_tables_RM=jnp.arange(num_slots, dtype=jnp.int32)[:, None],
            kv_lens_R=kv_lens_S,
            cu_q_lens_R1=jnp.arange(num_slots + 1, dtype=jnp.int32) * height,
            reads=reads,
        )

    def _greedy(self, weights: Any, hidden_SE: Array) -> Int32[Array, " S"]:
        logits_SV = self._loaded.model.logits(weights, hidden_SE)[:, : self._loaded.sampled_vocab]
        return jnp.argmax(logits_SV, axis=-1).astype(jnp.int32)


def _product(spec: str, a: Array, b: Array) -> Float32[Array, "..."]:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
