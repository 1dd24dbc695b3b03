"""Writes the KV of rows with many queries (prefill) into their blocks.

The new tokens lie in words by their place in the batch, a block by the place in its row; so the two are apart by some
words, and by some tokens within a word. A block is read in the batch's order, moved up by both, laid over what the
block holds already where it is not all new, and written. Rows with few queries are `decode`'s.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int32, Shaped

from pallas_kernels.tpu import words
from pallas_kernels.tpu.rows import unroll
from pallas_kernels.tpu.words import PIECE, SUBLANES

BUFFERS = 2


class Units(NamedTuple):
    """Blocks that get new tokens, computed once a step.

    Attributes:
      table: Flat, four parts: the block, the batch's token at its place 0 (below 0 if the row begins later in the
        block), the first and the end of the places that are new. Real ones come first.
      count: How many there are.
    """

    table: Int32[Array, " 4X"]
    count: Int32[Array, " 1"]


def units(
    wanted_R: Bool[Array, " R"],
    block_tables_RM: Int32[Array, "R M"],
    kv_lens_R: Int32[Array, " R"],
    cu_q_lens_R1: Int32[Array, " R1"],
    *,
    block_size: int,
    num_tokens: int,
) -> Units:
    """The blocks that the new tokens of the wanted rows lie in."""
    num_rows, columns = block_tables_RM.shape
    most = num_tokens // block_size + 2 * min(num_rows, num_tokens)
    q_lens_R = jnp.where(wanted_R, cu_q_lens_R1[1:] - cu_q_lens_R1[:-1], 0)
    begin_R = kv_lens_R - q_lens_R
    first_R = begin_R // block_size
    many_R = jnp.where(q_lens_R > 0, (kv_lens_R - 1) // block_size - first_R + 1, 0)
    row_X, nth_X, count = unroll(many_R, most)
    column_X = first_R[row_X] + nth_X
    block_X = block_tables_RM[row_X, jnp.clip(column_X, 0, columns - 1)]
    origin_X = cu_q_lens_R1[row_X] - begin_R[row_X] + column_X * block_size
    low_X = jnp.maximum(begin_R[row_X] - column_X * block_size, 0)
    high_X = jnp.minimum(kv_lens_R[row_X] - column_X * block_size, block_size)
    return Units(jnp.concatenate([block_X, origin_X, low_X, high_X]), count[None])


def in_order(tokens_TF: Shaped[Array, "T F"], block_size: int) -> Int32[Array, "W F"]:
    """New tokens as words, with room before and behind for blocks that begin or end outside of the batch."""
    each = words.per_word(tokens_TF.dtype)
    count = tokens_TF.shape[0]
    behind = (-count % (SUBLANES * each)) + block_size + 2 * SUBLANES * each
    return words.to_words(jnp.pad(tokens_TF, ((block_size, behind), (0, 0))))


def write(
    work: Units,
    new_WF: Int32[Array, "W2 F"],
    cache_LNWF: Int32[Array, "L N W F"],
    layer: Int32[Array, ""],
    *,
    dtype: str,
    block_size: int,
    vmem: int | None = None,
    interpret: Any = False,
) -> Int32[Array, "L N W F"]:
    """Writes the blocks of ``work`` in one layer; ``new_WF`` are the batch's tokens by `in_order`.

    ``vmem`` is the bytes of VMEM that it may take; None is the compiler's own limit.
    """
    num_words, lanes = cache_LNWF.shape[2:]
    window = -(-num_words // SUBLANES) * SUBLANES + 2 * SUBLANES
    far = new_WF if interpret else pltpu.with_memory_space_constraint(new_WF, pltpu.HBM)
    return pl.pallas_call(
        functools.partial(_kernel, words.per_word(dtype), block_size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, window, lanes), jnp.int32),
                pltpu.VMEM((BUFFERS, num_words, lanes), jnp.int32),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(cache_LNWF.shape, jnp.int32),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, disable_semaphore_checks=True, vmem_limit_bytes=vmem
        ),
        interpret=interpret,
        name="paged_write",
    )(work.table, work.count, layer[None], far, cache_LNWF)


def _kernel(
    each: int,
    block_size: int,
    table: Any,  # [4·X]
    count: Any,  # [1]
    layer: Any,  # [1]
    new: Any,  # [X, F]
    _: Any,
    cache: Any,  # [L, N, W, F]
    window: Any,  # [2, W + 16, F]
    block: Any,  # [2, W, F]
    new_there: Any,
    old_there: Any,
    gone: Any,
) -> None:
    num_units, blocks = table.shape[0] // 4, cache.at[layer[0]]
    num_words, lanes = block.shape[1:]
    bits = 32 // each

    def part(k: int, i: Any) -> Any:
        return table[k * num_units + i]

    def start(i: Any) -> Any:
        """The word of `new` that holds the block's first token, and that token's place in it."""
        token = part(1, i) + block_size
        return token // each, token % each

    def is_partial(i: Any) -> Any:
        return part(3, i) - part(2, i) < block_size

    def new_copy(i: Any) -> Any:
        first = pl.multiple_of(start(i)[0] & -SUBLANES, SUBLANES)
        return pltpu.make_async_copy(
            new.at[pl.ds(first, window.shape[1])], window.at[i % BUFFERS], new_there.at[i % BUFFERS]
        )

    def old_copy(i: Any) -> Any:
        return pltpu.make_async_copy(blocks.at[part(0, i)], block.at[i % BUFFERS], old_there.at[i % BUFFERS])

    def out_copy(i: Any) -> Any:
        return pltpu.make_async_copy(block.at[i % BUFFERS], blocks.at[part(0, i)], gone.at[i % BUFFERS])

    def fetch(i: Any) -> None:
        new_copy(i).start()
        pl.when(is_partial(i))(lambda: old_copy(i).start())

    def one(i: Any, _: Any) -> None:
        @pl.when(i + 1 < count[0])
        def _next() -> None:
            pl.when(i >= 1)(lambda: out_copy(i - 1).wait())
            fetch(i + 1)

        new_copy(i).wait()
        partial = is_partial(i)
        pl.when(partial)(lambda: old_copy(i).wait())
        word, skip = start(i)
        row = lax.broadcasted_iota(jnp.int32, (num_words, 1), 0)
        fresh_bits = words.first_tokens(part(3, i) - row * each, each) & ~words.first_tokens(
            part(2, i) - row * each, each
        )
        # A register's rows turn round together, so the window's length may be any multiple of a tile's.
        turn = window.shape[1] - word % SUBLANES
        for lane in range(0, lanes, PIECE):
            piece = slice(lane, min(lane + PIECE, lanes))
            seen = pltpu.roll(window[i % BUFFERS, :, piece], turn, 0)
            low, high = seen[:num_words], pltpu.roll(seen, window.shape[1] - 1, 0)[:num_words]
            moved = low
            if each > 1:
                apart = lax.shift_right_logical(low, jnp.broadcast_to(skip * bits, low.shape))
                moved = jnp.where(skip == 0, low, apart | high << (32 - skip * bits) % 32)
            held = jnp.where(partial, block[i % BUFFERS, :, piece], 0)
            block[i % BUFFERS, :, piece] = held & ~fresh_bits | moved & fresh_bits
        out_copy(i).start()

    pl.when(count[0] > 0)(lambda: fetch(jnp.int32(0)))
    lax.fori_loop(0, count[0], one, None)
    pl.when(count[0] > 1)(lambda: out_copy(count[0] - 2).wait())
    pl.when(count[0] > 0)(lambda: out_copy(count[0] - 1).wait())
