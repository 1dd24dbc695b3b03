"""The block pool: which block ids are free, and how many references every other block has.

It knows ids and counts. It does not know sequences, tables, tokens or KV memory, and not who holds a reference:
references are anonymous, so whoever releases one must be the one that took or retained it.

The functions are pure and total: an impossible request answers ``ok = False`` with the pool unchanged. They have
static shapes and no loop, and work under ``jit``, ``vmap``, ``scan`` and ``while_loop``. All integers are int32.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int32

from jpaged.config import INT32_MAX
from jpaged.types import AnyArray, BlockIds, Count, Flag


class BlockPool(struct.PyTreeNode):
    """The free ids and the reference counts of N blocks.

    Attributes:
      free_N: A stack. ``free_N[:num_free]`` holds every free id once, and the last of them is the next to be taken;
        what lies above is stale.
      num_free: The height of the stack.
      refs_N: References to each block, 0 exactly for the ids on the stack.
    """

    free_N: Int32[Array, " N"]
    num_free: Count
    refs_N: Int32[Array, " N"]

    @property
    def null(self) -> int:
        """The id that names no block: N (see `jpaged.types`)."""
        return self.free_N.shape[-1]


def create(num_blocks: int) -> BlockPool:
    """Returns a pool of free blocks, from which block 0 is taken first.

    Raises:
      ValueError: if ``num_blocks`` is not in [1, 2**31 - 2]; NULL, one past the last id, must be an int32 too.
    """
    if not 1 <= num_blocks < INT32_MAX:
        raise ValueError(f"{num_blocks=} must be in [1, 2**31 - 2]; try larger blocks to cover more tokens with fewer")
    return BlockPool(
        free_N=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.asarray(num_blocks, jnp.int32),
        refs_N=jnp.zeros(num_blocks, jnp.int32),
    )


def take(pool: BlockPool, counts_S: Int32[AnyArray, " S"], width: int) -> tuple[BlockPool, Int32[Array, "S A"], Flag]:
    """Takes ``counts_S[s]`` free blocks for each s: all that is asked for, or nothing.

    Args:
      pool: The pool.
      counts_S: Blocks wanted by each row.
      width: The most that a row may want, the A of the ids; static.

    Returns:
      The pool; the ids, one reference on each, row s holding ``counts_S[s]`` of them and then NULL; and ``ok``, false
      if a count lies outside [0, width] or the sum exceeds the free blocks. Then every id is NULL.

    Raises:
      ValueError: at trace time, if ``width < 1`` or the ids could not be counted in an int32.
    """
    if not 1 <= width <= INT32_MAX // max(1, counts_S.shape[0]):
        raise ValueError(f"{width=} must be at least 1, and times {counts_S.shape[0]} rows fit an int32; try less")
    sane = jnp.all((counts_S >= 0) & (counts_S <= width))
    counts_S = jnp.clip(counts_S, 0, width)  # so that no request, however absurd, overflows the sums below
    ends_S = jnp.cumsum(counts_S, dtype=jnp.int32)
    total = jnp.sum(counts_S, dtype=jnp.int32)
    ok = sane & (total <= pool.num_free)

    # Row s owns the interval [ends - counts, ends) of the stack, counted from the top.
    k_A = jnp.arange(width, dtype=jnp.int32)
    depth_SA = (ends_S - counts_S)[:, None] + k_A[None, :]
    wanted_SA = ok & (k_A[None, :] < counts_S[:, None])
    place_SA = jnp.where(wanted_SA, pool.num_free - 1 - depth_SA, pool.null)
    ids_SA = pool.free_N.at[place_SA].get(mode="fill", fill_value=pool.null)
    pool = pool.replace(
        num_free=pool.num_free - jnp.where(ok, total, 0),
        refs_N=pool.refs_N.at[ids_SA].set(1, mode="drop"),
    )
    return pool, ids_SA, ok


def is_live(pool: BlockPool, ids: BlockIds) -> Bool[Array, "..."]:
    """Says of each id whether it names a block that somebody holds; false for NULL and for what is no id at all."""
    refs = pool.refs_N.at[ids].get(mode="fill", fill_value=0)
    return (refs > 0) & (ids >= 0)  # a negative id has been read from the end


def retain(pool: BlockPool, ids: BlockIds) -> tuple[BlockPool, Flag]:
    """Adds a reference for each id; an id that occurs twice gains two.

    ``ok`` is false if an id is neither NULL nor live: a free block has no content worth holding.
    """

    def add(pool: BlockPool) -> tuple[BlockPool, Flag]:
        ok = jnp.all((ids == pool.null) | is_live(pool, ids))
        ids_or_null = jnp.where(ok, ids, pool.null)
        return pool.replace(refs_N=pool.refs_N.at[ids_or_null].add(1, mode="drop")), ok

    return _if_any(pool, ids, add)


def release(pool: BlockPool, ids: BlockIds) -> tuple[BlockPool, Flag]:
    """Drops a reference for each id; an id that occurs twice loses two. Blocks without references become free.

    ``ok`` is false if an id lies outside [0, NULL] or a block would lose more references than it has.
    The work is O(N + ids), so it is skipped when every id is NULL.
    """

    def drop(pool: BlockPool) -> tuple[BlockPool, Flag]:
        named = (ids >= 0) & (ids <= pool.null)
        lost_N = jnp.zeros_like(pool.refs_N).at[jnp.where(named, ids, pool.null)].add(1, mode="drop")
        ok = jnp.all(named) & jnp.all(lost_N <= pool.refs_N)
        lost_N = jnp.where(ok, lost_N, 0)
        refs_N = pool.refs_N - lost_N

        # The k-th freed id goes k places above the stack, however often it was named.
        freed_N = (lost_N > 0) & (refs_N == 0)
        upto_N = jnp.cumsum(freed_N, dtype=jnp.int32)
        place_N = jnp.where(freed_N, pool.num_free + upto_N - 1, pool.null)
        every_N = jnp.arange(pool.null, dtype=jnp.int32)
        free_N = pool.free_N.at[place_N].set(every_N, mode="drop")
        return BlockPool(free_N, pool.num_free + jnp.sum(freed_N, dtype=jnp.int32), refs_N), ok

    return _if_any(pool, ids, drop)


def _if_any(
    pool: BlockPool, ids: BlockIds, change: Callable[[BlockPool], tuple[BlockPool, Flag]]
) -> tuple[BlockPool, Flag]:
    """Runs ``change`` only if some id is not NULL, because command lists are padded and mostly empty."""
    return lax.cond(jnp.any(ids != pool.null), change, lambda pool: (pool, jnp.asarray(True)), pool)
