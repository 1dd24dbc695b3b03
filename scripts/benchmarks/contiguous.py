"""The baseline: static batches over a contiguous KV cache, with the same model, weights, dtype and jit as the engine.

It is what one writes first in JAX, written well: prompts are padded to the longest of their batch and computed in one
step, decode runs K steps a dispatch in a loop on the device, attention is one batched product a layer and reads no
further than the longest sequence has come (rounded up to a power of two). What it cannot do is let a request leave
before its batch, or take another in: memory and time are those of the longest.
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
from jaxtyping import Array, Float, Int32

from jpaged.attention import Rows
from jpaged.buckets import MIN_ROWS
from jpaged.model import LoadedModel

from .measure import Run, Served
from .workloads import Workload

LEAST_READ = 128  # positions that attention reads at the least
PROMPT_MULTIPLE = 16


class ContiguousView(struct.PyTreeNode):
    """What the layers of a model attend through: as `jpaged.model.AttentionView`, over [S, Q] queries.

    Attributes:
      cache: Keys and values, [L, 2, S, K, P, D].
      positions_SQ: The place of each query in its sequence.
      reads: Positions that attention reads; static.
    """

    cache: Float[Array, "L C S K P D"]
    positions_SQ: Int32[Array, "S Q"]
    reads: int = struct.field(pytree_node=False)

    def attend(
        self, layer: Any, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"]
    ) -> tuple[Float[Array, "T H D"], ContiguousView]:
        """Stores the keys and values, then attends to each sequence's own, causally."""
        num_slots, num_queries = self.positions_SQ.shape
        num_kv_heads, head_dim = k.shape[1:]
        group = q.shape[1] // num_kv_heads
        slot_S1 = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
        fresh_SQCKD = jnp.stack([k, v], axis=1).astype(self.cache.dtype)
        fresh_SQCKD = fresh_SQCKD.reshape(num_slots, num_queries, 2, num_kv_heads, head_dim)
        cache = self.cache.at[layer, :, slot_S1, :, self.positions_SQ].set(
            fresh_SQCKD, mode="drop", unique_indices=True
        )
        k_SKPD, v_SKPD = (cache[layer, c, :, :, : self.reads] for c in (0, 1))
        q_SQKGD = q.reshape(num_slots, num_queries, num_kv_heads, group, head_dim)
        q_SKXD = q_SQKGD.transpose(0, 2, 1, 3, 4).reshape(num_slots, num_kv_heads, num_queries * group, head_dim)
        scores_SKXP = jnp.einsum(
            "skxd,skpd->skxp", q_SKXD.astype(cache.dtype), k_SKPD, preferred_element_type=jnp.float32
        )
        seen_SQP = jnp.arange(self.reads, dtype=jnp.int32)[None, None, :] <= self.positions_SQ[..., None]
        seen_SKXP = jnp.repeat(seen_SQP, group, axis=1)[:, None]
        weights_SKXP = jax.nn.softmax(jnp.where(seen_SKXP, scores_SKXP * head_dim**-0.5, -1e30), axis=-1)
        out_SKXD = jnp.einsum(
            "skxp,skpd->skxd", weights_SKXP.astype(cache.dtype), v_SKPD, preferred_element_type=jnp.float32
        )
        out_SQKGD = out_SKXD.reshape(num_slots, num_kv_heads, num_queries, group, head_dim).transpose(0, 2, 1, 3, 4)
        return out_SQKGD.reshape(q.shape).astype(q.dtype), self.replace(cache=cache)

    def rows(self, num_tokens: int) -> Rows:
        """The slot and position of each token."""
        slot_SQ = jnp.broadcast_to(
            jnp.arange(self.positions_SQ.shape[0], dtype=jnp.int32)[:, None], self.positions_SQ.shape
        )
        return Rows(slot_SQ.reshape(num_tokens), self.positions_SQ.reshape(num_tokens))


class StaticBatches:
    """Greedy generation in static batches.

    Args:
      loaded: The model.
      slots: Sequences of a batch.
      max_len: Positions of the cache for each of them.
      dtype: Of the cache.
      decode_steps: K, the most decode steps of one dispatch.
    """

    def __init__(self, loaded: LoadedModel, *, slots: int, max_len: int, dtype: str, decode_steps: int):
        self._loaded, self._decode_steps = loaded, decode_steps
        spec = loaded.model.spec
        self._rows = max(slots, MIN_ROWS)
        self._max_len = -(-max_len // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        tokenizer = loaded.tokenizer
        self._vocab = spec.vocab_size if tokenizer is None else min(spec.vocab_size, tokenizer.vocab_size)
        shape = (spec.num_layers, 2, self._rows, spec.num_kv_heads, self._max_len, spec.head_dim)
        # Where the weights are, and bound to it as they are: else the first call has an executable of its own.
        self._cache = jax.device_put(jnp.zeros(shape, dtype), jax.tree.leaves(loaded.weights)[0].sharding)
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
        lengths = {self._padded(len(prompt)) for prompt in workload.prompts}
        for length in lengths:
            self.run_batch([[0] * length], [1], [Served()], 0.0)
        reads = {self._reads(n) for n in range(1, self._max_len + 1)}
        for length in reads:
            start = max(1, min(length, self._max_len) - 1)
            lens_S, token_S = np.full(self._rows, start, np.int32), jnp.zeros(self._rows, jnp.int32)
            self._cache, *_ = self._decode(
                self._loaded.weights, self._cache, token_S, lens_S, np.int32(1), reads=length
            )

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

    def _prefill_fn(self, weights: Any, cache: Array, tokens_SQ: Array, lens_S: Array) -> tuple[Array, Array]:
        num_slots, num_queries = tokens_SQ.shape
        positions_SQ = jnp.broadcast_to(jnp.arange(num_queries, dtype=jnp.int32)[None], tokens_SQ.shape)
        view = ContiguousView(cache, positions_SQ, num_queries)
        hidden_TE, view = self._loaded.model.hidden(weights, tokens_SQ.reshape(-1), positions_SQ.reshape(-1), view)
        last_S = jnp.arange(num_slots, dtype=jnp.int32) * num_queries + lens_S - 1
        return view.cache, self._greedy(weights, hidden_TE[last_S])

    def _decode_fn(
        self, weights: Any, cache: Array, token_S: Array, lens_S: Array, steps: Array, *, reads: int
    ) -> tuple[Array, Array, Array]:
        kept_KS = jnp.zeros((self._decode_steps, token_S.shape[0]), jnp.int32)

        def one(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            cache, token_S, kept_KS = carry
            view = ContiguousView(cache, (lens_S + k)[:, None], reads)
            hidden_SE, view = self._loaded.model.hidden(weights, token_S, lens_S + k, view)
            token_S = self._greedy(weights, hidden_SE)
            return view.cache, token_S, kept_KS.at[k].set(token_S)

        return lax.fori_loop(jnp.int32(0), steps, one, (cache, token_S, kept_KS))

    def _greedy(self, weights: Any, hidden_SE: Array) -> Int32[Array, " S"]:
        logits_SV = self._loaded.model.logits(weights, hidden_SE)[:, : self._vocab]
        return jnp.argmax(logits_SV, axis=-1).astype(jnp.int32)
