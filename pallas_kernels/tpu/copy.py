"""Copies of whole blocks within KV memory, of all layers at once, in place: what copy-on-write orders.

Every copy is one strided DMA from HBM to HBM; they are all on their way before the first is waited for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32


def copy_blocks(
    cache_LNWF: Int32[Array, "L N W F"],
    src_J: Int32[Array, " J"],
    dst_J: Int32[Array, " J"],
    *,
    interpret: Any = False,
) -> Int32[Array, "L N W F"]:
    """Copies block ``src_J[j]`` to ``dst_J[j]``, unless that is NULL: N or more. No destination may be a source."""
    real_J = dst_J < cache_LNWF.shape[1]
    first_J = jnp.argsort(~real_J, stable=True)
    count = jnp.sum(real_J, dtype=jnp.int32)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(cache_LNWF.shape, cache_LNWF.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True),
        interpret=interpret,
        name="paged_copy",
    )(src_J[first_J], dst_J[first_J], count[None], cache_LNWF)


def _kernel(src: Any, dst: Any, count: Any, _: Any, cache: Any, done: Any) -> None:
    def copy(j: Any) -> Any:
        return pltpu.make_async_copy(cache.at[:, src[j]], cache.at[:, dst[j]], done)

    lax.fori_loop(0, count[0], lambda j, _: copy(j).start(), None)
    lax.fori_loop(0, count[0], lambda j, _: copy(j).wait(), None)
