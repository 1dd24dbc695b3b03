"""The two products of a chunk: scores, of queries and keys, and the sum of values by weight.

By ``mma.sync`` each warp multiplies what it has in registers: weights go through shared memory, because the columns of
the first product are spread over warps otherwise than the second wants them. By ``wgmma``, which only Hopper has, the
four warps of a program multiply together what lies in shared memory: it is read once for 64 rows instead of once for
16, and weights stay in registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32

from pallas_kernels.gpu import fetching
from pallas_kernels.gpu.mosaic import plgpu
from pallas_kernels.gpu.sums import Layouts

Owned = Callable[[tuple[int, ...], Any], Bool[Array, "C D"]]  # which of a chunk's values are the row's, in a layout


@dataclasses.dataclass(frozen=True)
class ByWarp:
    """By mma.sync.

    Attributes:
      smem: Shared memory, with what `room` names.
      layouts: Of registers.
      mma: `plgpu.mma`, or what stands for it in the interpreter, which has none.
    """

    smem: dict[str, Any]
    layouts: Layouts
    mma: Any

    @staticmethod
    def room(places: int, chunk: int, dtype: Any) -> dict[str, Any]:
        """Shared memory that it needs for itself."""
        tiles = fetching.transforms(places, chunk, dtype, tma=True)
        return {"p_smem": plgpu.SMEM((places, chunk), dtype, transforms=tiles)}

    def scores(self, keys: Any) -> Float32[Array, "P C"]:
        """Of the queries and a chunk's keys, [C, D] in shared memory."""
        q = plgpu.load(self.smem["q_smem"], layout=self.layouts.left, optimized=False)
        k = plgpu.load(keys.transpose((1, 0)), layout=self.layouts.right, optimized=False)
        none = plgpu.layout_cast(jnp.zeros((q.shape[0], k.shape[1]), jnp.float32), self.layouts.out)
        return self.mma(none, q, k)

    def operand(self, weights: Float32[Array, "P C"]) -> Float[Array, "P C"]:
        """Weights as `added` takes them."""
        self.smem["p_smem"][...] = weights.astype(self.smem["p_smem"].dtype)
        return plgpu.load(self.smem["p_smem"], layout=self.layouts.left, optimized=False)

    def added(self, acc: Array, weights: Array, values: Any, owned: Owned | None) -> Float32[Array, "P D"]:
        """Plus a chunk's values, [C, D] in shared memory, by weight; those that are not owned count as zeros."""
        v = plgpu.load(values, layout=self.layouts.right, optimized=False)
        if owned:
            v = jnp.where(owned(v.shape, self.layouts.right), v, jnp.zeros_like(v))
        return self.mma(acc, weights, v)


@dataclasses.dataclass(frozen=True)
class ByWarpgroup:
    """By wgmma.

    Attributes:
      smem: Shared memory.
      interpreted: Whether something must stand for products whose left operand is in registers.
      converted: Whether keys and values were put into shared memory by the program, not by a copy.
    """

    smem: dict[str, Any]
    interpreted: bool
    converted: bool

    @staticmethod
    def room(places: int, chunk: int, dtype: Any) -> dict[str, Any]:
        """None."""
        return {}

    def scores(self, keys: Any) -> Float32[Array, "P C"]:
        if self.converted:
            plgpu.commit_smem()

        def product(acc: Any) -> Array:
            plgpu.wgmma(acc, self.smem["q_smem"], keys.transpose((1, 0)))
            return acc[...]

        shape = (self.smem["q_smem"].shape[0], keys.shape[0])
        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))

    def operand(self, weights: Float32[Array, "P C"]) -> Float[Array, "P C"]:
        return weights.astype(self.smem["q_smem"].dtype)

    def added(self, acc: Array, weights: Array, values: Any, owned: Owned | None) -> Float32[Array, "P D"]:
        if owned:
            rows, width = values.shape
            columns = (fetching.swizzle(rows, width, values.dtype, tma=True) or 0) // values.dtype.itemsize
            for first in range(0, width, columns):  # few at once: sums leave little room in registers
                these = values.at[:, pl.ds(first, columns)]
                v = plgpu.load(these, layout=plgpu.Layout.WGMMA, optimized=False)
                these[...] = jnp.where(owned(v.shape, plgpu.Layout.WGMMA), v, jnp.zeros_like(v))
        if owned or self.converted:
            plgpu.commit_smem()  # or the product could overtake what has been written
        if self.interpreted:
            return acc + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

        def product(acc: Any) -> None:
            plgpu.wgmma(acc, weights, values)

        return pl.run_state(product)(plgpu.ACC.init(acc))
