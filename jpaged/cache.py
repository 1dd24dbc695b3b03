"""The KV memory of all layers: its layout, and the only code that writes, copies or moves it.

It knows arrays and where tokens go in them; what a TPU's blocks look like is `pallas_kernels.tpu.words`'s to say. It
does not know which sequence a token belongs to, nor when a block is free: block ids and offsets come from `tables`.
NULL ids name no block, and nothing here writes through them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.tpu import copy as copies
from pallas_kernels.tpu import words

CANONICAL = "LNBCKD"  # C is 0 for keys and 1 for values; the order in which blocks leave and enter a cache

WORDS = "LNW"  # the order of the TPU kernels: blocks of 32-bit words, see `pallas_kernels.tpu.words`

Scalar: TypeAlias = int | np.integer | Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The sizes of a KV cache and the physical order of its axes. The one owner of that order.

    Attributes:
      num_layers, num_blocks, block_size, num_kv_heads, head_dim: Sizes.
      dtype: Name of the element type.
      order: A permutation of the letters of ``CANONICAL``, or ``WORDS``. ``"LCKNBD"``, the order of the ``xla``
        backend, puts the tokens of one head of one block side by side, so that a gather of blocks is already batched by
        head.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    order: str = "LCKNBD"

    def __post_init__(self):
        sizes = {k: getattr(self, k) for k in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim")}
        faults = [f"{name}={size} must be at least 1; try 1 or more" for name, size in sizes.items() if size < 1]
        if self.order != WORDS and sorted(self.order) != sorted(CANONICAL):
            faults.append(f"order={self.order!r} must be a permutation of {CANONICAL!r}, or {WORDS!r}; try the default")
        size = jnp.dtype(self.dtype).itemsize
        if self.order == WORDS and (size > 4 or self.block_size * size % 4):
            faults.append(f"dtype={self.dtype!r} and block_size={self.block_size} must make words of 4 bytes; try 16")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.order == WORDS:
            tall = self.block_size // words.per_word(self.dtype)
            return self.num_layers, self.num_blocks, tall, words.width(self.num_kv_heads, self.head_dim)
        size = dict(zip(CANONICAL, self.canonical_shape, strict=True))
        return tuple(size[axis] for axis in self.order)

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        return self.num_layers, self.num_blocks, self.block_size, 2, self.num_kv_heads, self.head_dim

    @property
    def stored_dtype(self) -> str:
        """Name of the physical array's element type."""
        return "int32" if self.order == WORDS else self.dtype

    @property
    def block_axis(self) -> int:
        return self.order.index("N")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers, keys, values and padding."""
        return math.prod(self.shape) // self.num_blocks * jnp.dtype(self.stored_dtype).itemsize

    def index(self, **at: object) -> tuple:
        """An index into the physical array from one entry per named axis; an axis not named is taken whole."""
        return tuple(at.get(axis, slice(None)) for axis in self.order)


class KVCache(struct.PyTreeNode):
    """One array for the keys and values of all layers.

    Attributes:
      data: The array, in the order that ``layout`` says.
      layout: Sizes and order; static.
    """

    data: Array
    layout: KVLayout = struct.field(pytree_node=False)


def create(layout: KVLayout) -> KVCache:
    """Returns a cache of zeros."""
    return KVCache(jnp.zeros(layout.shape, layout.stored_dtype), layout)


def write(
    cache: KVCache,
    layer: Scalar,
    k_TKD: Float[Array, "T K D"],
    v_TKD: Float[Array, "T K D"],
    block_T: Int32[Array, " T"],
    offset_T: Int32[Array, " T"],
) -> KVCache:
    """Stores the key and value of each token at its (block, offset); a token whose block is NULL is dropped.

    No two tokens may name the same place. Not for ``WORDS``, whose kernels write.
    """
    fresh_TCKD = jnp.stack([k_TKD, v_TKD], axis=1).astype(cache.data.dtype)
    at = cache.layout.index(L=layer, N=block_T, B=offset_T)
    # Indexed axes that stand apart come first in the result, so what is left is [T, C, K, D] in the order's own order.
    rest = [axis for axis in cache.layout.order if axis in "CKD"]
    fresh = fresh_TCKD.transpose(0, *(1 + "CKD".index(axis) for axis in rest))
    return cache.replace(data=cache.data.at[at].set(fresh, mode="drop", unique_indices=True))


def copy_blocks(cache: KVCache, src_J: Int32[Array, " J"], dst_J: Int32[Array, " J"]) -> KVCache:
    """Copies whole blocks within the cache, in all layers; rows whose destination is NULL do nothing.

    The trip count is the number of real copies, so a step without any pays nothing, and each copy is in place.
    """
    if cache.layout.order == WORDS:
        data = lax.platform_dependent(
            cache.data, src_J, dst_J, tpu=copies.copy_blocks, default=functools.partial(_copy_blocks, cache.layout)
        )
    else:
        data = _copy_blocks(cache.layout, cache.data, src_J, dst_J)
    return cache.replace(data=data)


def _copy_blocks(layout: KVLayout, data: Array, src_J: Array, dst_J: Array) -> Array:
    axis, null = layout.block_axis, layout.num_blocks
    real_J = dst_J < null
    first_J = jnp.argsort(~real_J, stable=True)

    def one(i: Array, data: Array) -> Array:
        block = lax.dynamic_slice_in_dim(data, src_J[first_J[i]], 1, axis)
        return lax.dynamic_update_slice_in_dim(data, block, dst_J[first_J[i]], axis)

    return lax.fori_loop(0, jnp.sum(real_J, dtype=jnp.int32), one, data)


def read_blocks(cache: KVCache, ids_J: Int32[Array, " J"]) -> Array:
    """Blocks as they leave a cache: [J, L, B, C, K, D], canonical but for the block, which is first; NULL reads 0."""
    axis = cache.layout.block_axis
    taken = jnp.take(cache.data, ids_J, axis=axis, mode="fill", fill_value=0)
    return jnp.moveaxis(unpack(cache.layout, taken), CANONICAL.index("N"), 0)


def write_blocks(cache: KVCache, ids_J: Int32[Array, " J"], blocks_JLBCKD: Array) -> KVCache:
    """Puts blocks back that `read_blocks` has read, in other places; NULL drops them. No id may occur twice."""
    layout, at = cache.layout, cache.layout.block_axis
    fresh = pack(layout, jnp.moveaxis(blocks_JLBCKD, 0, CANONICAL.index("N")))
    index = (slice(None),) * at + (ids_J,)
    return cache.replace(data=cache.data.at[index].set(fresh, mode="drop", unique_indices=True))


def pack(layout: KVLayout, blocks_LNBCKD: Array) -> Array:
    """Turns blocks in canonical order into the layout's order; any number of them."""
    if layout.order != WORDS:
        return blocks_LNBCKD.transpose([CANONICAL.index(axis) for axis in layout.order])
    flat_LNBF = blocks_LNBCKD.reshape(*blocks_LNBCKD.shape[:3], -1)
    padding = words.width(layout.num_kv_heads, layout.head_dim) - flat_LNBF.shape[-1]
    return words.to_words(jnp.pad(flat_LNBF, ((0, 0), (0, 0), (0, 0), (0, padding))))


def unpack(layout: KVLayout, data: Array) -> Array:
    """The inverse of `pack`."""
    if layout.order != WORDS:
        return data.transpose([layout.order.index(axis) for axis in CANONICAL])
    flat_LNBF = words.from_words(data, layout.dtype)[..., : 2 * layout.num_kv_heads * layout.head_dim]
    return flat_LNBF.reshape(*flat_LNBF.shape[:3], 2, layout.num_kv_heads, layout.head_dim)
