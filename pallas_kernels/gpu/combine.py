"""What splits have found of the same items, put together by a kernel.

A program takes some columns of an item's rows for one KV head, and goes through those of its splits that have tokens,
several on their way at once. It reads as many rows as products have; those behind what a split has written are the next
one's, and belong to no query.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.gpu import spans, sums
from pallas_kernels.gpu.form import Form, Inputs
from pallas_kernels.gpu.mosaic import plgpu
from pallas_kernels.gpu.sums import Layouts, Partials, Sums, across

_AT_ONCE = 8  # splits


def combine(form: Form, inputs: Inputs, partials: Partials, *, interpret: Any = None) -> Float[Array, "X K O D"]:
    """The results of all items, in the queries' dtype; zeros where no split has a token.

    Args:
      form, inputs: As `flash.attend` had them.
      partials: What it found.
      interpret: `plgpu.InterpretGPUParams` for a machine that has no GPU.
    """
    rows, dtype = form.rows, inputs.q_XKPD.dtype
    num_items, num_kv_heads, places = partials.top_XKSP.shape[0], form.num_kv_heads, rows.places
    columns = sums.columns_at_once(rows)
    sizes = {"num_kv_heads": num_kv_heads, "splits": form.tiling.splits}
    read = {"items_5X": inputs.items_5X, "scales": inputs.scales}
    read |= {name: x for name in ("window_1", "sinks_KP") if (x := getattr(inputs, name)) is not None}

    def program(parts: Any, tops: Any, masses: Any, *refs: Any, **smem: Any) -> None:
        *given, out = refs
        here = Inputs.given(read, given)
        item, head, column = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("column")
        layouts = Layouts.of(dtype, rows.warps)
        these = pl.ds(column * columns, columns)

        def fold(split: Any, before: Sums) -> Sums:
            top, mass = (
                plgpu.load(ref.at[item, head, split], layout=layouts.row, optimized=False) for ref in (tops, masses)
            )
            at = pl.ds(sums.first_row(rows, item, head, split, **sizes), places)
            part = plgpu.load(parts.at[at, these], layout=layouts.out, optimized=False)
            most = jnp.maximum(before.top_P, top)
            fade, weight = jnp.exp2(before.top_P - most), jnp.exp2(top - most)
            acc = before.acc_PD * across(fade, part) + part * across(weight, part)
            return Sums(acc, most, before.mass_P * fade + mass * weight)

        def several(nth: Any, found: Sums) -> Sums:
            for k in range(_AT_ONCE):
                found = fold(nth * _AT_ONCE + k, found)
            return found

        used, none = spans.splits(form, here, item), Sums.none(rows, layouts, columns)
        pl.when(used == 0)(lambda: sums.store(out.at[item, head, :, these], none.acc_PD, smem))

        @pl.when(used > 0)
        def _there_is_something() -> None:
            rounds = lax.div(used, jnp.int32(_AT_ONCE))
            found = lax.fori_loop(0, rounds, several, none)
            found = lax.fori_loop(rounds * _AT_ONCE, used, fold, found)
            sink = None
            if here.sinks_KP is not None:
                sink = plgpu.load(here.sinks_KP.at[head], layout=layouts.row, optimized=False)
            sums.store(out.at[item, head, :, these], found.result(here.scales[num_kv_heads + head], sink), smem)

    return plgpu.kernel(
        program,
        out_type=jax.ShapeDtypeStruct((num_items, num_kv_heads, rows.stored, rows.head_dim), dtype),
        scratch_types=sums.room_to_store(rows, columns),
        grid=(rows.head_dim // columns, num_kv_heads, num_items),
        grid_names=("column", "head", "item"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_combine",
    )(*partials, *read.values())
