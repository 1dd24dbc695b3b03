"""An item's running sums: how they lie in registers, what they begin and end as, and how they are written.

Of every row of the products: the sum of values by weight, the greatest score so far, which weights are relative to, and
the sum of weights (Milakov & Gimelshein 2018, section 3). Scores are in units of log2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from pallas_kernels.gpu import fetching
from pallas_kernels.gpu.mosaic import plgpu
from pallas_kernels.gpu.tiling import THREADS, Rows

MASKED = -1e30  # finite, so that a row that has seen nothing yet folds without NaN
_COLUMNS = 32  # that a row's threads have at the least, where rows are cut


class Layouts(NamedTuple):
    """How arrays lie in registers: both operands of a product, its result, and one number for each row of that."""

    left: Any
    right: Any
    out: Any
    row: Any

    @classmethod
    def of(cls, dtype: Any, warps: int) -> Layouts:
        kinds = (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
        left, right, out = (kind(dtype, m_warps=warps) for kind in kinds)
        return cls(left, right, out, out.reduce(1))


class Sums(NamedTuple):
    """Sum of values, greatest score and sum of weights."""

    acc_PD: Float32[Array, "P D"]
    top_P: Float32[Array, " P"]
    mass_P: Float32[Array, " P"]

    @classmethod
    def none(cls, rows: Rows, layouts: Layouts, columns: int) -> Sums:
        """Before the first token."""
        return cls(
            plgpu.layout_cast(jnp.zeros((rows.places, columns), jnp.float32), layouts.out),
            plgpu.layout_cast(jnp.full((rows.places,), MASKED, jnp.float32), layouts.row),
            plgpu.layout_cast(jnp.zeros((rows.places,), jnp.float32), layouts.row),
        )

    def result(self, factor: Any, sink_P: Any) -> Array:
        """Times a factor; with a sink, which has a weight and no value, if it is not None."""
        acc_PD, mass_P = self.acc_PD, self.mass_P
        if sink_P is not None:
            most_P = jnp.maximum(self.top_P, sink_P)
            fade_P = jnp.exp2(self.top_P - most_P)
            acc_PD, mass_P = across(fade_P, acc_PD) * acc_PD, mass_P * fade_P + jnp.exp2(sink_P - most_P)
        return acc_PD * across(factor / jnp.maximum(mass_P, 1e-30), acc_PD)


def across(row_P: Array, like_PD: Array) -> Array:
    """A number for each row, in all its columns."""
    return lax.broadcast_in_dim(row_P, like_PD.shape, [0])


def columns_at_once(rows: Rows) -> int:
    """Columns that a program takes, where rows can be cut: as few as its threads can write evenly."""
    fitting = range(_COLUMNS, rows.head_dim, _COLUMNS)
    return next((n for n in fitting if rows.head_dim % n == 0 and rows.stored * n % THREADS == 0), rows.head_dim)


def room_to_store(rows: Rows, columns: int) -> dict[str, Any]:
    """Shared memory that `store` needs."""
    if rows.stored == rows.places:
        return {}
    return {"out_smem": plgpu.SMEM((rows.places, columns), jnp.float32)}


def store(there: Any, acc_PD: Array, smem: dict[str, Any]) -> None:
    """Writes the first rows, as many as there is room for."""
    if "out_smem" not in smem:
        plgpu.store(there, acc_PD.astype(there.dtype), optimized=False)
        return
    # In registers the rows that no query has lie among the others; in shared memory they lie behind them.
    plgpu.store(smem["out_smem"], acc_PD, optimized=False)
    first = smem["out_smem"].at[pl.ds(0, there.shape[0])]
    kept = plgpu.load(first, layout=fetching.strided(there.shape, jnp.float32), optimized=False)
    plgpu.store(there, kept.astype(there.dtype), optimized=False)


class Partials(NamedTuple):
    """What S splits of X items have found for K KV heads; of splits without tokens, whatever memory held.

    Attributes:
      acc_ND: Rows that are stored of every split: of an item's head one split's after another's. Behind the last, as
        many as a reader of whole products reads beyond them.
      top_XKSP, mass_XKSP: Of each row of the products.
    """

    acc_ND: Float32[Array, "N D"]
    top_XKSP: Float32[Array, "X K S P"]
    mass_XKSP: Float32[Array, "X K S P"]

    @classmethod
    def shapes(cls, rows: Rows, num_items: int, num_kv_heads: int, splits: int) -> tuple[tuple[int, ...], ...]:
        each = (num_items, num_kv_heads, splits)
        behind = rows.places - rows.stored
        return (math.prod(each) * rows.stored + behind, rows.head_dim), (*each, rows.places), (*each, rows.places)


def first_row(rows: Rows, item: Any, head: Any, split: Any, *, num_kv_heads: int, splits: int) -> Any:
    """Of a split's in `Partials.acc_ND`."""
    return ((item * num_kv_heads + head) * splits + split) * rows.stored
