"""The ``tpu`` backend: `pallas_kernels.tpu` for a batch as `paged_attention` has it.

It knows which caches the kernels serve, and keeps apart what is computed once a step. ``tpu_interpret`` is the same in
JAX's TPU interpreter, on any machine, for tests.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jpaged import trees
from jpaged.cache import KVCache, KVLayout
from jpaged.quantisation import Quantisation, stored
from jpaged.xla_attention import Batch, Masking
from pallas_kernels.options import Options, Purpose
from pallas_kernels.tpu import attention as kernels
from pallas_kernels.tpu import chips

Work = kernels.Work


def lacks_here() -> str | None:
    """What is wanting to run the kernels on the chip that is compiled for; None if nothing."""
    try:
        chips.current()
    except ValueError as error:
        return str(error)
    return None


def faults(layout: KVLayout) -> list[str]:
    """Why the kernels cannot serve a cache."""
    return memory(layout).faults()


def faults_here(layout: KVLayout) -> list[str]:
    """And why the chip that is compiled for cannot."""
    return memory(layout).faults() or memory(layout).too_large(chips.current())


def memory(layout: KVLayout) -> kernels.Memory:
    """What a block of the cache holds."""
    return kernels.Memory(layout.num_kv_heads, layout.head_dim, layout.block_size, layout.dtype)


def plan(layout: KVLayout, purpose: Purpose, *, interpret: bool) -> kernels.Plan:
    """How batches of such shapes are done."""
    return kernels.plan(memory(layout), purpose, interpret=chips.interpreter() if interpret else False)


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
    kv_TF = None
    if k_TKD is not None and v_TKD is not None:
        kv_TF = _flat(*stored(k_TKD, v_TKD, cache.layout.dtype, quantisation), cache.layout)
    scales = (None, None) if quantisation is None else quantisation.each(cache.layout.num_kv_heads)
    options = Options(
        sm_scale=masking.sm_scale,
        sliding_window=masking.sliding_window,
        soft_cap=masking.soft_cap,
        sinks_H=masking.sinks_H,
        k_scale=scales[0],
        v_scale=scales[1],
        tree_RQ=None if tree_mask_TQ is None else trees.bits(tree_mask_TQ, batch.cu_q_lens_R1, how.few),
    )
    out_THD, data = kernels.attend(how, work, q_THD, kv_TF, cache.data, layer, options)
    out_THD = jnp.where(work.served_T[:, None, None], out_THD, jnp.zeros_like(out_THD))
    return out_THD.astype(q_THD.dtype), cache.replace(data=data)


def _flat(k_TKD: Array, v_TKD: Array, layout: KVLayout) -> Shaped[Array, "T F"]:
    """Keys of all heads before values, as wide as a block's words."""
    kv = jnp.concatenate([k_TKD.reshape(k_TKD.shape[0], -1), v_TKD.reshape(v_TKD.shape[0], -1)], axis=1)
    padding = kernels.words.width(layout.num_kv_heads, layout.head_dim) - kv.shape[1]
    return jnp.pad(kv, ((0, 0), (0, padding)))
