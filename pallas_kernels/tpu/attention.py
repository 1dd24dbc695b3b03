"""Attention of a ragged batch on a TPU: which kernels run, and what XLA prepares for them.

Rows with few queries go to `decode`, which writes their KV on the way; the others' KV is written by `write`, and then
they go to `prefill` in tiles. What depends on lengths and tables alone is computed once a step (`prepare`), the rest in
each layer: the queries' spread over their heads' lanes where a head is not a whole number of registers, and the new
KV's words.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas_kernels.options import LOG2E, MOST_QUERIES, Options, Purpose
from pallas_kernels.tpu import rows, rule, words, write
from pallas_kernels.tpu.chips import INTERPRETED, Chip, current
from pallas_kernels.tpu.decode import Decode
from pallas_kernels.tpu.heads import HeadGroups
from pallas_kernels.tpu.prefill import Prefill
from pallas_kernels.tpu.rows import Rows
from pallas_kernels.tpu.stream import Inputs, stream
from pallas_kernels.tpu.tiling import Tiling
from pallas_kernels.tpu.words import LANES

DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")  # of KV
TILE_ROWS = 512  # of queries, one for each query head of a group: a prefill's tile


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a block holds: tokens of K heads of D lanes, keys and values, of a dtype; see `words`."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def width(self) -> int:
        return words.width(self.num_kv_heads, self.head_dim)

    def faults(self) -> list[str]:
        """Why the kernels cannot serve it."""
        if self.dtype not in DTYPES:
            return [f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}; try 'bfloat16'"]
        faults, least = [], max(8, 4 * words.per_word(self.dtype))
        if self.block_size & (self.block_size - 1) or not least <= self.block_size <= 256:
            faults.append(f"block_size={self.block_size} must be a power of two from {least} to 256; try 16 or 64")
        return faults

    def too_large(self, chip: Chip) -> list[str]:
        """Why a chip's VMEM does not hold what the kernels want of it: two blocks, and as much for all the rest."""
        parts = 4 if chip.converts or words.per_word(self.dtype) < 4 else 6  # unpacking bytes by shifts spills much
        size = self.block_size * self.width * 4 // words.per_word(self.dtype)
        if size * parts < chip.vmem:
            return []
        fits = 1 << ((chip.vmem - 1) * self.block_size // (parts * size)).bit_length() - 1
        return [
            f"block_size={self.block_size} makes blocks of {size / 2**20:g} MiB, and {parts} of them must be less than "
            f"the {chip.vmem >> 20} MiB of VMEM of a {chip.name}; try block_size={fits}"
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """A step's work, the same in all layers.

    Attributes:
      memory, purpose: Which cache and which batches it is for; static.
      tables: Block tables, flat.
      served_T: Which tokens are of a row that takes part.
      decode: Rows with few queries; their queries are the batch's own, or, of a mixed batch, those of `Mixed.token_R`.
      mixed: None for a batch that has none but few queries a row.
    """

    memory: Memory = dataclasses.field(metadata={"static": True})
    purpose: Purpose = dataclasses.field(metadata={"static": True})
    tables: Int32[Array, " RM"]
    served_T: Bool[Array, " T"]
    decode: Rows
    mixed: Mixed | None


class Mixed(NamedTuple):
    """What a batch with longer rows has besides.

    Attributes:
      prefill: Tiles of rows with many queries.
      units: The blocks that their KV goes to.
      large_T: Which tokens are theirs.
      token_R: Of a row with one query, that query; of others T.
    """

    prefill: Rows
    units: write.Units
    large_T: Bool[Array, " T"]
    token_R: Int32[Array, " R"]


class Plan(NamedTuple):
    """How a batch of certain shapes is done; all static.

    Attributes:
      memory: What the cache holds.
      purpose: Of batches.
      few: The most queries of a row that decode does.
      decode_heads, decode_tiling, prefill_heads, prefill_tiling: Of each kernel.
      height: Query tokens of a prefill's tile.
      columns: Of a table, padded to whole chunks.
      chip: What is compiled for.
      interpret: False, or how to run without one.
    """

    memory: Memory
    purpose: Purpose
    few: int
    decode_heads: HeadGroups
    decode_tiling: Tiling
    prefill_heads: HeadGroups
    prefill_tiling: Tiling
    height: int
    columns: int
    chip: Chip
    interpret: Any


def plan(memory: Memory, purpose: Purpose, *, interpret: Any = False, chip: Chip | None = None) -> Plan:
    """Chooses kernels and their tilings.

    Args:
      memory: Of the KV.
      purpose: Of batches.
      interpret: `pltpu.InterpretParams` for a machine that is no TPU.
      chip: None asks JAX.

    Raises:
      ValueError: the chip is none that the kernels know, or its VMEM is too small for such blocks.
    """
    chip = chip or (INTERPRETED if interpret else current())
    if faults := memory.too_large(chip):
        raise ValueError("; ".join(faults))
    num_heads, columns, most = purpose.heads, purpose.columns, purpose.most
    group = num_heads // memory.num_kv_heads
    few = most if most <= MOST_QUERIES else 1
    decode_heads = HeadGroups(memory.num_kv_heads, group, memory.head_dim, chip.depth)
    prefill_heads = HeadGroups(memory.num_kv_heads, group, memory.head_dim, full=False)
    decode_tiling = rule.choose(chip, shape(memory, chip, num_heads, columns, few))
    prefill_tiling = rule.choose(chip, shape(memory, chip, num_heads, columns, MOST_QUERIES + 1))
    longest = max(decode_tiling.chunk, prefill_tiling.chunk if most > few else 0) // memory.block_size
    padded = -(-columns // longest) * longest
    height = _tile_height(chip, prefill_heads, prefill_tiling, memory)
    return Plan(
        memory,
        purpose,
        few,
        decode_heads,
        decode_tiling,
        prefill_heads,
        prefill_tiling,
        height,
        padded,
        chip,
        interpret,
    )


def _tile_height(chip: Chip, heads: HeadGroups, tiling: Tiling, memory: Memory) -> int:
    """Query tokens of a prefill's tile: enough for the matrix unit, unless VMEM has no room for them."""
    kv_bytes = tiling.buffers * tiling.chunk * memory.width * 4 // words.per_word(memory.dtype)
    size = 4 if memory.dtype == "float32" else 2
    row = (tiling.buffers + 1) * heads.q_lanes * size + 2 * heads.out_lanes * size  # queries, and results on their way
    row += (2 * LANES + heads.out_lanes) * 4  # running maximum, sum, and weighted sum
    row += 3 * LANES * 4  # a sink and two scales, if there are any
    scores = 4 * tiling.rows * tiling.chunk * 4  # of two groups, and their weights
    besides = 1 << 20  # masks, and what is spilled
    if words.per_word(memory.dtype) == 4:
        besides += kv_bytes  # unpacked
    room = (tiling.vmem or chip.vmem) - kv_bytes - scores - besides
    height = 1 << max((TILE_ROWS // heads.rows).bit_length() - 1, 3)
    while height > 8 and height * heads.count * heads.rows * row > room:
        height //= 2
    return height


def shape(memory: Memory, chip: Chip, num_heads: int, columns: int, queries: int) -> rule.Shape:
    """What the tiling of a kernel depends on that does rows of ``queries`` queries."""
    group = num_heads // memory.num_kv_heads
    queries = queries if queries <= MOST_QUERIES else 0
    heads = HeadGroups(memory.num_kv_heads, group, memory.head_dim, chip.depth)
    return rule.Shape(
        num_kv_heads=memory.num_kv_heads,
        group=group,
        head_dim=memory.head_dim,
        block_size=memory.block_size,
        dtype=memory.dtype,
        queries=queries,
        context=columns * memory.block_size,
        token_bytes=memory.width * 4 // words.per_word(memory.dtype),
        head_groups=heads.count,
    )


def table_size(rows: int, columns: int) -> int:
    """Entries of a flat table: whole tiles of what is copied at once."""
    return -(-rows * columns // LANES) * LANES


def prepare(
    how: Plan,
    block_tables_RM: Int32[Array, "R M"],
    kv_lens_R: Int32[Array, " R"],
    cu_q_lens_R1: Int32[Array, " R1"],
) -> Work:
    """What the kernels are told of a batch; the same in all layers."""
    num_tokens, most = how.purpose.tokens, how.purpose.most
    q_lens_R = cu_q_lens_R1[1:] - cu_q_lens_R1[:-1]
    # Rows that contradict themselves or their table take no part: a kernel's copies know no bounds.
    sound_R = (kv_lens_R >= q_lens_R) & (kv_lens_R <= block_tables_RM.shape[1] * how.memory.block_size)
    q_lens_R = jnp.where(sound_R, q_lens_R, 0)
    tables = jnp.pad(block_tables_RM, ((0, 0), (0, how.columns - block_tables_RM.shape[1]))).reshape(-1)
    tables = jnp.pad(tables, (0, table_size(block_tables_RM.shape[0], how.columns) - tables.shape[0]))
    small_R, cores = (q_lens_R > 0) & (q_lens_R <= how.few), how.chip.cores
    large_R = (q_lens_R > how.few) & (q_lens_R <= most)
    served_T = _tokens(small_R | large_R, cu_q_lens_R1, num_tokens)
    if most <= how.few:
        return Work(
            how.memory, how.purpose, tables, served_T, rows.choose(small_R, kv_lens_R, cu_q_lens_R1, cores=cores), None
        )
    one_each_R1 = jnp.arange(cu_q_lens_R1.shape[0], dtype=jnp.int32)
    mixed = Mixed(
        rows.tiles(large_R, kv_lens_R, cu_q_lens_R1, height=how.height, num_tokens=num_tokens, cores=cores),
        write.units(
            large_R, block_tables_RM, kv_lens_R, cu_q_lens_R1, block_size=how.memory.block_size, num_tokens=num_tokens
        ),
        _tokens(large_R, cu_q_lens_R1, num_tokens),
        jnp.where(small_R, cu_q_lens_R1[:-1], num_tokens),
    )
    return Work(
        how.memory, how.purpose, tables, served_T, rows.choose(small_R, kv_lens_R, one_each_R1, cores=cores), mixed
    )


def _tokens(wanted_R: Bool[Array, " R"], cu_q_lens_R1: Int32[Array, " R1"], num_tokens: int) -> Bool[Array, " T"]:
    """Which tokens are of wanted rows."""
    marks_T1 = jnp.zeros(num_tokens + 1, jnp.int32)
    marks_T1 = marks_T1.at[cu_q_lens_R1[:-1]].add(wanted_R.astype(jnp.int32), mode="drop")
    marks_T1 = marks_T1.at[cu_q_lens_R1[1:]].add(-wanted_R.astype(jnp.int32), mode="drop")
    return jnp.cumsum(marks_T1[:-1]) > 0


def attend(
    how: Plan,
    work: Work,
    q_THD: Float[Array, "T H D"],
    kv_TF: Shaped[Array, "T F"] | None,
    cache_LNWF: Int32[Array, "L N W F"],
    layer: Int32[Array, ""],
    options: Options,
) -> tuple[Float[Array, "T H D"], Int32[Array, "L N W F"]]:
    """Attends every query of the batch in one layer; tokens that no row owns are left undefined.

    Args:
      how, work: By `plan` and `prepare`.
      q_THD: Queries.
      kv_TF: New keys and values in the memory's dtype, keys of all heads before values; None only reads.
      cache_LNWF: KV memory of all layers.
      layer: Which layer.
      options: What shapes the scores.
    """
    q_THD = q_THD.astype(jnp.float32 if how.memory.dtype == "float32" else jnp.bfloat16)
    call: dict[str, Any] = {
        "dtype": how.memory.dtype,
        "block_size": how.memory.block_size,
        "interpret": how.interpret,
    }
    mixed, q_few, kv_few = work.mixed, q_THD, kv_TF
    if mixed is not None:
        q_few = q_THD.at[mixed.token_R].get(mode="fill", fill_value=0)
        kv_few = None if kv_TF is None else kv_TF.at[mixed.token_R].get(mode="fill", fill_value=0)
    if mixed is not None and kv_TF is not None:  # first, for others may share these blocks
        fresh = write.in_order(kv_TF, how.memory.block_size)
        cache_LNWF = write.write(mixed.units, fresh, cache_LNWF, layer, vmem=how.prefill_tiling.vmem, **call)
    call["converts"] = how.chip.converts  # what writes converts nothing
    new_T1F = None if kv_few is None else words.one_a_word(kv_few)
    inputs = _inputs(how, work, how.decode_heads, how.few, q_few, new_T1F, cache_LNWF, layer, options)
    out, cache_LNWF = stream(
        Decode, work.decode, inputs, heads=how.decode_heads, queries=how.few, tiling=how.decode_tiling, **call
    )
    out_few = how.decode_heads.by_head(out)
    if mixed is None:
        return out_few, cache_LNWF
    inputs = _inputs(how, work, how.prefill_heads, how.height, q_THD, None, cache_LNWF, layer, options)
    out, _ = stream(
        Prefill, mixed.prefill, inputs, heads=how.prefill_heads, queries=how.height, tiling=how.prefill_tiling, **call
    )
    out_THD = jnp.where(mixed.large_T[:, None, None], how.prefill_heads.by_head(out), 0)
    return out_THD.at[mixed.token_R].set(out_few, mode="drop"), cache_LNWF


def _inputs(
    how: Plan,
    work: Work,
    heads: HeadGroups,
    queries: int,
    q_THD: Array,
    new_T1F: Array | None,
    cache_LNWF: Array,
    layer: Array,
    options: Options,
) -> Inputs:
    sm_scale = jnp.asarray(options.sm_scale, jnp.float32)
    cap = None if options.soft_cap is None else jnp.asarray(options.soft_cap, jnp.float32)
    scale = sm_scale * LOG2E if cap is None else sm_scale / cap
    scales = None
    if options.k_scale is not None and options.v_scale is not None:
        each = [jnp.repeat(s.astype(jnp.float32), heads.queries_per_head) for s in (options.k_scale, options.v_scale)]
        scales = jnp.stack([heads.row_values(each[0] * scale, queries), heads.row_values(each[1], queries)])
    sinks = None if options.sinks_H is None else options.sinks_H.astype(jnp.float32) * LOG2E
    return Inputs(
        q_TUVX=heads.by_row(q_THD),
        new_T1F=new_T1F,
        cache_LNWF=cache_LNWF,
        tables=work.tables,
        columns=how.columns,
        layer=jnp.asarray(layer, jnp.int32),
        score_scale=scale,
        sliding_window=None if options.sliding_window is None else jnp.maximum(options.sliding_window, 1),
        soft_cap=None if cap is None else cap * LOG2E,
        sinks_UY=None if sinks is None else heads.row_values(sinks, queries),
        scales_2UY=scales,
        tree_RQ=options.tree_RQ,
    )
