"""What splits have found of the same items, put together by a kernel.

A program takes some columns of an item's rows for one KV head, and goes through its splits, several on their way at
once. It reads as many rows as products have; those behind what a split has written are the next one's, and belong to no
query.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from pallas_kernels.gpu import sums
from pallas_kernels.gpu.mosaic import plgpu
from pallas_kernels.gpu.sums import Layouts, Partials, Sums, across
from pallas_kernels.gpu.tiling import Rows

_AT_ONCE = 8  # splits


def combine(
    rows: Rows,
    partials: Partials,
    scales: Float32[Array, " F"],
    sinks_KP: Float32[Array, "K P"] | None,
    dtype: str,
    *,
    interpret: Any = None,
) -> Float[Array, "X K O D"]:
    """The results of all items; zeros where no split has a token.

    Args:
      rows: Of the items.
      partials: By `flash.attend`.
      scales, sinks_KP: As `flash.Inputs` has them.
      dtype: Of the results; two bytes.
      interpret: `plgpu.InterpretGPUParams` for a machine that has no GPU.
    """
    num_items, num_kv_heads, splits, places = partials.top_XKSP.shape
    columns = sums.columns_at_once(rows)
    sizes = {"num_kv_heads": num_kv_heads, "splits": splits}

    def program(parts: Any, tops: Any, masses: Any, scales: Any, *refs: Any, **smem: Any) -> None:
        *sinks, out = refs
        item, head, column = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("column")
        layouts = Layouts.of(jnp.dtype(dtype), rows.warps)
        these = pl.ds(column * columns, columns)

        def fold(split: Any, before: Sums) -> Sums:
            top, mass = (
                plgpu.load(ref.at[item, head, split], layout=layouts.row, optimized=False) for ref in (tops, masses)
            )
            at = pl.ds(sums.first_row(rows, item, head, split, **sizes), places)
            part = plgpu.load(parts.at[at, these], layout=layouts.out, optimized=False)
            most = jnp.maximum(before.top_P, top)
            fade, weight = jnp.exp2(before.top_P - most), jnp.exp2(top - most)
            # Without a token a part is whatever memory held. NaN is not 0: it stays.
            part = jnp.where(across(mass, part) != 0.0, part * across(weight, part), 0.0)
            acc = before.acc_PD * across(fade, part) + part
            return Sums(acc, most, before.mass_P * fade + mass * weight)

        def several(nth: Any, found: Sums) -> Sums:
            for k in range(_AT_ONCE):
                found = fold(nth * _AT_ONCE + k, found)
            return found

        found = lax.fori_loop(0, splits // _AT_ONCE, several, Sums.none(rows, layouts, columns))
        for split in range(splits // _AT_ONCE * _AT_ONCE, splits):
            found = fold(split, found)
        sink = plgpu.load(sinks[0].at[head], layout=layouts.row, optimized=False) if sinks else None
        sums.store(out.at[item, head, :, these], found.result(scales[num_kv_heads + head], sink), smem)

    return plgpu.kernel(
        program,
        out_type=jax.ShapeDtypeStruct((num_items, num_kv_heads, rows.stored, rows.head_dim), dtype),
        scratch_types=sums.room_to_store(rows, columns),
        grid=(rows.head_dim // columns, num_kv_heads, num_items),
        grid_names=("column", "head", "item"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_combine",
    )(*partials, scales, *([] if sinks_KP is None else [sinks_KP]))
