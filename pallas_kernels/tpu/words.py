"""KV memory as 32-bit words: how keys and values lie in a block.

A block is [W, F] int32. The lanes F hold all K heads' keys, then all their values, then zeros up to a multiple of 128.
A word holds the same lane of `per_word` consecutive tokens, the first in its low bits. This is how a TPU keeps packed
types in its registers, and a whole number of native tiles of 32 bits: so blocks travel in one contiguous DMA, are read
at full width, and mean the same on every chip, while an array of bfloat16 is tiled differently in HBM and in VMEM on
some.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

LANES = 128
SUBLANES = 8
PIECE = 512  # lanes that a kernel changes at once, for registers to suffice


def per_word(dtype: jnp.dtype | str) -> int:
    """Tokens that share a word."""
    return 4 // np.dtype(dtype).itemsize


def width(num_kv_heads: int, head_dim: int) -> int:
    """Lanes of a token's keys and values: F."""
    return -(-2 * num_kv_heads * head_dim // LANES) * LANES


def to_words(tokens: Shaped[Array, "... B F"]) -> Int32[Array, "... W F"]:
    """Packs consecutive tokens; B must be a multiple of `per_word`."""
    bits = lax.bitcast_convert_type(tokens, jnp.dtype(f"int{8 * tokens.dtype.itemsize}"))
    if bits.dtype == jnp.int32:
        return bits
    *lead, count, lanes = bits.shape
    each = per_word(tokens.dtype)
    grouped = jnp.moveaxis(bits.reshape(*lead, count // each, each, lanes), -2, -1)
    return lax.bitcast_convert_type(grouped, jnp.int32)


def from_words(words: Int32[Array, "... W F"], dtype: jnp.dtype | str) -> Shaped[Array, "... B F"]:
    """The inverse of `to_words`."""
    tokens = lax.bitcast_convert_type(words, jnp.dtype(dtype))
    if per_word(dtype) == 1:
        return tokens
    *lead, count, lanes, each = tokens.shape
    return jnp.moveaxis(tokens, -1, -2).reshape(*lead, count * each, lanes)


def one_a_word(tokens: Shaped[Array, "T F"]) -> Int32[Array, "T 1 F"]:
    """New tokens on their way into a block: a word each, in its low bits, the rest zero. A row of words can be
    addressed alone, which a row of a packed type cannot."""
    bits = lax.bitcast_convert_type(tokens, jnp.dtype(f"uint{8 * tokens.dtype.itemsize}"))
    return lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.int32)[:, None]


def first_tokens(count: Int32[Array, "..."], each: int) -> Int32[Array, "..."]:
    """A mask of a word's first ``count`` tokens: none if that is below 0, all ``each`` if it is more than there are."""
    mask = jnp.where(count >= each, -1, 0)
    for few in range(1, each):
        mask = jnp.where(count == few, (1 << (32 // each * few)) - 1, mask)
    return mask
