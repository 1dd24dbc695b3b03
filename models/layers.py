"""Layers that decoder families share, as Flax NNX modules. Matrices are [out, in], as checkpoints store them.

A module is split into its structure and its parameters at once; a checkpoint's arrays take the parameters' places.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from models.stacks import multiply


class Norm(nnx.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), in float32."""

    def __init__(self, width: int, epsilon: float, dtype: str):
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.epsilon = epsilon

    def __call__(self, x_TE: Float[Array, "T E"]) -> Float[Array, "T E"]:
        x = x_TE.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return (self.scale[...].astype(jnp.float32)[None, :] * x).astype(x_TE.dtype)


class Linear(nnx.Module):
    """``x @ weight.T + bias``; the weight's last axis is the input, all before it the output."""

    def __init__(self, shape: tuple[int, ...], bias: bool, dtype: str):
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape[:-1], dtype)) if bias else None

    def __call__(self, x_TI: Float[Array, "T I"]) -> Float[Array, "T *out"]:
        out = multiply(x_TI, self.weight.get_value())
        return out if self.bias is None else out + self.bias[...][None]


class Embedding(nnx.Module):
    """Token embedding, and, tied, the output head."""

    def __init__(self, vocab_size: int, width: int, dtype: str):
        self.weight = nnx.Param(jnp.zeros((vocab_size, width), dtype))

    def __call__(self, tokens_T: Int32[Array, " T"]) -> Float[Array, "T E"]:
        return self.weight[...].at[tokens_T].get(mode="clip")

    def attend(self, x_RE: Float[Array, "R E"]) -> Float32[Array, "R V"]:
        return multiply(x_RE, self.weight[...], "float32")


class GatedMLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up in one product (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, width: int, inner: int, bias: bool, dtype: str):
        self.gate_up = Linear((2, inner, width), bias, dtype)
        self.down = Linear((width, inner), bias, dtype)

    def __call__(self, x_TE: Float[Array, "T E"]) -> Float[Array, "T E"]:
        gate_up_T2F = self.gate_up(x_TE)
        return self.down(jax.nn.silu(gate_up_T2F[:, 0]) * gate_up_T2F[:, 1])


def rotations(
    positions_T: Int32[Array, " T"], inverse_frequencies_C: np.ndarray, factor: float
) -> tuple[Float32[Array, "T C"], Float32[Array, "T C"]]:
    """Cosines and sines of each position's angles, times the attention factor; C = D/2 (RoFormer, arXiv 2104.09864)."""
    angles_TC = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies_C)[None, :]
    return jnp.cos(angles_TC) * factor, jnp.sin(angles_TC) * factor


def rotate(
    x_TXD: Float[Array, "T *X D"], cos_TC: Float32[Array, "T C"], sin_TC: Float32[Array, "T C"]
) -> Float[Array, "T *X D"]:
    """Rotates the pairs (i, i + D/2) of each head, in float32."""
    between = tuple(range(1, x_TXD.ndim - 1))
    cos, sin = jnp.expand_dims(cos_TC, between), jnp.expand_dims(sin_TC, between)
    first, second = jnp.split(x_TXD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_TXD.dtype)
