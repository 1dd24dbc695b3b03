"""The public attention: one function over a ragged batch, and its Flax module.

It checks what it is handed, and asks `backends` who serves; new keys and values are written before the batch attends.
It knows neither requests nor engines: any Flax model can call it with a cache and block tables of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from jpaged import cache as kv
from jpaged import misfits, sharding, xla_attention
from jpaged.backends import BACKENDS, ORDERS, backend_for, best_layout, kernels_of, resolve_backend
from jpaged.cache import WORDS, KVCache, Scalar
from jpaged.quantisation import Quantisation, stored
from pallas_kernels.options import Purpose

__all__ = [
    "BACKENDS",
    "ORDERS",
    "WORDS",
    "PagedAttention",
    "Rows",
    "best_layout",
    "paged_attention",
    "prepare",
    "resolve_backend",
    "token_rows",
]


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"] | None,
    v: Float[Array, "T K D"] | None,
    cache: KVCache,
    layer: Scalar,
    block_tables: Int32[Array, "R M"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R1"],
    *,
    sm_scale: float | Float[Array, ""] | None = None,
    sliding_window: Scalar | None = None,
    soft_cap: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " H"] | None = None,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
    tree_mask: Bool[Array, "T Q"] | None = None,
    max_q_len: int | None = None,
    backend: str | None = None,
    work: Any = None,
) -> tuple[Float[Array, "T H D"], KVCache]:
    """Causal attention of a ragged batch over a paged KV cache (PagedAttention, SOSP'23, section 4.1).

    Row r owns the query tokens from ``cu_q_lens[r]`` up to ``cu_q_lens[r + 1]``: its last positions, the newest at
    ``kv_lens[r] - 1``. First their keys and values are stored where the row's block table says, then every query
    attends to its row's tokens up to its own. Decode is the case of one query a row; chunked prefill, and batches
    that mix the two, are the same call.

    Args:
      q: Queries. Tokens past ``cu_q_lens[R]`` are padding; their outputs are zero. Kernels multiply in sixteen bits,
        unless the cache is float32: queries of more are rounded to bfloat16, or to float16 of a float16 cache.
      k, v: The queries' own keys and values; None for both only reads.
      cache: The KV memory of all layers. Donate it to the jitted function around this, and it is updated in place.
      layer: Which layer, from 0; may be traced, so that layers can run under ``lax.scan``, and is not checked then.
      block_tables: Block ids of each row in the order of its tokens. Entries past its last token are never used.
      kv_lens: Tokens of each row, the new ones included, int32.
      cu_q_lens: Prefix sums of the rows' query counts, from 0, int32 [R + 1].
      sm_scale: Factor on the scores; None is ``1/sqrt(D)``.
      sliding_window: Each query sees this many last tokens, its own included: at least 1; may be traced.
      soft_cap: Above 0. Scores become ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118, section 2).
      sinks: One logit a query head that joins the softmax's denominator only (attention sinks as in gpt-oss).
      k_scale, v_scale: What keys and values of a cache of eight bits are multiplied by when they are read, and divided
        by when they are written: a number, or one for each KV head. Both or neither.
      tree_mask: For speculative tokens: which of its row's queries each query sees, by their place in the row; all see
        themselves and, as far as a window lets them, what is before the row's queries. ``max_q_len`` must be given,
        and be at most Q and 8. Of kernels only.
      max_q_len: The most queries that any row has; static. 1 promises a decode batch. None makes no promise.
      backend: See `resolve_backend`. None picks one that reads the cache's order (`best_layout`).
      work: What `prepare` has made of the same batch; None makes it here, in each layer anew.

    Returns:
      The outputs in q's dtype, and the cache.

    A cache whose layout names a mesh axis is split over it by heads, and so is the work. All arrays are whole, as
    without a mesh; the mesh must be in use (`jax.set_mesh`) where this is traced, its axes automatic.

    It is for inference: there is no gradient, but for the forward mode of ``xla``. What is traced is not checked: block
    ids within a row's tokens must be the cache's, and ``max_q_len`` and ``cu_q_lens`` true, or results are undefined.

    With the ``tpu`` backend, no row may read a block that another row of the batch writes by itself, and tokens that a
    row's last block holds behind ``kv_lens`` are lost.

    Raises:
      ValueError: at trace time, for a backend that does not serve, a mesh in use that is not the layout's, or naming
        every shape that does not fit.
      NotImplementedError: for a gradient of kernels, or a `jax.vmap` of them.
    """
    backend = backend_for(backend, cache.layout)
    q, block_tables, kv_lens, cu_q_lens = map(jnp.asarray, (q, block_tables, kv_lens, cu_q_lens))
    k, v, sinks, tree_mask = (None if x is None else jnp.asarray(x) for x in (k, v, sinks, tree_mask))
    faults = misfits.of_arrays(q, k, v, cache, layer, block_tables, kv_lens, cu_q_lens, sinks, max_q_len)
    faults += misfits.of_numbers(sm_scale, sliding_window, soft_cap, k_scale, v_scale)
    num_tokens = q.shape[0] if q.ndim else 0
    faults += misfits.of_backend(backend, cache, num_tokens, k_scale, v_scale, tree_mask, max_q_len)
    if faults:
        raise ValueError(f"paged_attention: {'; '.join(faults)}")
    if 0 in (q.shape[0], *block_tables.shape):
        return jnp.zeros_like(q), cache
    batch = xla_attention.Batch(*(x.astype(jnp.int32) for x in (block_tables, kv_lens, cu_q_lens)))
    masking = xla_attention.Masking(
        sm_scale=xla_attention.default_sm_scale(q.shape[-1]) if sm_scale is None else sm_scale,
        sliding_window=None if sliding_window is None else jnp.maximum(jnp.asarray(sliding_window, jnp.int32), 1),
        soft_cap=soft_cap,
        sinks_H=sinks,
    )
    quantisation = None
    if k_scale is not None and v_scale is not None:
        quantisation = Quantisation(k_scale, v_scale)
    asked = _Asked(q, k, v, jnp.asarray(layer, jnp.int32), batch, masking, quantisation, tree_mask, work)
    call = functools.partial(_attend, backend, min(max_q_len or q.shape[0], q.shape[0]))
    return call(cache, asked) if cache.layout.axis is None else _attend_on_each_rank(call, cache, asked)


class _Asked(NamedTuple):
    """What `paged_attention` was handed besides the cache; or, of each, how it is split over a mesh."""

    q: Any
    k: Any
    v: Any
    layer: Any
    batch: Any
    masking: Any
    quantisation: Any
    tree_mask: Any
    work: Any


def _attend(backend: str, most: int, cache: KVCache, asked: _Asked) -> tuple[Array, KVCache]:
    """The heads of one device."""
    q, k, v, layer, batch, masking, quantisation, tree_mask, work = asked
    if backend != "xla":
        asked, cache = jax.tree.map(lambda x: _inference_only(x) if isinstance(x, jax.Array) else x, (asked, cache))
        q, k, v, layer, batch, masking, quantisation, tree_mask, work = asked
        kernels, purpose = kernels_of(backend), _purpose(batch.block_tables_RM, q.shape[0], q.shape[1], most)
        how = kernels.plan(cache.layout.of_rank, purpose, interpret=backend.endswith("interpret"))
        work = kernels.prepare(how, batch) if work is None else work
        if not isinstance(work, kernels.Work) or (work.memory, work.purpose) != (how.memory, purpose):
            raise ValueError(
                "work was prepared for another number of rows, columns, tokens or query heads, or another max_q_len, "
                "cache layout or backend; try prepare() with this batch"
            )
        return kernels.attend(how, work, q, k, v, cache, layer, batch, masking, quantisation, tree_mask)
    if k is not None:
        block_T, offset_T = _places(batch, q.shape[0], cache.layout)
        assert v is not None
        k, v = stored(k, v, cache.layout.dtype, quantisation)
        cache = kv.write(cache, layer, k, v, block_T, offset_T)
    return xla_attention.attend(q, cache, layer, batch, masking, quantisation, max_q_len=most), cache


@jax.custom_jvp
def _inference_only(x: Array) -> Array:
    """The same; no gradient and no `jax.vmap` goes through: kernels would drop the one and trip over the other."""
    return _one_by_one(x)


@_inference_only.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "paged_attention's kernels are for inference and have no gradient; try backend='xla' in forward mode "
        "(jax.jvp), or attention without a paged cache to train"
    )


@jax.custom_batching.custom_vmap
def _one_by_one(x: Array) -> Array:
    return x


@_one_by_one.def_vmap
def _refuse_batch(*_: Any) -> Any:
    raise NotImplementedError("paged_attention's kernels take no jax.vmap; try more rows in one call, or lax.map")


def _attend_on_each_rank(
    call: Callable[[KVCache, _Asked], tuple[Array, KVCache]], cache: KVCache, asked: _Asked
) -> tuple[Array, KVCache]:
    """Each rank its own heads: those of its KV heads, of which it may hold one that others hold too."""
    layout = cache.layout
    assert layout.axis is not None
    asked = asked._replace(masking=asked.masking._replace(sm_scale=jnp.asarray(asked.masking.sm_scale, jnp.float32)))
    if asked.k is not None:
        asked = asked._replace(**{name: jnp.repeat(getattr(asked, name), layout.copies, axis=1) for name in "kv"})
    if asked.quantisation is not None:
        each = asked.quantisation.each(layout.num_kv_heads)
        asked = asked._replace(quantisation=Quantisation(*(jnp.repeat(x, layout.copies) for x in each)))

    def one(data: Array, asked: _Asked) -> tuple[Array, Array]:
        out, cache = call(KVCache(data, layout.of_rank), asked)
        return out, cache.data

    # What is the same for all ranks, what has an entry a head, and what has heads on its second axis.
    same: Any = PartitionSpec()
    split: Any = PartitionSpec(layout.axis)
    heads: Any = PartitionSpec(None, layout.axis)
    masking = xla_attention.Masking(sm_scale=same, sliding_window=same, soft_cap=same, sinks_H=split)
    specs = _Asked(heads, heads, heads, same, same, masking, split, tree_mask=same, work=same)
    out, data = sharding.on_each_rank(
        one,
        axis=layout.axis,
        num_ranks=layout.num_ranks,
        in_specs=(layout.partition, specs),
        out_specs=(heads, layout.partition),
    )(cache.data, asked)
    return out, cache.replace(data=data)


def prepare(
    layout: kv.KVLayout,
    block_tables: Int32[Array, "R M"],
    kv_lens: Int32[Array, " R"],
    cu_q_lens: Int32[Array, " R1"],
    *,
    num_heads: int,
    num_tokens: int,
    max_q_len: int | None = None,
    backend: str | None = None,
) -> Any:
    """What `paged_attention` computes of a batch whatever the layer, for its ``work``; None if that is nothing.

    Args:
      layout: Of the cache.
      block_tables, kv_lens, cu_q_lens, max_q_len, backend: As for `paged_attention`.
      num_heads: Query heads, H.
      num_tokens: Queries, padding included: T.

    Raises:
      ValueError: for a backend that does not serve, naming every shape that does not fit, or for query heads that the
        ranks of a split cache do not divide.
    """
    backend = backend_for(backend, layout)
    block_tables, kv_lens, cu_q_lens = map(jnp.asarray, (block_tables, kv_lens, cu_q_lens))
    faults = misfits.of_cache(backend, layout) + misfits.of_batch(block_tables, kv_lens, cu_q_lens, max_q_len)
    if not isinstance(num_tokens, int | np.integer) or num_tokens < 0:
        faults.append(f"{num_tokens=} must be a whole number from 0; try T of q's shape [T, H, D]")
    if not isinstance(num_heads, int | np.integer) or num_heads < 1 or num_heads % layout.num_kv_heads:
        faults.append(
            f"{num_heads=} must be a multiple of {layout.num_kv_heads} KV heads; try H of q's shape [T, H, D]"
        )
    else:
        faults += misfits.of_ranks(num_heads, layout)
    if faults:
        raise ValueError(f"prepare: {'; '.join(faults)}")
    if backend == "xla" or 0 in (num_tokens, *block_tables.shape):
        return None
    most, kernels = min(max_q_len or num_tokens, num_tokens), kernels_of(backend)
    purpose = _purpose(block_tables, num_tokens, num_heads // layout.num_ranks, most)
    how = kernels.plan(layout.of_rank, purpose, interpret=backend.endswith("interpret"))
    batch = xla_attention.Batch(*(x.astype(jnp.int32) for x in (block_tables, kv_lens, cu_q_lens)))
    return kernels.prepare(how, batch)


def _purpose(block_tables_RM: Array, num_tokens: int, num_heads: int, most: int) -> Purpose:
    rows, columns = block_tables_RM.shape
    return Purpose(rows, columns, num_tokens, num_heads, most)


class Rows(NamedTuple):
    """Where each query token of a ragged batch belongs; padding tokens have row R and position 0."""

    row_T: Int32[Array, " T"]
    position_T: Int32[Array, " T"]


def token_rows(kv_lens: Int32[Array, " R"], cu_q_lens: Int32[Array, " R1"], num_tokens: int) -> Rows:
    """The row and position of each of ``num_tokens`` query tokens."""
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.sum(cu_q_lens[None, 1:] <= token_T[:, None], axis=1, dtype=jnp.int32)
    back_T = cu_q_lens.at[row_T + 1].get(mode="fill", fill_value=0) - token_T
    position_T = kv_lens.at[row_T].get(mode="fill", fill_value=0) - back_T
    return Rows(row_T, jnp.where(row_T < kv_lens.shape[0], position_T, 0))


class PagedAttention(nnx.Module):
    """`paged_attention` as a Flax NNX module: it holds a layer's settings, no parameters, and hands the cache on.

    >>> attention = PagedAttention(layer=0, soft_cap=50.0)
    >>> # out, cache = attention(q, k, v, cache, block_tables, kv_lens, cu_q_lens)
    """

    def __init__(
        self,
        layer: int,
        *,
        sm_scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        backend: str | None = None,
    ):
        self.layer = layer
        self.sm_scale = sm_scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.backend = backend

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"] | None,
        v: Float[Array, "T K D"] | None,
        cache: KVCache,
        block_tables: Int32[Array, "R M"],
        kv_lens: Int32[Array, " R"],
        cu_q_lens: Int32[Array, " R1"],
        *,
        sinks: Float[Array, " H"] | None = None,
        max_q_len: int | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "T H D"], KVCache]:
        """See `paged_attention`."""
        return paged_attention(
            q,
            k,
            v,
            cache,
            self.layer,
            block_tables,
            kv_lens,
            cu_q_lens,
            sm_scale=self.sm_scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=sinks,
            max_q_len=max_q_len,
            backend=self.backend,
            **options,
        )


def _places(batch: xla_attention.Batch, num_tokens: int, layout: kv.KVLayout) -> tuple[Array, Array]:
    """The block and offset of each query token; NULL for padding."""
    rows = token_rows(batch.kv_lens_R, batch.cu_q_lens_R1, num_tokens)
    column_T = rows.position_T // layout.block_size
    block_T = batch.block_tables_RM.at[rows.row_T, column_T].get(mode="fill", fill_value=layout.num_blocks)
    return block_T, rows.position_T % layout.block_size
