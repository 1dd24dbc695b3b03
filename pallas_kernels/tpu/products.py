"""Products of the matrix unit, which multiplies bfloat16 and adds up float32."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def dot(a: Float[Array, "R X"], b: Float[Array, "..."], axis: int, *, part: int) -> Float[Array, "R Y"]:
    """The product of some rows with what the unit holds, summed over ``axis`` of that; in float32.

    Args:
      a: Rows.
      b: What is put into the unit, [C, lanes]. In float32, ``a`` must be so, too.
      axis: 1 for keys, 0 for values.
      part: Rows of a float32 ``b`` that are split at once: as many as the unit has.
    """
    if b.dtype != jnp.float32:
        return _product(a, b, axis)
    # The unit multiplies bfloat16. Three of them make a float32, and of their nine products the six greatest count.
    # What it costs is putting b in; so the parts of a go through together.
    rows, stacked, found = a.shape[0], jnp.concatenate(_thirds(a), axis=0), []
    for start in range(0, b.shape[0], part):  # piece by piece, lest all of b's parts wait in registers
        of_b = _thirds(b[start : start + part])
        of_a = stacked if axis else stacked[:, start : start + part]
        parts = [_product(of_a[: rows * (3 - n)], of_b[n], axis) for n in range(3)]
        small_first = sorted((n + m, n, m) for n in range(3) for m in range(3 - n))[::-1]
        each = [parts[n][m * rows : (m + 1) * rows] for _, n, m in small_first]
        found.append(functools.reduce(operator.add, each))
    return jnp.concatenate(found, axis=1) if axis else functools.reduce(operator.add, found)


def _product(a: Array, b: Array, axis: int) -> Array:
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _thirds(x: Array) -> list[Array]:
    """Three bfloat16 arrays that add up to a float32 one."""
    thirds = []
    for _ in range(3):
        thirds.append(x.astype(jnp.bfloat16))
        x = x - thirds[-1].astype(jnp.float32)
    return thirds
