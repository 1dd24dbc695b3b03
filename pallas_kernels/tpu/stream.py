"""The call of a streaming kernel: what goes in, where it lies, and what comes out."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.tpu.heads import HeadGroups
from pallas_kernels.tpu.rows import Rows
from pallas_kernels.tpu.tiling import Tiling
from pallas_kernels.tpu.trips import Far, Features, Operands, Scratch, Settings, Trips
from pallas_kernels.tpu.walk import FIELDS, Cut, TableReader, Walk
from pallas_kernels.tpu.words import LANES


class Inputs(NamedTuple):
    """What a kernel reads, besides the rows. Here U counts groups, V a group's rows, X lanes.

    Attributes:
      q_TUVX: Queries by `HeadGroups.by_row`.
      new_T1F: The queries' own KV, a word each; None only reads.
      cache_LNWF: KV memory of all layers, as words.
      tables: Block tables, flat, padded to whole tiles of 128 ids.
      columns: Of a table; a multiple of a chunk's blocks.
      layer: Which layer.
      score_scale: Factor on q·k, in base 2 unless there is a cap.
      sliding_window: Last tokens that a query sees, its own included.
      soft_cap: In base 2.
      sinks_UY: A logit for each of a group's Y rows, those of all its queries, in base 2.
      scales_2UY: Factors on the scores, which hold ``score_scale`` too, and on the outputs, for each row.
      tree_RQ: For each query, flat, which of its row's queries it sees: bit j for query j. None: itself and those
        before.
    """

    q_TUVX: Float[Array, "T U V X"]
    new_T1F: Int32[Array, "T 1 F"] | None
    cache_LNWF: Int32[Array, "L N W F"]
    tables: Int32[Array, " RM"]
    columns: int
    layer: Int32[Array, ""]
    score_scale: Float[Array, ""]
    sliding_window: Int32[Array, ""] | None = None
    soft_cap: Float[Array, ""] | None = None
    sinks_UY: Float[Array, "U Y 128"] | None = None
    scales_2UY: Float[Array, "2 U Y 128"] | None = None
    tree_RQ: Int32[Array, " RQ"] | None = None


def stream(
    kind: type[Trips],
    rows: Rows,
    inputs: Inputs,
    *,
    heads: HeadGroups,
    dtype: str,
    block_size: int,
    queries: int,
    tiling: Tiling,
    converts: bool,
    interpret: Any = False,
) -> tuple[Float[Array, "T U V X"], Int32[Array, "L N W F"]]:
    """Attends the queries of ``rows``, and writes their KV if there is any; other tokens' outputs are left undefined.

    Args:
      kind: What is done with a trip's KV.
      rows: Rows of 1 to ``queries`` queries.
      inputs: See there.
      heads, dtype, block_size: Of the KV memory.
      queries: The most queries of a row; static.
      tiling: See there.
      converts: Of the chip.
      interpret: `pltpu.InterpretParams` runs it anywhere.

    Returns:
      Outputs by row (`HeadGroups.by_head` turns them round) and the memory, which is the argument's own.
    """
    settings = Settings(
        heads,
        dtype,
        Cut(block_size, tiling.chunk, tiling.items, queries),
        tiling,
        Features(
            writes=inputs.new_T1F is not None,
            window=inputs.sliding_window is not None,
            soft_cap=inputs.soft_cap is not None,
            sinks=inputs.sinks_UY is not None,
            scales=inputs.scales_2UY is not None,
            tree=inputs.tree_RQ is not None,
        ),
        converts,
    )
    window = jnp.int32(0) if inputs.sliding_window is None else inputs.sliding_window
    cap = jnp.float32(0) if inputs.soft_cap is None else inputs.soft_cap
    integers = jnp.stack([inputs.layer, window]).astype(jnp.int32)
    floats = jnp.stack([inputs.score_scale, cap]).astype(jnp.float32)
    scalars = [x for x in (rows.table, rows.bounds, integers, floats, inputs.tree_RQ) if x is not None]
    # Left to itself, XLA may put small arrays into VMEM, and then each of their copies becomes a branch.
    far = (lambda x: x) if interpret else (lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM))
    arrays = [(inputs.tables, pl.ANY), (far(inputs.q_TUVX), pl.ANY)]
    arrays += [] if inputs.new_T1F is None else [(far(inputs.new_T1F), pl.ANY)]
    arrays += [(extra, pltpu.VMEM) for extra in (inputs.sinks_UY, inputs.scales_2UY) if extra is not None]
    arrays.append((inputs.cache_LNWF, pl.ANY))
    out_shape: Any = (*inputs.q_TUVX.shape[:3], heads.out_lanes)
    outs: list[Any] = [jax.ShapeDtypeStruct(out_shape, inputs.q_TUVX.dtype)]
    if not interpret:
        outs = [pltpu.HBM(out_shape, inputs.q_TUVX.dtype)]
    if settings.features.writes:
        outs.append(jax.ShapeDtypeStruct(inputs.cache_LNWF.shape, jnp.int32))
    num_rows = rows.table.shape[0] // 4 - 1
    done = pl.pallas_call(
        functools.partial(_kernel, kind, settings, inputs.columns, num_rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(rows.bounds.shape[0] - 1,),
            in_specs=[pl.BlockSpec(memory_space=space) for _, space in arrays],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in outs],
            scratch_shapes=[_scratch(kind, settings, inputs)],
        ),
        out_shape=outs,
        input_output_aliases={len(scalars) + len(arrays) - 1: 1} if settings.features.writes else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=tiling.vmem,
        ),
        interpret=interpret,
        name=f"paged_{kind.__name__.lower()}",
    )(*scalars, *(array for array, _ in arrays))
    return done[0], done[1] if settings.features.writes else inputs.cache_LNWF


def _scratch(kind: type[Trips], settings: Settings, inputs: Inputs) -> Scratch:
    heads, _, cut, tiling, features, _ = settings
    num_words, lanes = inputs.cache_LNWF.shape[2:]
    items, buffers, queries = tiling.items, tiling.buffers, cut.queries
    height, q_dtype = queries * heads.rows, inputs.q_TUVX.dtype
    trips = 1 << (buffers + 2).bit_length()  # the walk is a buffer ahead, and the last two trips are asked for yet
    return Scratch(
        ring=pltpu.SMEM((trips * items * FIELDS,), jnp.int32),
        ids=pltpu.SMEM((2 * items, cut.ids), jnp.int32),
        kv=pltpu.VMEM((buffers * items, cut.blocks, num_words, lanes), jnp.int32),
        q=pltpu.VMEM((buffers * items, queries, heads.count, heads.rows, heads.q_lanes), q_dtype),
        new=pltpu.VMEM((buffers * items, queries, 1, lanes), jnp.int32) if features.writes else None,
        out=pltpu.VMEM((2 * items, queries, heads.count, heads.rows, heads.out_lanes), q_dtype),
        top=pltpu.VMEM((heads.count, height, LANES), jnp.float32),
        total=pltpu.VMEM((heads.count, height, LANES), jnp.float32),
        sum=pltpu.VMEM((heads.count, height, heads.out_lanes), jnp.float32),
        ids_there=pltpu.SemaphoreType.DMA((2, items)),
        kv_there=pltpu.SemaphoreType.DMA((buffers, items)),
        new_there=pltpu.SemaphoreType.DMA((buffers, items)) if features.writes else None,
        kv_gone=pltpu.SemaphoreType.DMA((buffers, items)) if features.writes else None,
        out_gone=pltpu.SemaphoreType.DMA((2, items)),
        own=kind.scratch(settings),
    )


def _kernel(kind: type[Trips], settings: Settings, columns: int, num_rows: int, *refs: Any) -> None:
    features, (*given, scratch) = settings.features, refs
    left = iter(given)
    rows, bounds, integers, floats = (next(left) for _ in range(4))
    tree = next(left) if features.tree else None
    tables, q = next(left), next(left)
    new = next(left) if features.writes else None
    sinks = next(left) if features.sinks else None
    scales = next(left) if features.scales else None
    cache, out = next(left), next(left)
    if features.writes:
        cache = next(left)  # the output is the input's own memory
    walk = Walk(settings.cut, rows, num_rows, scratch.ring, integers[1] if features.window else None)
    reader = TableReader(walk, tables, jnp.int32(columns), scratch.ids, scratch.ids_there)
    far = Far(q, new, out, cache.at[integers[0]])
    trips = kind(settings, walk, reader, far, scratch, Operands(floats, sinks, scales, tree))
    core = pl.program_id(0)
    trips.run(bounds[core], bounds[core + 1])
