"""Copies of whole blocks within KV memory, of all layers at once, in place: what copy-on-write orders.

A program copies a block of one layer through its registers, several programs to a core, which hides what each waits.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.gpu.mosaic import plgpu
from pallas_kernels.gpu.tiling import THREADS

_AT_ONCE = 64  # bytes of a thread


def copy_blocks(
    cache: Shaped[Array, "L N ..."],
    src_J: Int32[Array, " J"],
    dst_J: Int32[Array, " J"],
    *,
    interpret: Any = None,
) -> Shaped[Array, "L N ..."]:
    """Copies block ``src_J[j]`` to ``dst_J[j]``, unless that is NULL: N or more. No destination may be a source."""
    num_layers, num_blocks = cache.shape[:2]
    numbers = math.prod(cache.shape[2:])
    at_once = math.gcd(numbers, THREADS * _AT_ONCE // cache.dtype.itemsize)

    def program(src: Any, dst: Any, memory: Any) -> None:
        j, layer = lax.axis_index("copy"), lax.axis_index("layer")

        @pl.when(dst[j] < num_blocks)
        def _real() -> None:
            @pl.loop(0, numbers // at_once)
            def _some(n: Any) -> None:
                these = pl.ds(n * at_once, at_once)
                memory[layer, dst[j], these] = memory[layer, src[j], these]

    memory = jax.new_ref(cache.reshape(num_layers, num_blocks, numbers))
    plgpu.kernel(
        program,
        grid=(src_J.shape[0], num_layers),
        grid_names=("copy", "layer"),
        interpret=interpret,
        kernel_name="paged_copy",
    )(src_J, dst_J, memory)
    return memory[...].reshape(cache.shape)
