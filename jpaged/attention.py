"""The public attention: one function over a ragged batch, and its Flax module.

It checks what it is handed, and asks `backends` who serves; new keys and values are written before the batch attends.
It knows neither requests nor engines: any Flax model can call it with a cache and block tables of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from jpaged import cache as kv
from jpaged import sharding, tpu_attention, xla_attention
from jpaged.backends import BACKENDS, ORDERS, backend_for, best_order, resolve_backend
from jpaged.cache import WORDS, KVCache, Scalar

__all__ = [
    "BACKENDS",
    "ORDERS",
    "WORDS",
    "PagedAttention",
    "Rows",
    "best_order",
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
      q: Queries. Tokens past ``cu_q_lens[R]`` are padding; their outputs are zero.
      k, v: The queries' own keys and values; None for both only reads.
      cache: The KV memory of all layers. Donate it to the jitted function around this, and it is updated in place.
      layer: Which layer, from 0; may be traced, so that layers can run under ``lax.scan``, and is not checked then.
      block_tables: Block ids of each row in the order of its tokens. Entries past its last token are never used.
      kv_lens: Tokens of each row, the new ones included, int32.
      cu_q_lens: Prefix sums of the rows' query counts, from 0, int32 [R + 1].
      sm_scale: Factor on the scores; None is ``1/sqrt(D)``.
      sliding_window: Each query sees this many last tokens, its own included; may be traced.
      soft_cap: Scores become ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118, section 2).
      sinks: One logit a query head that joins the softmax's denominator only (attention sinks as in gpt-oss).
      k_scale, v_scale: What keys and values of a cache of eight bits are multiplied by when they are read, and divided
        by when they are written: a number, or one for each KV head. Both or neither; the ``tpu`` backend only.
      tree_mask: For speculative tokens: which of its row's queries each query sees, by their place in the row; all see
        what is before the row's queries. ``max_q_len`` must be given, and be at most Q and 8. The ``tpu`` backend only.
      max_q_len: The most queries that any row has; static. 1 promises a decode batch. None makes no promise.
      backend: See `resolve_backend`. None picks one that reads the cache's order (`best_order`).
      work: What `prepare` has made of the same batch; None makes it here, in each layer anew.

    Returns:
      The outputs in q's dtype, and the cache.

    A cache whose layout names a mesh axis is split over it by heads, and so is the work. All arrays are whole, as
    without a mesh; the mesh must be in use (`jax.set_mesh`) where this is traced, its axes automatic.

    With the ``tpu`` backend, no row may read a block that another row of the batch writes by itself, and tokens that a
    row's last block holds behind ``kv_lens`` are lost.

    Raises:
      ValueError: at trace time, for a backend that does not serve, a mesh in use that is not the layout's, or naming
        every shape that does not fit.
    """
    backend = backend_for(backend, cache.layout)
    block_tables, kv_lens, cu_q_lens = map(jnp.asarray, (block_tables, kv_lens, cu_q_lens))
    _check(q, k, v, cache, layer, block_tables, kv_lens, cu_q_lens, sinks, max_q_len)
    _check_backend(backend, cache, q.shape[0], k_scale, v_scale, tree_mask, max_q_len)
    batch = xla_attention.Batch(block_tables, kv_lens, cu_q_lens)
    masking = xla_attention.Masking(
        sm_scale=xla_attention.default_sm_scale(q.shape[-1]) if sm_scale is None else sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks_H=sinks,
    )
    quantisation = None
    if k_scale is not None and v_scale is not None:
        quantisation = tpu_attention.Quantisation(k_scale, v_scale)
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
        how = _plan(backend, cache.layout, q.shape[1], batch.block_tables_RM.shape[1], most)
        if work is None:
            work = tpu_attention.prepare(how, batch, num_tokens=q.shape[0], max_q_len=most)
        return tpu_attention.attend(how, work, q, k, v, cache, layer, batch, masking, quantisation, tree_mask)
    if k is not None:
        block_T, offset_T = _places(batch, q.shape[0], cache.layout)
        cache = kv.write(cache, layer, k, v, block_T, offset_T)
    return xla_attention.attend(q, cache, layer, batch, masking, max_q_len=most), cache


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
        each = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (layout.num_kv_heads,)) for x in asked.quantisation)
        asked = asked._replace(quantisation=tpu_attention.Quantisation(*(jnp.repeat(x, layout.copies) for x in each)))

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
      ValueError: for a backend that does not serve, or query heads that the ranks of a split cache do not divide.
    """
    backend = backend_for(backend, layout)
    if faults := _rank_faults(num_heads, layout):
        raise ValueError(f"prepare: {'; '.join(faults)}")
    if backend == "xla":
        return None
    most = min(max_q_len or num_tokens, num_tokens)
    how = _plan(backend, layout, num_heads // layout.num_ranks, block_tables.shape[1], most)
    batch = xla_attention.Batch(*map(jnp.asarray, (block_tables, kv_lens, cu_q_lens)))
    return tpu_attention.prepare(how, batch, num_tokens=num_tokens, max_q_len=most)


def _plan(backend: str, layout: kv.KVLayout, num_heads: int, columns: int, max_q_len: int) -> Any:
    return tpu_attention.plan(
        layout.of_rank,
        num_heads=num_heads,
        columns=columns,
        max_q_len=max_q_len,
        interpret=backend == "tpu_interpret",
    )


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


def _check(q, k, v, cache: KVCache, layer, block_tables, kv_lens, cu_q_lens, sinks, max_q_len) -> None:
    layout, faults = cache.layout, []
    if isinstance(layer, int | np.integer) and not 0 <= layer < layout.num_layers:
        last = layout.num_layers - 1
        faults.append(f"{layer=} must be from 0 to {last}, the cache's last; try a KVLayout of more num_layers")
    for name, x in (("block_tables", block_tables), ("kv_lens", kv_lens), ("cu_q_lens", cu_q_lens)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            faults.append(f"{name}.dtype={x.dtype} must be integers; try {name}.astype('int32')")
    if (k is None) != (v is None):
        faults.append("k and v must both be given, or both be None; try None to read only")
    if q.ndim != 3 or q.shape[2] != layout.head_dim or q.shape[1] % layout.num_kv_heads:
        faults.append(
            f"{q.shape=} must be [T, H, {layout.head_dim}], H a multiple of the cache's "
            f"{layout.num_kv_heads} KV heads; try q.reshape(T, H, D), or a cache of another KVLayout"
        )
    else:
        faults += _rank_faults(q.shape[1], layout)
    wanted = (q.shape[0], layout.num_kv_heads, layout.head_dim)
    way_out = "one key and value for each query token, as many heads as the cache's KVLayout has"
    for name, x in (("k", k), ("v", v)):
        if x is not None and x.shape != wanted:
            faults.append(f"{name}.shape={x.shape} must be {wanted}; {way_out}")
    if block_tables.ndim != 2 or kv_lens.shape != block_tables.shape[:1]:
        faults.append(f"{block_tables.shape=} and {kv_lens.shape=} must be [R, M] and [R]; try a row for each sequence")
    if cu_q_lens.shape != (kv_lens.shape[0] + 1,):
        faults.append(f"{cu_q_lens.shape=} must be [R + 1] for {kv_lens.shape=}; try prefix sums from 0")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        faults.append(f"{sinks.shape=} must be [H], here {q.shape[1:2]}; try one logit for each query head")
    if max_q_len is not None and max_q_len < 1:
        faults.append(f"{max_q_len=} must be at least 1; try None")
    if faults:
        raise ValueError("paged_attention: " + "; ".join(faults))


def _rank_faults(num_heads: int, layout: kv.KVLayout) -> list[str]:
    if num_heads % layout.num_ranks == 0:
        return []
    return [
        f"{num_heads} query heads are split over num_ranks={layout.num_ranks}, which must divide them; "
        f"try {math.gcd(num_heads, layout.num_ranks)} of them"
    ]


def _check_backend(backend: str, cache: KVCache, num_tokens: int, k_scale, v_scale, tree_mask, max_q_len) -> None:
    layout, faults = cache.layout, []
    if layout.order != ORDERS[backend]:
        faults.append(f"{layout.order=} must be {ORDERS[backend]!r} for {backend=}; try KVLayout(order=...)")
    if backend == "xla":
        extra = [
            name for name, x in (("k_scale", k_scale), ("v_scale", v_scale), ("tree_mask", tree_mask)) if x is not None
        ]
        faults += [f"{name} is the tpu backend's; try without" for name in extra]
    elif layout.order == WORDS:
        faults += tpu_attention.faults(layout)
    if (k_scale is None) != (v_scale is None):
        faults.append("k_scale and v_scale must both be given, or neither; try 1.0 for the other")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and jnp.shape(scale) not in ((), (1,), (layout.num_kv_heads,)):
            faults.append(f"{name}.shape={jnp.shape(scale)} must be () or ({layout.num_kv_heads},), a KV head each")
    if layout.dtype == "int8" and k_scale is None:
        faults.append("k_scale must be given for dtype='int8', or numbers below 1 would be lost; try max|k| / 127")
    if tree_mask is not None:
        if tree_mask.ndim != 2 or tree_mask.shape[0] != num_tokens:
            faults.append(f"{tree_mask.shape=} must be [T, Q] with T={num_tokens}; try a row for each query")
        elif max_q_len is None or max_q_len > min(tree_mask.shape[1], tpu_attention.MOST_QUERIES):
            most = min(tree_mask.shape[1], tpu_attention.MOST_QUERIES)
            faults.append(f"{max_q_len=} must be given with {tree_mask.shape=}, at most {most}; try fewer tokens")
    if faults:
        raise ValueError("paged_attention: " + "; ".join(faults))
