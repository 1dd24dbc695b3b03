"""Eight-bit numbers as bfloat16, by integer arithmetic: for chips whose compiler has no conversion, or a slow one.

Four tokens share a word, and two a word of bfloat16. So a word becomes two, and the products meet the tokens in another
order (`places`), which is the same for keys and values, and so matters to the mask alone.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels.tpu.words import LANES

# Bits of the exponent; where float32 has its own: a mask of magnitudes, and the least that is no number; what float32
# adds to an exponent beyond.
_MINIFLOATS = {
    "float8_e4m3fn": (4, 0x07F00000, 0x07F00000, 127 - 7),
    "float8_e5m2": (5, 0x0FE00000, 0x0F800000, 127 - 15),
}


def to_bfloat16(words_WX: Int32[Array, "W X"], dtype: str) -> BFloat16[Array, "C X"]:
    """The four tokens of each word: first those in the low halves of all words, then those in the high halves.

    Infinities, which no cache of ours holds, become NaN.
    """
    halves = []
    for n in (0, 2):
        low, high = (lax.bitcast_convert_type(_float32(words_WX, n + k, dtype), jnp.int32) for k in range(2))
        halves.append(lax.shift_right_logical(low, 16) | (high & -65536))
    return pltpu.bitcast(jnp.concatenate(halves, axis=0), jnp.bfloat16)


def places(lane: Int32[Array, "..."], chunk: int) -> tuple[Array, list[int]]:
    """The tokens in the columns of a chunk's products, 128 at a time: in each lane, and what to add in each piece."""
    half = chunk // 2
    span = min(half, LANES)  # the shortest chunk has both halves in one piece
    place = ((lane & (span - 1) & -2) << 1) + (lane & 1) + ((lane >= span).astype(jnp.int32) << 1)
    return place, [start % half * 2 + start // half * 2 for start in range(0, chunk, LANES)]


def _float32(words: Array, n: int, dtype: str) -> Array:
    """Number n of each word."""
    top = words << (24 - 8 * n)
    if dtype == "int8":
        return (top >> 24).astype(jnp.float32)
    exponent, mask, infinite, bias = _MINIFLOATS[dtype]
    magnitude = (top >> (8 - exponent)) & mask
    value, least = lax.bitcast_convert_type(magnitude + (bias << 23), jnp.float32), 2.0 ** (bias - 126)
    # Below the least normal number there is no hidden one: from 2^(b-127)·(1 + m) to 2^(b-126)·m.
    value += jnp.minimum(value - least, 0.0)
    value = jnp.where(magnitude >= infinite, jnp.nan, value)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.int32) | (top & -(1 << 31)), jnp.float32)
