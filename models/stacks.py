"""One layer's weights out of all layers': a slice of a stack, a choice among separate matrices, or weights apart.

A loop over layers that slices stacked matrices copies each one before it is used on CPUs: XLA's products there take no
offset that is known only at run time. So `unstack` makes every layer's matrix an array of its own, and the product
chooses: one branch a layer, with nothing in it but that product. All else in the loop is compiled once, which unrolled
layers would compile once each. On GPUs products take no such offset either, and a choice there would be one launch more
and a wait for the host; so `apart` gives layers that are unrolled, which XLA starts all at once, as one CUDA graph.

It does not know what the matrices are for.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int32


class Matrices(struct.PyTreeNode):
    """A matrix of each layer, [..., I], as arrays of their own."""

    of_layer: tuple[Float[Array, "*out I"], ...]


class Chosen(struct.PyTreeNode):
    """The matrix of layer ``index``, which may be traced: nothing moves before it is multiplied by."""

    of_layer: tuple[Float[Array, "*out I"], ...]
    index: Int32[Array, ""]


def multiply(x_TI: Float[Array, "T I"], weight: Float[Array, "*out I"] | Chosen, out: str | None = None) -> Array:
    """``x @ weight.T``, [T, *out], accumulated in float32; in x's dtype unless ``out`` names another."""
    if isinstance(weight, Chosen):
        # Flat, because XLA's CPU products copy a matrix of more than two axes before they use it.
        branches = [
            lambda x, matrix=matrix: multiply(x, matrix.reshape(-1, matrix.shape[-1]), out)
            for matrix in weight.of_layer
        ]
        y_TO = lax.switch(weight.index, branches, x_TI)
        return y_TO.reshape(x_TI.shape[0], *weight.of_layer[0].shape[:-1])
    # Not flat: the outputs' axes may be sharded, heads say, and a reshape would gather them.
    contracted = ((1,), (weight.ndim - 1,))
    return lax.dot_general(x_TI, weight, (contracted, ((), ())), preferred_element_type=out or x_TI.dtype)


def layer(layers: Any, index: Int32[Array, ""]) -> Any:
    """The weights of one layer: matrices to choose from as `Chosen`, stacks sliced."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Matrices):
            return Chosen(leaf.of_layer, index)
        return lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    return jax.tree.map(one, layers, is_leaf=lambda leaf: isinstance(leaf, Matrices))


def unstack(layers: Any) -> Any:
    """The same weights with `Matrices` in place of stacked matrices. Vectors stay stacked: a slice of one is small.

    The matrices share the memory of the stack.
    """

    def cut(leaf: Array) -> Any:
        if leaf.ndim < 3:
            return leaf
        host = np.asarray(leaf)
        return Matrices(tuple(jax.device_put(matrix, leaf.sharding, may_alias=True) for matrix in host))

    return jax.tree.map(cut, layers)


def apart(layers: Any) -> tuple[Any, ...]:
    """Each layer's weights as a tree of their own, on the device that the stacks are on.

    The stacks are deleted, one after another: a device has no room for both.
    """
    stacks, tree = jax.tree.flatten(layers)

    def cut(stack: Array) -> list[Array]:
        host, device = np.array(stack), stack.sharding
        stack.delete()
        return [jax.device_put(one, device) for one in host]

    return tuple(tree.unflatten(leaves) for leaves in zip(*map(cut, stacks), strict=True))
