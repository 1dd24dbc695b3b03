"""Attention of a ragged batch on a GPU: which items there are, and how the kernel does them.

Rows with few queries are an item each, whose tokens are split over programs where there are few items; longer rows are
cut into items of so many queries as a product has rows. What depends on lengths alone is computed once a step
(`prepare`). New keys and values are in the cache already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import tuning
from pallas_kernels.gpu import chips, fetching, flash, items, mosaic
from pallas_kernels.gpu.chips import INTERPRETED, Gpu
from pallas_kernels.gpu.combine import combine
from pallas_kernels.gpu.form import Form, Inputs
from pallas_kernels.gpu.items import Items, Tokens
from pallas_kernels.gpu.sums import Partials
from pallas_kernels.gpu.tiling import CHUNKS, Rows, Shape, Tiling, fits, rule
from pallas_kernels.options import LOG2E, MOST_QUERIES, Options, Purpose

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")  # of KV
_NO_BLOCK = 2**31 - 1  # of any cache, so that no write of padding finds one
_MOST_SINK = 1e38  # that leaves others no weight, and less than infinity, which less itself is NaN
_TALL = 64  # rows of an item of a longer row
_WIDEST = 192  # of wider heads half as many, whose operands have room in registers; wgmma's need none


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a cache holds; its order is [L, N, 2, K, B, D]."""

    num_blocks: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def faults(self) -> list[str]:
        """Why the kernels cannot serve it on any chip."""
        if self.dtype not in DTYPES:
            return [f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}; try 'bfloat16'"]
        faults = []
        if self.block_size & (self.block_size - 1) or not 8 <= self.block_size <= 256:
            faults.append(f"block_size={self.block_size} must be a power of two from 8 to 256; try 16 or 64")
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            faults.append(f"head_dim={self.head_dim} must be a multiple of 16 up to 256; try backend='xla'")
        return faults

    def uncopied(self, chip: Gpu) -> list[str]:
        """Why a chip cannot copy its blocks."""
        if self._copied(chip):
            return []
        sizes = [self.block_size, *(size for size in (8, 16, 32, 64) if size != self.block_size)]
        choices = [
            dataclasses.replace(self, dtype=dtype, block_size=n) for dtype in (self.dtype, "bfloat16") for n in sizes
        ]
        served = next(choice for choice in choices if choice._copied(chip))
        changed = {name: getattr(served, name) for name in ("block_size", "dtype")}
        way_out = " and ".join(f"{name}={x!r}" for name, x in changed.items() if x != getattr(self, name))
        return [
            f"block_size={self.block_size} of {self.dtype} heads of {self.head_dim} cannot be shared out to the copies "
            f"of {chip.name}, which has no tensor memory accelerator; try {way_out}"
        ]

    def _copied(self, chip: Gpu) -> bool:
        at_once = min(self.block_size, *CHUNKS)
        return chip.has_tma or fetching.swizzle(at_once, self.head_dim, self.dtype, tma=False) is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """A step's work, the same in all layers.

    Attributes:
      memory, purpose: Which cache and which batches it is for; static.
      served_T, large_T: Which tokens are of a row that takes part, and of one that has more than few queries.
      block_T, offset_T: Where each token's KV belongs; of those that are of no such row, no block.
      few, many: Items of rows with few queries, and of the others; None if the batch has no such rows.
    """

    memory: Memory = dataclasses.field(metadata={"static": True})
    purpose: Purpose = dataclasses.field(metadata={"static": True})
    served_T: Bool[Array, " T"]
    large_T: Bool[Array, " T"]
    block_T: Int32[Array, " T"]
    offset_T: Int32[Array, " T"]
    few: Items
    many: Items | None


class Plan(NamedTuple):
    """How batches of certain shapes are done; all static.

    Attributes:
      memory: What the cache holds.
      purpose: Of batches.
      few, many: The rows of each kind of item.
      few_tiling, many_tiling: How each is cut.
      chip: What is compiled for.
      interpret: None, or how to run without one.
    """

    memory: Memory
    purpose: Purpose
    few: Rows
    many: Rows
    few_tiling: Tiling
    many_tiling: Tiling
    chip: Gpu
    interpret: Any


def plan(memory: Memory, purpose: Purpose, *, interpret: Any = None, chip: Gpu | None = None) -> Plan:
    """Chooses how to cut the work.

    Args:
      memory: Of the KV.
      purpose: Of batches.
      interpret: `plgpu.InterpretGPUParams` for a machine that has no GPU.
      chip: None asks JAX.

    Raises:
      ValueError: the chip is none that the kernels know, cannot copy such blocks, or has no room for so many heads.
    """
    chip = chip or (INTERPRETED if interpret else chips.current())
    if faults := memory.uncopied(chip):
        raise ValueError("; ".join(faults))
    few, many = shapes(chip, memory, purpose)
    if not (fits(chip, few) and fits(chip, many)):
        raise ValueError(
            f"{few.rows.group} query heads of {memory.head_dim} to a KV head have no room in the "
            f"{chip.smem_of_block >> 10} KiB of shared memory of {chip.name}; try backend='xla'"
        )
    for_few, for_many = (tuning.choose(chip.name, shape.key, rule(chip, shape)) for shape in (few, many))
    return Plan(memory, purpose, few.rows, many.rows, for_few, for_many, chip, interpret)


def shapes(chip: Gpu, memory: Memory, purpose: Purpose) -> tuple[Shape, Shape]:
    """What the tilings depend on of items of few queries, and of those of longer rows."""
    group = purpose.heads // memory.num_kv_heads
    tall = _TALL if memory.head_dim <= _WIDEST or chip.has_wgmma else _TALL // 2
    height = purpose.most if purpose.most <= MOST_QUERIES and purpose.most * group <= tall else 1
    num_few = purpose.tokens if purpose.most == 1 else purpose.rows
    few = _shape(chip, memory, purpose, height, num_few, prefill=False)
    height = max(1, tall // group)
    num_many = items.most_tiles(purpose.rows, purpose.tokens, height=height)
    return few, _shape(chip, memory, purpose, height, num_many, prefill=True)


def _shape(chip: Gpu, memory: Memory, purpose: Purpose, height: int, num_items: int, *, prefill: bool) -> Shape:
    """Of items of some height, whose rows are chosen when they are written if the chip has the room."""
    for every in (False, True):
        shape = Shape(
            Rows(height, purpose.heads // memory.num_kv_heads, memory.head_dim, every),
            num_items,
            memory.num_kv_heads,
            memory.block_size,
            memory.dtype,
            jnp.dtype(memory.dtype).itemsize,
            purpose.columns * memory.block_size,
            prefill,
        )
        if fits(chip, shape):
            break
    return shape


def prepare(
    how: Plan,
    block_tables_RM: Int32[Array, "R M"],
    kv_lens_R: Int32[Array, " R"],
    cu_q_lens_R1: Int32[Array, " R1"],
) -> Work:
    """What the kernels are told of a batch; the same in all layers."""
    q_lens_R, block_size = cu_q_lens_R1[1:] - cu_q_lens_R1[:-1], how.memory.block_size
    # Rows that contradict themselves or their table take no part: a kernel's copies know no bounds.
    sound_R = (kv_lens_R >= q_lens_R) & (kv_lens_R <= block_tables_RM.shape[1] * block_size)
    sound_R &= (q_lens_R > 0) & (q_lens_R <= how.purpose.most)
    small_R = sound_R & (q_lens_R <= how.few.height)
    tokens = Tokens.of(kv_lens_R, cu_q_lens_R1, how.purpose.tokens)
    rows = kv_lens_R, cu_q_lens_R1, tokens
    many = None
    if how.purpose.most == 1:
        few = items.one_a_token(sound_R, tokens)
    else:
        few = items.tiles(small_R, *rows, height=how.few.height, num_items=small_R.shape[0])
    if how.purpose.most > how.few.height:
        height, (num_rows, num_tokens) = how.many.height, (how.purpose.rows, how.purpose.tokens)
        num_items = items.most_tiles(num_rows, num_tokens, height=height)
        many = items.tiles(sound_R & ~small_R, *rows, height=height, num_items=num_items)
    served_T = tokens.real_T & sound_R[tokens.row_T]
    position_T = jnp.where(served_T, tokens.position_T, 0)
    block_T = jnp.where(served_T, block_tables_RM[tokens.row_T, position_T // block_size], _NO_BLOCK)
    large_T = served_T & ~small_R[tokens.row_T]
    return Work(how.memory, how.purpose, served_T, large_T, block_T, position_T % block_size, few, many)


def attend(
    how: Plan,
    work: Work,
    q_THD: Float[Array, "T H D"],
    cache: Any,
    tables_RM: Int32[Array, "R M"],
    layer: Int32[Array, ""],
    options: Options,
) -> Float[Array, "T H D"]:
    """Attends every query of the batch in one layer; tokens that are of no row that takes part give zeros.

    Args:
      how, work: By `plan` and `prepare`.
      q_THD: Queries; products are in the cache's dtype if that has sixteen bits, else in theirs, or bfloat16.
      cache: KV memory of all layers, [L, N, 2, K, B, D].
      tables_RM: Block tables.
      layer: Which layer.
      options: What shapes the scores.
    """
    dtype = cache.dtype if cache.dtype.itemsize == 2 else q_THD.dtype if q_THD.dtype.itemsize == 2 else jnp.bfloat16
    call = functools.partial(_attend, how, q_THD.astype(dtype), cache, tables_RM, layer)
    out_THD = call("paged_decode", how.few, how.few_tiling, work.few, options)
    if how.purpose.most == 1:  # an item is a token, and one that is not served has zeros
        return out_THD.astype(q_THD.dtype)
    if work.many is not None:
        large_T11 = work.large_T[:, None, None]
        out_THD = jnp.where(large_T11, call("paged_prefill", how.many, how.many_tiling, work.many, options), out_THD)
    return jnp.where(work.served_T[:, None, None], out_THD, jnp.zeros_like(out_THD)).astype(q_THD.dtype)


def _attend(
    how: Plan,
    q_THD: Array,
    cache: Any,
    tables_RM: Array,
    layer: Array,
    name: str,
    rows: Rows,
    tiling: Tiling,
    batch: Items,
    options: Options,
) -> Float[Array, "T H D"]:
    """All items of one kind; tokens that have none give others' results."""
    heads, window = how.memory.num_kv_heads, options.sliding_window
    form = Form(
        name,
        rows,
        tiling,
        how.chip,
        heads,
        how.memory.block_size,
        how.memory.num_blocks,
        soft_cap=options.soft_cap is not None,
        tree=options.tree_RQ is not None and how.purpose.most > 1,
    )
    sinks_KP = None
    if options.sinks_H is not None:
        sinks_H = jnp.minimum(options.sinks_H.astype(jnp.float32) * LOG2E, _MOST_SINK)
        sinks_KP = _by_place(sinks_H.reshape(heads, 1, -1), rows)
    tree_XP = None
    if form.tree and options.tree_RQ is not None:
        bits_RQ = options.tree_RQ.reshape(-1, how.purpose.most)
        bits_XQ = bits_RQ.at[batch.told_5X[0][:, None], batch.nth_XQ].get(mode="fill", fill_value=0)
        tree_XP = _by_place(bits_XQ[..., None], rows)
    inputs = Inputs(
        items.gathered(q_THD, batch, num_kv_heads=heads, places=rows.places),
        cache.reshape(-1, how.memory.block_size, how.memory.head_dim),
        tables_RM,
        batch.told_5X,
        layer[None],
        _scales(options, heads),
        None if window is None else jnp.asarray(window, jnp.int32)[None],
        sinks_KP,
        tree_XP,
    )
    with mosaic.described(how.chip.kind) if how.interpret else contextlib.nullcontext():
        found = flash.attend(form, inputs, interpret=how.interpret)
        if isinstance(found, Partials):
            found = combine(form, inputs, found, interpret=how.interpret)
    return items.by_token(found, batch, num_heads=q_THD.shape[1])


def _scales(options: Options, heads: int) -> Float32[Array, " F"]:
    """What scores and results of each head are multiplied by, and the soft cap, in one array."""
    one_K = jnp.ones(heads, jnp.float32)
    sm_scale = jnp.asarray(options.sm_scale, jnp.float32)
    cap = jnp.float32(1) if options.soft_cap is None else jnp.asarray(options.soft_cap, jnp.float32)
    score = sm_scale * LOG2E if options.soft_cap is None else sm_scale / cap * 2 * LOG2E
    k_K, v_K = (one_K if s is None else s.astype(jnp.float32) for s in (options.k_scale, options.v_scale))
    return jnp.concatenate([k_K * score, v_K, cap[None] * LOG2E])


def _by_place(x_AQG: Array, rows: Rows) -> Array:
    """What each head, or each query, has for every row of the products: [A, P]."""
    whole = jnp.broadcast_to(x_AQG, (x_AQG.shape[0], rows.height, rows.group)).reshape(x_AQG.shape[0], -1)
    return jnp.pad(whole, ((0, 0), (0, rows.places - whole.shape[1])))


def interpreter() -> Any:
    """GPU interpret mode, as `backend="gpu_interpret"` has it: memory that nobody has written is NaN."""
    return mosaic.plgpu.InterpretGPUParams()
