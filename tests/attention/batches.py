"""Ragged batches for tests of attention."""

import jax.numpy as jnp
import numpy as np

from jpaged import cache as kv


def make_case(
    seed,
    q_lens,
    kv_lens,
    *,
    heads=(2, 3),
    head_dim=8,
    block_size=4,
    spare=3,
    pad=0,
    width=None,
    dtype="float32",
    order="LCKNBD",
):
    """A ragged batch over shuffled blocks; everything that no row owns is NaN, in the cache and in the padding.

    What is stored has been rounded to the cache's dtype; one of eight bits without NaN holds its largest number
      instead.
    """
    rng = np.random.default_rng(seed)
    num_kv_heads, group = heads
    need = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(need) + spare
    ids = rng.permutation(num_blocks)
    width = width or max([*need, 1]) + 1
    tables = np.full((len(kv_lens), width), num_blocks, np.int32)
    data = np.full((2, num_blocks, block_size, 2, num_kv_heads, head_dim), np.nan, np.float32)
    start = 0
    for row, (blocks, length) in enumerate(zip(need, kv_lens, strict=True)):
        tables[row, :blocks] = ids[start : start + blocks]
        start += blocks
        for p in range(length):
            data[1, tables[row, p // block_size], p % block_size] = rng.normal(size=(2, num_kv_heads, head_dim))
    total = sum(q_lens) + pad
    q = np.full((total, num_kv_heads * group, head_dim), np.nan, np.float32)
    q[: sum(q_lens)] = rng.normal(size=(sum(q_lens), num_kv_heads * group, head_dim))
    layout = kv.KVLayout(2, num_blocks, block_size, num_kv_heads, head_dim, dtype, order)
    data = rounded(data, dtype)
    cache = stored(layout, data)
    cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    return q, data, cache, tables, np.asarray(kv_lens, np.int32), cu


def new_rows(data, tables, kv_lens, cu, pad):
    """The keys and values of the batch's own tokens, taken out of the cache (NaN stays behind)."""
    block_size = data.shape[2]
    k, v = [], []
    for row, length in enumerate(kv_lens):
        n = cu[row + 1] - cu[row]
        for p in range(length - n, length):
            place = data[1, tables[row, p // block_size], p % block_size]
            k.append(place[0].copy())
            v.append(place[1].copy())
            place[:] = np.nan
    shape = (0, *data.shape[4:])
    k, v = np.array(k).reshape(-1, *shape[1:]), np.array(v).reshape(-1, *shape[1:])
    junk = np.full((pad, *shape[1:]), np.nan)
    return np.concatenate([k, junk]).astype(np.float32), np.concatenate([v, junk]).astype(np.float32)


def rounded(data, dtype):
    """The same as it comes out of a cache of that dtype, in float32."""
    if dtype == "int8":
        return np.where(np.isnan(data), 127, np.clip(np.round(data * 16), -127, 127)).astype(np.float32)
    return np.array(jnp.asarray(data).astype(dtype).astype(jnp.float32))


def stored(layout, data):
    """A cache that holds ``data``, which is in canonical order."""
    return kv.KVCache(kv.pack(layout, jnp.asarray(data).astype(layout.dtype)), layout)
