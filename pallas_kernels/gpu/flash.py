"""The kernel: items of queries against the tokens of their rows, read block by block through the table.

A program is one warpgroup. It takes an item's queries for one KV head, and of the row's tokens those of its split, a
chunk at a time: scores, an online softmax (`sums`), and the weighted sum of values (`products`). The next chunks are on
their way meanwhile, by the tensor memory accelerator or, before Hopper, by cp.async.

Only chunks in which some query does not see some token are masked; in those, values that no query may see are zeroed as
well, for 0 times NaN is NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.gpu import fetching, spans, sums
from pallas_kernels.gpu.eighths import widened
from pallas_kernels.gpu.form import Form, Inputs
from pallas_kernels.gpu.mosaic import plgpu
from pallas_kernels.gpu.products import ByWarp, ByWarpgroup
from pallas_kernels.gpu.spans import Span
from pallas_kernels.gpu.sums import MASKED, Layouts, Partials, Sums, across

_HALF_LN2 = math.log(2) / 2


def attend(form: Form, inputs: Inputs, *, interpret: Any = None) -> Float[Array, "X K O D"] | Partials:
    """Attends all items.

    Args:
      form: What is compiled in.
      inputs: What is read.
      interpret: `plgpu.InterpretGPUParams` for a machine that has no GPU.

    Returns:
      Without splits, the results in the queries' dtype, of the O rows that are stored; zeros for items that there are
      not. With splits, what `combine` takes.
    """
    num_items, num_kv_heads, places, head_dim = inputs.q_XKPD.shape
    rows, tiling, dtype, stored = form.rows, form.tiling, inputs.q_XKPD.dtype, inputs.cache_HBD.dtype
    if tiling.splits == 1:
        out_type = [jax.ShapeDtypeStruct((num_items, num_kv_heads, rows.stored, head_dim), dtype)]
    else:
        shapes = Partials.shapes(rows, num_items, num_kv_heads, tiling.splits)
        out_type = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    chunk_shape = (tiling.stages, tiling.chunk, head_dim)
    kv_tiles = fetching.transforms(min(form.block_size, tiling.chunk), head_dim, stored, tma=form.chip.has_tma)
    scratch = {
        "k_smem": plgpu.SMEM(chunk_shape, stored, transforms=kv_tiles),
        "v_smem": plgpu.SMEM(chunk_shape, stored, transforms=kv_tiles),
        "q_smem": plgpu.SMEM(
            (places, head_dim), dtype, transforms=fetching.transforms(places, head_dim, dtype, tma=form.chip.has_tma)
        ),
    }
    if stored.itemsize == 1:
        wide = fetching.transforms(tiling.chunk, head_dim, dtype, tma=True)
        scratch["wide_smem"] = plgpu.SMEM((tiling.chunk, head_dim), dtype, transforms=wide)
    scratch |= sums.room_to_store(rows, head_dim)
    scratch |= (ByWarpgroup if form.by_warpgroup else ByWarp).room(places, tiling.chunk, dtype)
    if form.chip.has_tma:
        blocks = max(1, tiling.chunk // form.block_size)
        for name in ("k_there", "v_there"):
            scratch[name] = plgpu.Barrier(num_arrivals=blocks, num_barriers=tiling.stages)
        scratch["q_there"] = plgpu.Barrier()
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    found = plgpu.kernel(
        functools.partial(_program, form, tuple(given), interpret is not None),
        out_type=out_type,
        scratch_types=scratch,
        grid=(tiling.splits, num_kv_heads, num_items),
        grid_names=("split", "head", "item"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name=form.name,
    )(*given.values())
    return found[0] if tiling.splits == 1 else Partials(*found)


def _program(form: Form, given: tuple[str, ...], interpreted: bool, *refs: Any, **smem: Any) -> None:
    outs: Any = refs[len(given) :]
    inputs = Inputs.given(given, refs[: len(given)])
    item, head, split = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("split")
    span = spans.of(form, inputs, item, split)
    layouts = Layouts.of(inputs.q_XKPD.dtype, form.rows.warps)
    none = Sums.none(form.rows, layouts, form.rows.head_dim)

    if form.tiling.splits == 1:
        pl.when(span.chunks == 0)(lambda: sums.store(outs[0].at[item, head], none.acc_PD, smem))

    @pl.when(span.chunks > 0)
    def _there_is_work() -> None:
        moves = fetching.Moves(form, inputs.cache_HBD, inputs.tables_RM, inputs.layer_1[0], head, span, smem)
        moves.begin(inputs.q_XKPD.at[item, head])
        if form.by_warpgroup:
            products = ByWarpgroup(smem, interpreted, converted="wide_smem" in smem)
        else:
            products = ByWarp(smem, layouts, _mma if interpreted else plgpu.mma)
        tile = _Tile(form, inputs, layouts, products, item, head, span, moves, smem)
        found = lax.fori_loop(0, span.chunks, tile.chunk, none)
        if form.tiling.splits > 1:
            sizes = {"num_kv_heads": form.num_kv_heads, "splits": form.tiling.splits}
            first = sums.first_row(form.rows, item, head, split, **sizes)
            sums.store(outs[0].at[pl.ds(first, form.rows.stored)], found.acc_PD, smem)
            plgpu.store(outs[1].at[item, head, split], found.top_P, optimized=False)
            plgpu.store(outs[2].at[item, head, split], found.mass_P, optimized=False)
            return
        sink = None
        if inputs.sinks_KP is not None:
            sink = plgpu.load(inputs.sinks_KP.at[head], layout=layouts.row, optimized=False)
        sums.store(outs[0].at[item, head], found.result(inputs.scales[form.num_kv_heads + head], sink), smem)


def _mma(acc: Array, a: Array, b: Array) -> Array:
    """What stands for `plgpu.mma` in the interpreter, which has none."""
    return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)


def _tanh(y: Array) -> Array:
    """Of x, given as 2 · log2(e) · x: the instruction for tanh is right to eleven bits only.

    Near 0, where 1 − 2 / (e^2x + 1) loses what the cap will enlarge, by the series x − x³/3 + 2x⁵/15.
    """
    x = y * _HALF_LN2
    square = x * x
    near = x * (1.0 + square * (square * (2 / 15) - 1 / 3))
    return jnp.where(square < 0.01, near, 1.0 - 2.0 / (jnp.exp2(y) + 1.0))


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A program's arithmetic."""

    form: Form
    inputs: Inputs
    layouts: Layouts
    products: ByWarp | ByWarpgroup
    item: Any
    head: Any
    span: Span
    moves: Any
    smem: dict[str, Any]

    def chunk(self, nth: Any, carry: Any) -> Any:
        """Folds a chunk in."""
        start = (self.span.first + nth) * self.form.tiling.chunk
        everybodys = self.span.start if self.form.tree else self.span.end - self.span.count + 1  # but for windows
        edge = start + self.form.tiling.chunk > everybodys
        if self.inputs.window_1 is not None:
            edge |= start < self.span.end - self.inputs.window_1[0]
        fold = functools.partial(self._fold, start)
        return lax.cond(edge, functools.partial(fold, True), functools.partial(fold, False), nth, carry)

    def _fold(self, start: Any, masked: bool, nth: Any, carry: Any) -> Any:
        form, (acc, top, mass) = self.form, carry
        slot = self.moves.turn(nth)
        scores = self.products.scores(self._wide("k_smem", slot)) * self.inputs.scales[self.head]
        if form.soft_cap:
            scores = _tanh(scores) * self.inputs.scales[2 * form.num_kv_heads]
        if masked:
            scores = jnp.where(self._seen(start, scores.shape), scores, MASKED)
        most = jnp.maximum(top, scores.max(axis=1))
        fade = jnp.exp2(top - most)
        # A row that has seen no token yet has weights of 1 here, which fade to nothing with the first that it sees.
        weights = jnp.exp2(scores - across(most, scores))
        mass = mass * fade + weights.sum(axis=1)
        acc = acc * across(fade, acc)
        operand = self.products.operand(weights)
        self.moves.wait_for_values(slot)
        owned = functools.partial(self._owned, start) if masked else None
        return Sums(self.products.added(acc, operand, self._wide("v_smem", slot), owned), most, mass)

    def _owned(self, start: Any, shape: tuple[int, ...], layout: Any) -> Array:
        """Which values any query may see."""
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + start
        return (token >= self.span.oldest) & (token < self.span.limit)

    def _wide(self, name: str, slot: Any) -> Any:
        """A chunk's keys or values in the dtype of the products."""
        narrow = self.smem[name].at[slot]
        if "wide_smem" not in self.smem:
            return narrow
        widened(narrow, self.smem["wide_smem"], self.form.chip)
        return self.smem["wide_smem"]

    def _seen(self, start: Any, shape: tuple[int, ...]) -> Array:
        """Which token each row sees."""
        form, inputs, span = self.form, self.inputs, self.span
        token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.layouts.out) + start
        last = span.end - 1
        if form.rows.height > 1:
            place = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.layouts.out)
            last = span.end - span.count + lax.div(place, jnp.int32(form.rows.group))
        seen = token <= last
        if inputs.window_1 is not None:
            seen &= token > last - inputs.window_1[0]
        if inputs.tree_XP is not None:
            own = token - span.start
            bits = plgpu.load(inputs.tree_XP.at[self.item], layout=self.layouts.row, optimized=False)
            bits = lax.broadcast_in_dim(bits, shape, [0])
            seen = jnp.where(own < 0, seen, (lax.shift_right_logical(bits, jnp.clip(own, 0, 31)) & 1) > 0)
        return seen & (token < span.limit)
