"""Masks of speculative tokens, as kernels take them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def bits(tree_mask_TQ: Bool[Array, "T Q"], cu_q_lens_R1: Int32[Array, " R1"], most: int) -> Int32[Array, " RQ"]:
    """The mask of each row's queries as bits, rows of ``most`` queries one after another; each query sees itself."""
    shift_Q = jnp.arange(tree_mask_TQ.shape[1], dtype=jnp.int32)
    bits_T = jnp.sum(tree_mask_TQ.astype(jnp.int32) << shift_Q[None, :], axis=1, dtype=jnp.int32)
    token_RQ = cu_q_lens_R1[:-1, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
    own_1Q = 1 << jnp.arange(most, dtype=jnp.int32)[None, :]
    return (bits_T.at[token_RQ].get(mode="fill", fill_value=0) | own_1Q).reshape(-1)
