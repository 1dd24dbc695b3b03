"""The ``gpu`` backend: `pallas_kernels.gpu` for a batch as `paged_attention` has it.

It knows which caches the kernels serve, and writes new keys and values before the kernels read. ``gpu_interpret`` is
the same in JAX's GPU interpreter, on any machine, for tests.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int32

from jpaged import cache as kv
from jpaged import trees
from jpaged.cache import KVCache, KVLayout
from jpaged.quantisation import Quantisation, stored
from jpaged.xla_attention import Batch, Masking
from pallas_kernels.gpu import attention as kernels
from pallas_kernels.gpu import chips, mosaic
from pallas_kernels.options import Options, Purpose

Work = kernels.Work


def lacks() -> str | None:
    """What is wanting to run or interpret the kernels with this JAX, and the way out; None if nothing."""
    return mosaic.lacks()


def lacks_here() -> str | None:
    """What is wanting to run the kernels on the chip that is compiled for; None if nothing."""
    try:
        chips.current()
    except ValueError as error:
        return str(error)
    return lacks()


def faults(layout: KVLayout) -> list[str]:
    """Why the kernels cannot serve a cache."""
    return memory(layout).faults()


def faults_here(layout: KVLayout) -> list[str]:
    """And why the chip that is compiled for cannot."""
    return memory(layout).faults() or memory(layout).uncopied(chips.current())


def memory(layout: KVLayout) -> kernels.Memory:
    """What the cache holds."""
    return kernels.Memory(layout.num_blocks, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.dtype)


def plan(layout: KVLayout, purpose: Purpose, *, interpret: bool) -> kernels.Plan:
    """How batches of such shapes are done."""
    return kernels.plan(memory(layout), purpose, interpret=kernels.interpreter() if interpret else None)


def prepare(how: kernels.Plan, batch: Batch) -> kernels.Work:
    """What is the same in all layers of a step."""
    return kernels.prepare(how, batch.block_tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1)


def attend(
    how: kernels.Plan,
    work: kernels.Work,
    q_THD: Float[Array, "T H D"],
    k_TKD: Float[Array, "T K D"] | None,
    v_TKD: Float[Array, "T K D"] | None,
    cache: KVCache,
    layer: Int32[Array, ""],
    batch: Batch,
    masking: Masking,
    quantisation: Quantisation | None,
    tree_mask_TQ: Bool[Array, "T Q"] | None,
) -> tuple[Float[Array, "T H D"], KVCache]:
    """Writes the batch's KV and attends; padding queries give zeros."""
    if k_TKD is not None and v_TKD is not None:
        k_TKD, v_TKD = stored(k_TKD, v_TKD, cache.layout.dtype, quantisation)
        cache = kv.write(cache, layer, k_TKD, v_TKD, work.block_T, work.offset_T)
    scales = (None, None) if quantisation is None else quantisation.each(cache.layout.num_kv_heads)
    options = Options(
        sm_scale=masking.sm_scale,
        sliding_window=masking.sliding_window,
        soft_cap=masking.soft_cap,
        sinks_H=masking.sinks_H,
        k_scale=scales[0],
        v_scale=scales[1],
        tree_RQ=None if tree_mask_TQ is None else trees.bits(tree_mask_TQ, batch.cu_q_lens_R1, how.purpose.most),
    )
    return kernels.attend(how, work, q_THD, cache.data, batch.block_tables_RM, layer, options), cache
