"""Eight-bit keys and values in shared memory, made sixteen bits there for the products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import fetching
from pallas_kernels.gpu.chips import Gpu
from pallas_kernels.gpu.mosaic import plgpu

_AT_ONCE = 32  # rows in registers: every chunk has as many, or a multiple
_FLOAT_OF_2_23 = 0x4B000000  # whose last 23 bits are whole numbers


def widened(narrow: Any, wide: Any, chip: Gpu) -> None:
    """Copies from one array of shared memory to another of the same shape, whose numbers are larger."""
    rows, columns = wide.shape
    # The larger numbers', of which a thread may store 16 bytes at once.
    its_bytes = fetching.swizzle(rows, columns, wide.dtype, tma=True)
    layout = plgpu.Layout.SMEM_GMEM_COPY((_AT_ONCE, columns), wide.dtype, its_bytes)
    for first in range(0, rows, _AT_ONCE):
        these = pl.ds(first, _AT_ONCE)
        x = plgpu.load(narrow.at[these], layout=layout, optimized=False)
        plgpu.store(wide.at[these], converted(x, wide.dtype, chip), optimized=False)


def converted(x: Any, dtype: Any, chip: Gpu) -> Any:
    """Eight-bit numbers as larger ones, by instructions where the chip has them and by shifts where it has not."""
    if x.dtype == jnp.int8:
        if chip.subtracts_bfloat16 and dtype == jnp.bfloat16:
            return x.astype(dtype)
        bits = x.astype(jnp.int32) + (_FLOAT_OF_2_23 + 128)
        return (lax.bitcast_convert_type(bits, jnp.float32) - (2.0**23 + 128)).astype(dtype)
    if chip.converts_float8:
        return x.astype(jnp.float32).astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    if x.dtype == jnp.float8_e5m2:  # the upper half of a float16
        return lax.bitcast_convert_type(bits << 8, jnp.float16).astype(jnp.float32).astype(dtype)
    # e4m3's exponent is 8 less than float16's; its only NaN has all bits set.
    sign, rest = bits & jnp.int16(-0x80), bits & jnp.int16(0x7F)
    value = lax.bitcast_convert_type((sign << 8) | (rest << 7), jnp.float16).astype(jnp.float32) * 256.0
    return jnp.where(rest == 0x7F, jnp.nan, value).astype(dtype)
