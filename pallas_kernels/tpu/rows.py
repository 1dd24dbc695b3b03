"""Which rows of a ragged batch a kernel has to do, from the lengths alone, computed once a step.

A kernel walks its rows one after another, so they are put together here: those that others do, or that have nothing to
do, would cost it a look each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Rows(NamedTuple):
    """The rows that one kernel does.

    Attributes:
      table: Flat, four parts of R + 1 entries: which row, its tokens, its first query, its queries. Rows that are
        done come first, in the batch's order. The last entry is a row without tokens, which stands for "no row".
      bounds: Core c does the entries from ``bounds[c]`` up to ``bounds[c + 1]``.
    """

    table: Int32[Array, " 4R4"]
    bounds: Int32[Array, " C1"]


def unroll(many_R: Int32[Array, " R"], most: int) -> tuple[Array, Array, Array]:
    """Numbers the parts of all rows, row r having ``many_R[r]``: the row of each of ``most``, its number there, and how
    many there are."""
    ends_R = jnp.cumsum(many_R, dtype=jnp.int32)
    part_X = jnp.arange(most, dtype=jnp.int32)
    row_X = jnp.sum(ends_R[None] <= part_X[:, None], axis=1, dtype=jnp.int32)
    row_X = jnp.minimum(row_X, many_R.shape[0] - 1)
    return row_X, part_X - (ends_R - many_R)[row_X], ends_R[-1]


def tiles(
    wanted_R: Bool[Array, " R"],
    kv_lens_R: Int32[Array, " R"],
    cu_q_lens_R1: Int32[Array, " R1"],
    *,
    height: int,
    num_tokens: int,
    cores: int = 1,
) -> Rows:
    """Cuts the wanted rows into rows of at most ``height`` queries, each of which ends with its last query."""
    num_rows = kv_lens_R.shape[0]
    most = num_tokens // height + min(num_rows, num_tokens)
    q_lens_R = jnp.where(wanted_R, cu_q_lens_R1[1:] - cu_q_lens_R1[:-1], 0)
    row_X, nth_X, count = unroll(-(-q_lens_R // height), most)
    before_X = nth_X * height
    count_X = jnp.minimum(height, q_lens_R[row_X] - before_X)
    kv_X = kv_lens_R[row_X] - q_lens_R[row_X] + before_X + count_X
    columns = [row_X, kv_X, cu_q_lens_R1[row_X] + before_X, count_X]
    real_X = jnp.arange(most, dtype=jnp.int32) < count
    return _rows([jnp.where(real_X, column, 0) for column in columns], count, cores)


def choose(
    wanted_R: Bool[Array, " R"], kv_lens_R: Int32[Array, " R"], cu_q_lens_R1: Int32[Array, " R1"], *, cores: int = 1
) -> Rows:
    """Puts the wanted rows together, and deals them out to the cores by their tokens.

    A row goes to one core as a whole.
    """
    order_R = jnp.argsort(~wanted_R, stable=True)
    real_R = wanted_R[order_R]
    q_lens_R = cu_q_lens_R1[1:] - cu_q_lens_R1[:-1]
    columns: list[Array] = [
        order_R.astype(jnp.int32),
        kv_lens_R[order_R],
        cu_q_lens_R1[:-1][order_R],
        q_lens_R[order_R],
    ]
    columns = [jnp.where(real_R, column, 0) for column in columns]
    return _rows(columns, jnp.sum(wanted_R, dtype=jnp.int32), cores)


def _rows(columns: list[Array], count: Array, cores: int) -> Rows:
    """Appends "no row", and deals the rows out by their tokens."""
    ends_X = jnp.cumsum(columns[1], dtype=jnp.int32)
    shares = [ends_X[-1] // cores * core for core in range(1, cores)]
    inner = [jnp.minimum(jnp.sum(ends_X <= share, dtype=jnp.int32), count) for share in shares]
    table = jnp.concatenate([jnp.append(column, jnp.int32(0)) for column in columns])
    return Rows(table.astype(jnp.int32), jnp.stack([jnp.int32(0), *inner, count]))
