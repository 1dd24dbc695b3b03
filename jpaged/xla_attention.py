"""The ``xla`` backend: attention through block tables in plain XLA, for CPU and wherever no kernel serves.

Queries are cut into tiles that belong to one row each. The pairs (tile, run of KV blocks) that attention needs form a
flat list, and a loop takes W of them a trip: it gathers their blocks, attends, and folds the result into the tiles'
running softmax (Milakov & Gimelshein 2018, section 3; split as in Flash-Decoding). The work follows the tokens that
there are, never the table's width or the longest row, and memory holds W runs at a time.

Rows of one query (decode) and of many (prefill) get tiles of different heights, one loop each; a loop with nothing to
do makes no trip. It knows nothing of models, and writing new tokens is not its business. Here C counts the tokens of a
run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jpaged.cache import KVCache, Scalar
from jpaged.quantisation import Quantisation

CHUNK_TOKENS = 128  # tokens of a run: short enough for short contexts, long enough for the matrix unit (docs/cpu.md)
# Runs that a trip takes at the most; with few tiles it takes as many as there are tiles, or two.
DECODE_ITEMS = 16  # for tiles of one query
PREFILL_ITEMS = 4
PREFILL_QUERIES = 32  # queries of a prefill tile
MASKED = -1e30  # finite, so that a tile that has seen nothing yet folds without NaN


class Batch(NamedTuple):
    """A ragged batch: who the queries belong to."""

    block_tables_RM: Int32[Array, "R M"]
    kv_lens_R: Int32[Array, " R"]
    cu_q_lens_R1: Int32[Array, " R1"]

    @property
    def q_lens_R(self) -> Int32[Array, " R"]:
        return self.cu_q_lens_R1[1:] - self.cu_q_lens_R1[:-1]


class Tiles(NamedTuple):
    """X tiles of Q queries: the row of each, its first query's token and position, and how many queries are real."""

    row_X: Int32[Array, " X"]
    token_X: Int32[Array, " X"]
    position_X: Int32[Array, " X"]
    count_X: Int32[Array, " X"]
    height: int


class Masking(NamedTuple):
    """What shapes the scores besides the causal mask."""

    sm_scale: float | Float[Array, ""]
    sliding_window: Int32[Array, ""] | None
    soft_cap: float | Float[Array, ""] | None
    sinks_H: Float[Array, " H"] | None


def attend(
    q_THD: Float[Array, "T H D"],
    cache: KVCache,
    layer: Scalar,
    batch: Batch,
    masking: Masking,
    quantisation: Quantisation | None = None,
    *,
    max_q_len: int,
) -> Float[Array, "T H D"]:
    """Attends every query of the batch to its row's tokens in one layer of the cache; padding queries give zeros.

    ``max_q_len`` is the most queries that any row has; 1 leaves out the prefill loop.
    """
    q_lens_R = batch.q_lens_R
    singles = Tiles(
        row_X=jnp.arange(q_lens_R.shape[0], dtype=jnp.int32),
        token_X=batch.cu_q_lens_R1[:-1],
        position_X=batch.kv_lens_R - 1,
        count_X=(q_lens_R == 1).astype(jnp.int32),
        height=1,
    )
    out_THD = _attend_tiles(
        q_THD, jnp.zeros_like(q_THD), cache, layer, batch, masking, quantisation, singles, DECODE_ITEMS
    )
    if max_q_len == 1:
        return out_THD
    tiles = _prefill_tiles(batch, q_THD.shape[0], max_q_len)
    return _attend_tiles(q_THD, out_THD, cache, layer, batch, masking, quantisation, tiles, PREFILL_ITEMS)


def _prefill_tiles(batch: Batch, num_tokens: int, max_q_len: int) -> Tiles:
    """Cuts each row of two or more queries into tiles; as many as the tokens could need, the last ones empty."""
    height = min(PREFILL_QUERIES, 1 << (max_q_len - 1).bit_length())
    num_rows = batch.kv_lens_R.shape[0]
    most = num_tokens // height + min(num_rows, num_tokens // 2)
    q_lens_R = batch.q_lens_R
    ends_R = jnp.cumsum(jnp.where(q_lens_R > 1, -(-q_lens_R // height), 0), dtype=jnp.int32)
    row_X, nth_X, real_X = _unflatten(ends_R, jnp.arange(max(most, 1), dtype=jnp.int32))
    before_X = nth_X * height
    return Tiles(
        row_X=row_X,
        token_X=batch.cu_q_lens_R1[row_X] + before_X,
        position_X=batch.kv_lens_R[row_X] - q_lens_R[row_X] + before_X,
        count_X=jnp.where(real_X, jnp.minimum(height, q_lens_R[row_X] - before_X), 0),
        height=height,
    )


def _unflatten(ends_R: Int32[Array, " R"], i_I: Int32[Array, " I"]) -> tuple[Array, Array, Array]:
    """For places in a flat list of rows' items: the row, the item's number in it, and whether the place is real."""
    row_I = jnp.sum(ends_R[None, :] <= i_I[:, None], axis=1, dtype=jnp.int32)
    real_I = row_I < ends_R.shape[0]
    row_I = jnp.minimum(row_I, ends_R.shape[0] - 1)
    starts_R = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_R[:-1]])
    return row_I, jnp.where(real_I, i_I - starts_R[row_I], 0), real_I


def _attend_tiles(
    q_THD: Array,
    out_THD: Array,
    cache: KVCache,
    layer: Scalar,
    batch: Batch,
    masking: Masking,
    quantisation: Quantisation | None,
    tiles: Tiles,
    items: int,
) -> Array:
    """Runs the loop over (tile, run of blocks) and scatters the tiles' outputs into ``out_THD``."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, block_size = cache.layout.num_kv_heads, cache.layout.block_size
    group = num_heads // num_kv_heads
    num_tiles, rows = tiles.row_X.shape[0], tiles.height * group
    # Eight bits are for keeping numbers: queries and weights of the softmax would lose too much in them.
    dtype = cache.data.dtype if cache.data.dtype.itemsize > 1 else q_THD.dtype
    k_scale_K, v_scale_K = (None, None) if quantisation is None else quantisation.each(num_kv_heads)
    run_blocks = max(1, min(batch.block_tables_RM.shape[1], CHUNK_TOKENS // block_size))
    run_tokens = run_blocks * block_size
    runs = -(-batch.block_tables_RM.shape[1] // run_blocks)  # of a row at the most
    items = min(items, max(2, num_tiles)) * max(1, CHUNK_TOKENS // run_tokens)
    items = max(1, min(items, num_tiles * runs))

    query_XQ = tiles.token_X[:, None] + jnp.arange(tiles.height, dtype=jnp.int32)[None, :]
    real_XQ = jnp.arange(tiles.height, dtype=jnp.int32)[None, :] < tiles.count_X[:, None]
    query_XQ = jnp.where(real_XQ, query_XQ, num_tokens)
    q_XQKGD = (
        q_THD.at[query_XQ]
        .get(mode="fill", fill_value=0)
        .reshape(num_tiles, tiles.height, num_kv_heads, group, head_dim)
    )
    q_XKQGD = q_XQKGD.transpose(0, 2, 1, 3, 4).reshape(num_tiles, num_kv_heads, rows, head_dim)

    # The runs that a tile's window touches, from its first query's oldest key to its last query's own.
    stop_X = tiles.position_X + tiles.count_X
    oldest_X = jnp.zeros_like(stop_X)
    if masking.sliding_window is not None:
        oldest_X = jnp.maximum(0, tiles.position_X + 1 - masking.sliding_window)
    first_X = oldest_X // run_tokens
    ends_X = jnp.cumsum(jnp.where(tiles.count_X > 0, -(-stop_X // run_tokens) - first_X, 0), dtype=jnp.int32)
    total = ends_X[-1]

    sinks = _sinks(masking.sinks_H, num_tiles, num_kv_heads, tiles.height, group)
    carry = (
        jnp.int32(0),
        jnp.full((num_tiles, num_kv_heads, rows), MASKED, jnp.float32) if sinks is None else sinks,
        jnp.full((num_tiles, num_kv_heads, rows), 0.0 if sinks is None else 1.0, jnp.float32),
        jnp.zeros((num_tiles, num_kv_heads, rows, head_dim), jnp.float32),
    )

    def trip(carry: tuple) -> tuple:
        done, max_XKQ, sum_XKQ, acc_XKQD = carry
        tile_W, nth_W, real_W = _unflatten(ends_X, done + jnp.arange(items, dtype=jnp.int32))
        run_W = first_X[tile_W] + nth_W
        row_W = tiles.row_X[tile_W]
        k_WKCD, v_WKCD = _gather(cache, layer, batch.block_tables_RM, row_W, run_W, run_blocks)

        key_WC = run_W[:, None] * run_tokens + jnp.arange(run_tokens, dtype=jnp.int32)[None, :]
        owned_WC = real_W[:, None] & (key_WC < batch.kv_lens_R[row_W][:, None]) & (key_WC >= oldest_X[tile_W][:, None])
        seen_WQC = _seen(tiles, tile_W, key_WC, owned_WC, masking.sliding_window)
        seen_WQC = jnp.repeat(seen_WQC, group, axis=1)[:, None]
        # A stale or foreign row may hold NaN, and 0 · NaN is NaN: its value must not reach the product.
        v_WKCD = jnp.where(owned_WC[:, None, :, None], v_WKCD, jnp.zeros_like(v_WKCD))

        s_WKQC = _product("wkqd,wkcd->wkqc", q_XKQGD[tile_W].astype(dtype), k_WKCD.astype(dtype)) * masking.sm_scale
        if k_scale_K is not None:
            s_WKQC *= k_scale_K[None, :, None, None]
        if masking.soft_cap is not None:
            s_WKQC = masking.soft_cap * jnp.tanh(s_WKQC / masking.soft_cap)
        s_WKQC = jnp.where(seen_WQC, s_WKQC, MASKED)
        new_XKQ = max_XKQ.at[tile_W].max(jnp.max(s_WKQC, axis=-1))
        p_WKQC = jnp.where(seen_WQC, jnp.exp(s_WKQC - new_XKQ[tile_W][..., None]), 0.0)
        fade_XKQ = jnp.exp(max_XKQ - new_XKQ)
        sum_XKQ = (sum_XKQ * fade_XKQ).at[tile_W].add(jnp.sum(p_WKQC, axis=-1))
        add_WKQD = _product("wkqc,wkcd->wkqd", p_WKQC.astype(dtype), v_WKCD.astype(dtype))
        acc_XKQD = (acc_XKQD * fade_XKQ[..., None]).at[tile_W].add(add_WKQD)
        return done + items, new_XKQ, sum_XKQ, acc_XKQD

    _, _, sum_XKQ, acc_XKQD = lax.while_loop(lambda carry: carry[0] < total, trip, carry)
    o_XKQD = acc_XKQD / jnp.where(sum_XKQ == 0, 1.0, sum_XKQ)[..., None]
    if v_scale_K is not None:
        o_XKQD *= v_scale_K[None, :, None, None]
    o_XQHD = o_XKQD.reshape(num_tiles, num_kv_heads, tiles.height, group, head_dim).transpose(0, 2, 1, 3, 4)
    o_XQHD = o_XQHD.reshape(num_tiles, tiles.height, num_heads, head_dim).astype(out_THD.dtype)
    return out_THD.at[query_XQ].set(o_XQHD, mode="drop")


def _gather(
    cache: KVCache, layer: Scalar, tables_RM: Array, row_W: Array, run_W: Array, run_blocks: int
) -> tuple[Array, Array]:
    """Keys and values of W runs of blocks, [W, K, C, D]. A column past the table, or NULL, reads some other block."""
    layout = cache.layout
    column_WB = run_W[:, None] * run_blocks + jnp.arange(run_blocks, dtype=jnp.int32)[None, :]
    block_W1B = tables_RM.at[row_W[:, None], column_WB].get(mode="clip")[:, None, :]
    head_1K1 = jnp.arange(layout.num_kv_heads, dtype=jnp.int32)[None, :, None]
    shape = (row_W.shape[0], layout.num_kv_heads, run_blocks * layout.block_size, layout.head_dim)
    k, v = (
        cache.data.at[layout.index(L=layer, C=c, K=head_1K1, N=block_W1B)].get(mode="clip").reshape(shape)
        for c in (0, 1)
    )
    return k, v


def _seen(
    tiles: Tiles, tile_W: Array, key_WC: Array, owned_WC: Array, sliding_window: Int32[Array, ""] | None
) -> Bool[Array, "W Q C"]:
    """Which key each query may see: causal, within the window, and owned by the row."""
    query_WQ1 = (tiles.position_X[tile_W][:, None] + jnp.arange(tiles.height, dtype=jnp.int32)[None, :])[..., None]
    seen_WQC = owned_WC[:, None, :] & (key_WC[:, None, :] <= query_WQ1)
    if sliding_window is not None:
        seen_WQC &= key_WC[:, None, :] > query_WQ1 - sliding_window
    return seen_WQC


def _sinks(
    sinks_H: Array | None, num_tiles: int, num_kv_heads: int, height: int, group: int
) -> Float32[Array, "X K QG"] | None:
    """The sink logit of each tile row: the running softmax starts from it, as from a key with no value."""
    if sinks_H is None:
        return None
    sinks_1K1G = sinks_H.astype(jnp.float32).reshape(1, num_kv_heads, 1, group)
    return jnp.broadcast_to(sinks_1K1G, (num_tiles, num_kv_heads, height, group)).reshape(
        num_tiles, num_kv_heads, height * group
    )


def _product(spec: str, a: Array, b: Array) -> Float32[Array, "..."]:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def default_sm_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)
