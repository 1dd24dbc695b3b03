"""What is wrong with a call of `attention`, each fault a sentence that ends with a way out.

It judges what is known when a call is traced: shapes, types, and numbers that are no arrays.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import backends
from jpaged import cache as kv
from jpaged.backends import ORDERS
from jpaged.cache import KVCache
from pallas_kernels.options import MOST_QUERIES

FLOATS = ("float32", "bfloat16", "float16")  # of queries, and of new keys and values


def of_arrays(q, k, v, cache: KVCache, layer, block_tables, kv_lens, cu_q_lens, sinks, max_q_len) -> list[str]:
    """Of shapes and types, of the cache and of the layer; arguments as of `attention.paged_attention`, all arrays."""
    layout, faults = cache.layout, []
    last = layout.num_layers - 1
    if not _is_whole(layer) or jnp.shape(layer):
        faults.append(f"{layer=} must be a single whole number; try one from 0 to {last}")
    elif isinstance(layer, int | np.integer) and not 0 <= layer <= last:
        faults.append(f"{layer=} must be from 0 to {last}, the cache's last; try a KVLayout of more num_layers")
    if cache.data.shape != layout.shape or str(cache.data.dtype) != layout.stored_dtype:
        wanted = f"{layout.stored_dtype}{list(layout.shape)}"
        faults.append(
            f"cache.data is {cache.data.dtype}{list(cache.data.shape)} and its layout's {wanted}; try create()"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and str(x.dtype) not in FLOATS:
            faults.append(f"{name}.dtype={x.dtype} must be one of {', '.join(FLOATS)}; try {name}.astype('bfloat16')")
    if (k is None) != (v is None):
        faults.append("k and v must both be given, or both be None; try None to read only")
    if q.ndim != 3 or q.shape[2] != layout.head_dim or not q.shape[1] or q.shape[1] % layout.num_kv_heads:
        faults.append(
            f"{q.shape=} must be [T, H, {layout.head_dim}], H a multiple of the cache's "
            f"{layout.num_kv_heads} KV heads; try q.reshape(T, H, D), or a cache of another KVLayout"
        )
    else:
        faults += of_ranks(q.shape[1], layout)
    wanted = (*q.shape[:1], layout.num_kv_heads, layout.head_dim)
    way_out = "one key and value for each query token, as many heads as the cache's KVLayout has"
    for name, x in (("k", k), ("v", v)):
        if x is not None and x.shape != wanted:
            faults.append(f"{name}.shape={x.shape} must be {wanted}; {way_out}")
    faults += of_batch(block_tables, kv_lens, cu_q_lens, max_q_len)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        faults.append(f"{sinks.shape=} must be [H], here {q.shape[1:2]}; try one logit for each query head")
    return faults


def of_batch(block_tables, kv_lens, cu_q_lens, max_q_len) -> list[str]:
    """Of what says which rows there are."""
    faults = []
    for name, x in (("block_tables", block_tables), ("kv_lens", kv_lens), ("cu_q_lens", cu_q_lens)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            faults.append(f"{name}.dtype={x.dtype} must be integers; try {name}.astype('int32')")
    if block_tables.ndim != 2 or kv_lens.shape != block_tables.shape[:1]:
        faults.append(f"{block_tables.shape=} and {kv_lens.shape=} must be [R, M] and [R]; try a row for each sequence")
    if kv_lens.ndim != 1 or cu_q_lens.shape != (kv_lens.shape[0] + 1,):
        faults.append(f"{cu_q_lens.shape=} must be [R + 1] for {kv_lens.shape=}; try prefix sums from 0")
    if max_q_len is not None and (not isinstance(max_q_len, int | np.integer) or max_q_len < 1):
        faults.append(f"{max_q_len=} must be a whole number of at least 1, and not traced; try None")
    return faults


def of_ranks(num_heads: int, layout: kv.KVLayout) -> list[str]:
    """Why query heads cannot be split as the cache is."""
    if num_heads % layout.num_ranks == 0:
        return []
    return [
        f"{num_heads} query heads are split over num_ranks={layout.num_ranks}, which must divide them; "
        f"try {math.gcd(num_heads, layout.num_ranks)} of them"
    ]


def of_numbers(sm_scale, sliding_window, soft_cap, k_scale, v_scale) -> list[str]:
    """Of numbers that are known at trace time, the values; of all, that they are single."""
    faults = []
    for name, x in (("sm_scale", sm_scale), ("sliding_window", sliding_window), ("soft_cap", soft_cap)):
        if x is not None and jnp.shape(x):
            faults.append(f"{name}.shape={jnp.shape(x)} must be (), one number for all; try a call for each")
    if sliding_window is not None and (
        not _is_whole(sliding_window)
        or (isinstance(sliding_window, int | np.integer) and not 1 <= sliding_window < 2**31)
    ):
        faults.append(f"{sliding_window=} must be a whole number from 1 to 2**31 - 1; try None, which sees all")
    if not np.isfinite(_known(sm_scale)).all():
        faults.append(f"{sm_scale=} must be a finite float32; try None, for 1 / sqrt(D)")
    if not ((_known(soft_cap) > 0) & np.isfinite(_known(soft_cap))).all():
        faults.append(f"{soft_cap=} must be above 0 and a finite float32; try None, which caps nothing")
    least = np.finfo(np.float32).tiny  # smaller ones count as 0
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not ((np.abs(_known(scale)) >= least) & np.isfinite(_known(scale))).all():
            faults.append(f"{name}={scale} must be a number other than 0, for new tokens are divided by it; try 1.0")
    return faults


def _is_whole(number) -> bool:
    if isinstance(number, int):
        return not isinstance(number, bool)
    return hasattr(number, "dtype") and jnp.issubdtype(number.dtype, jnp.integer)


def _known(number) -> np.ndarray:
    """What is known of an argument when a call is traced, as kernels have it; nothing of None and of JAX's arrays."""
    if number is None or isinstance(number, jax.Array):
        return np.ones(0, np.float32)
    with np.errstate(over="ignore"):
        return np.asarray(number).astype(np.float32)


def of_cache(backend: str, layout: kv.KVLayout) -> list[str]:
    """Why a backend cannot serve a cache."""
    faults = []
    if layout.order != ORDERS[backend]:
        faults.append(f"{layout.order=} must be {ORDERS[backend]!r} for {backend=}; try order={ORDERS[backend]!r}")
    else:
        faults += backends.faults(layout)
    if backend == "gpu_interpret" and layout.num_ranks > 1:
        faults.append(f"{layout.num_ranks=} must be 1 for {backend=}, which knows one device; try backend='xla'")
    if backend != "xla" and jax.config.read("jax_enable_x64"):
        faults.append(f"{backend=} needs jax_enable_x64 off, for kernels have no 64 bits; try backend='xla'")
    return faults


def of_backend(backend: str, cache: KVCache, num_tokens: int, k_scale, v_scale, tree_mask, max_q_len) -> list[str]:
    """Why a backend cannot serve such a call; ``num_tokens`` are the queries."""
    layout = cache.layout
    faults = of_cache(backend, layout)
    if backend == "xla" and tree_mask is not None:
        faults.append("tree_mask is of the kernels, and backend='xla' has none; try without")
    if (k_scale is None) != (v_scale is None):
        faults.append("k_scale and v_scale must both be given, or neither; try 1.0 for the other")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and jnp.shape(scale) not in ((), (1,), (layout.num_kv_heads,)):
            faults.append(f"{name}.shape={jnp.shape(scale)} must be () or ({layout.num_kv_heads},), a KV head each")
    if layout.dtype == "int8" and k_scale is None:
        faults.append("k_scale must be given for dtype='int8', or numbers below 1 would be lost; try max|k| / 127")
    if tree_mask is not None:
        if tree_mask.dtype != bool:
            faults.append(f"{tree_mask.dtype=} must be bool; try tree_mask != 0")
        if tree_mask.ndim != 2 or tree_mask.shape[0] != num_tokens:
            faults.append(f"{tree_mask.shape=} must be [T, Q] with T={num_tokens}; try a row for each query")
        elif max_q_len is None or max_q_len > min(tree_mask.shape[1], MOST_QUERIES):
            most = min(tree_mask.shape[1], MOST_QUERIES)
            faults.append(f"{max_q_len=} must be given with {tree_mask.shape=}, at most {most}; try fewer tokens")
    return faults
