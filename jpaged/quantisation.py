"""Keys and values of a cache of eight bits: what they are multiplied by, and how new ones are rounded.

It knows numbers, and neither blocks nor kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

INT8_MOST = 127


class Quantisation(NamedTuple):
    """What stored keys and values are multiplied by: a number, or one for each KV head."""

    k_scale: float | Float[Array, "..."]
    v_scale: float | Float[Array, "..."]

    def each(self, num_kv_heads: int) -> tuple[Float32[Array, " K"], Float32[Array, " K"]]:
        """The same, one for each KV head."""
        k, v = (jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (num_kv_heads,)) for scale in self)
        return k, v


def stored(
    k_TKD: Float[Array, "T K D"], v_TKD: Float[Array, "T K D"], dtype: str, quantisation: Quantisation | None
) -> tuple[Shaped[Array, "T K D"], Shaped[Array, "T K D"]]:
    """New keys and values as a cache of that dtype holds them; what is too large for eight bits becomes the largest."""
    scales = (None, None) if quantisation is None else quantisation.each(k_TKD.shape[1])
    k, v = (_stored(tokens, dtype, scale) for tokens, scale in zip((k_TKD, v_TKD), scales, strict=True))
    return k, v


def _stored(tokens_TKD: Array, dtype: str, scale_K: Array | None) -> Array:
    if scale_K is not None:
        tokens_TKD = tokens_TKD.astype(jnp.float32) / scale_K[None, :, None]
    if dtype == "int8":
        tokens_TKD = jnp.clip(jnp.round(tokens_TKD.astype(jnp.float32)), -INT8_MOST, INT8_MOST)
    elif jnp.dtype(dtype).itemsize == 1:  # beyond the largest number there is NaN or infinity, which would stay
        most = float(jnp.finfo(dtype).max)
        tokens_TKD = jnp.clip(tokens_TKD.astype(jnp.float32), -most, most)
    return tokens_TKD.astype(dtype)
