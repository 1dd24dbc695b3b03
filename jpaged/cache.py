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

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32, Shaped

from jpaged import sharding
from pallas_kernels.gpu import copy as gpu_copies
from pallas_kernels.gpu import mosaic
from pallas_kernels.tpu import copy as tpu_copies
from pallas_kernels.tpu import words

CANONICAL = "LNBCKD"  # C is 0 for keys and 1 for values; the order in which blocks leave and enter a cache

WORDS = "LNW"  # the order of the TPU kernels: blocks of 32-bit words, see `pallas_kernels.tpu.words`
HEADS = "LNCKBD"  # the order of the GPU kernels: in a block, a head's tokens side by side, which is what a copy brings

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")  # of keys and values

Scalar: TypeAlias = int | np.integer | Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The sizes of a KV cache and the physical order of its axes. The one owner of that order.

    Attributes:
      num_layers, num_blocks, block_size, num_kv_heads, head_dim: Sizes.
      dtype: Name of the element type.
      order: A permutation of the letters of ``CANONICAL``, or ``WORDS``. ``"LCKNBD"``, the order of the ``xla``
        backend, puts the tokens of one head of one block side by side, so that a gather of blocks is already batched by
        head; ``HEADS``, of the ``gpu`` backend, puts a block's together, so that one copy brings a head's. See
        `jpaged.attention.best_layout`.
      axis: Mesh axis that the heads are split over; None for a cache that one device holds.
      num_ranks: Its size, R. Each rank's keys and values lie together. With fewer KV heads than ranks, R/K ranks hold
        each.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    order: str = "LCKNBD"
    axis: str | None = None
    num_ranks: int = 1

    def __post_init__(self):
        names = ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "num_ranks")
        sizes = {k: getattr(self, k) for k in names}
        faults = [f"{name}={size} must be at least 1; try 1 or more" for name, size in sizes.items() if size < 1]
        if self.order != WORDS and sorted(self.order) != sorted(CANONICAL):
            faults.append(f"order={self.order!r} must be a permutation of {CANONICAL!r}, or {WORDS!r}; try the default")
        if self.dtype not in DTYPES:
            faults.append(f"dtype={self.dtype!r} must be one of {', '.join(map(repr, DTYPES))}; try 'bfloat16'")
        elif self.order == WORDS and self.block_size * jnp.dtype(self.dtype).itemsize % 4:
            faults.append(f"dtype={self.dtype!r} and block_size={self.block_size} must make words of 4 bytes; try 16")
        if self.axis is None and self.num_ranks > 1:
            faults.append(f"axis=None must be a mesh axis for num_ranks={self.num_ranks}; try its name")
        fewer, more = sorted((self.num_kv_heads, self.num_ranks))
        if fewer > 0 and more % fewer:
            faults.append(
                f"num_kv_heads={self.num_kv_heads} and num_ranks={self.num_ranks} must be one a multiple of the other; "
                f"try num_ranks={math.gcd(fewer, more)}"
            )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.order == WORDS:
            tall = self.block_size // words.per_word(self.dtype)
            lanes = self.num_ranks * words.width(self.of_rank.num_kv_heads, self.head_dim)
            return self.num_layers, self.num_blocks, tall, lanes
        size = dict(zip(CANONICAL, self.canonical_shape, strict=True)) | {"K": self.num_kv_heads * self.copies}
        return tuple(size[axis] for axis in self.order)

    @property
    def of_rank(self) -> KVLayout:
        """The layout of what one rank holds."""
        heads = max(1, self.num_kv_heads // self.num_ranks)
        return dataclasses.replace(self, num_kv_heads=heads, axis=None, num_ranks=1)

    @property
    def copies(self) -> int:
        """How many ranks hold a head."""
        return max(1, self.num_ranks // self.num_kv_heads)

    @property
    def partition(self) -> PartitionSpec:
        """How the array is split over the mesh."""
        if self.axis is None:
            return PartitionSpec()
        split = len(self.order) if self.order == WORDS else self.order.index("K")
        return PartitionSpec(*[None] * split, self.axis)

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
        """Bytes of one block in all layers and ranks, keys, values and padding; a rank's are `of_rank`'s."""
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
    """Returns a cache of zeros, split over the mesh in use if the layout is.

    Raises:
      ValueError: that mesh is another one.
    """
    if layout.axis is None:
        return KVCache(jnp.zeros(layout.shape, layout.stored_dtype), layout)
    sharding.mesh_with(layout.axis, layout.num_ranks)
    zeros = functools.partial(jnp.zeros, layout.shape, layout.stored_dtype)
    return KVCache(jax.jit(zeros, out_shardings=layout.partition)(), layout)


def write(
    cache: KVCache,
    layer: Scalar,
    k_TKD: Shaped[Array, "T K D"],
    v_TKD: Shaped[Array, "T K D"],
    block_T: Int32[Array, " T"],
    offset_T: Int32[Array, " T"],
) -> KVCache:
    """Stores the key and value of each token at its (block, offset); a token whose block is NULL is dropped.

    No two tokens may name the same place. Not for ``WORDS``, whose kernels write.
    """
    fresh_TCKD = jnp.stack([k_TKD, v_TKD], axis=1).astype(cache.data.dtype)
    fresh_TCKD = jnp.repeat(fresh_TCKD, cache.layout.copies, axis=2)
    at = cache.layout.index(L=layer, N=block_T, B=offset_T)
    # Indexed axes that stand apart come first in the result, so what is left is [T, C, K, D] in the order's own order.
    rest = [axis for axis in cache.layout.order if axis in "CKD"]
    fresh = fresh_TCKD.transpose(0, *(1 + "CKD".index(axis) for axis in rest))
    return cache.replace(data=cache.data.at[at].set(fresh, mode="drop", unique_indices=True))


def copy_blocks(cache: KVCache, src_J: Int32[Array, " J"], dst_J: Int32[Array, " J"]) -> KVCache:
    """Copies whole blocks within the cache, in all layers; rows whose destination is NULL do nothing.

    The trip count is the number of real copies, so a step without any pays nothing, and each copy is in place.
    """
    layout = cache.layout
    copy = functools.partial(_copy_blocks, layout.of_rank)
    if layout.axis is not None:
        copy = sharding.on_each_rank(
            copy,
            axis=layout.axis,
            num_ranks=layout.num_ranks,
            in_specs=(layout.partition, PartitionSpec(), PartitionSpec()),
            out_specs=layout.partition,
        )
    return cache.replace(data=copy(cache.data, src_J, dst_J))


def _copy_blocks(layout: KVLayout, data: Array, src_J: Array, dst_J: Array) -> Array:
    if not src_J.size:
        return data
    in_turn = functools.partial(_copy_in_turn, layout)
    if layout.order == WORDS:
        return lax.platform_dependent(data, src_J, dst_J, tpu=tpu_copies.copy_blocks, default=in_turn)
    if layout.order == HEADS and mosaic.lacks() is None:
        return lax.platform_dependent(data, src_J, dst_J, cuda=gpu_copies.copy_blocks, default=in_turn)
    return in_turn(data, src_J, dst_J)


def _copy_in_turn(layout: KVLayout, data: Array, src_J: Array, dst_J: Array) -> Array:
    axis, null = layout.block_axis, layout.num_blocks
    real_J = dst_J < null
    first_J = jnp.argsort(~real_J, stable=True)

    def one(i: Array, data: Array) -> Array:
        block = lax.dynamic_slice_in_dim(data, src_J[first_J[i]], 1, axis)
        return lax.dynamic_update_slice_in_dim(data, block, dst_J[first_J[i]], axis)

    return lax.fori_loop(0, jnp.sum(real_J, dtype=jnp.int32), one, data)


def read_blocks(cache: KVCache, ids_J: Int32[Array, " J"]) -> Array:
    """Blocks as they leave a cache: [J, L, B, C, K, D], canonical but for the block, which is first; NULL reads 0."""
    layout, axis = cache.layout, cache.layout.block_axis
    if not ids_J.size:
        return jnp.zeros(
            (0, *(size for name, size in zip(CANONICAL, layout.canonical_shape, strict=True) if name != "N")),
            layout.dtype,
        )
    taken = jnp.take(cache.data, ids_J, axis=axis, mode="fill", fill_value=0)
    return jnp.moveaxis(unpack(layout, taken), CANONICAL.index("N"), 0)


def write_blocks(cache: KVCache, ids_J: Int32[Array, " J"], blocks_JLBCKD: Array) -> KVCache:
    """Puts blocks back that `read_blocks` has read, in other places; NULL drops them. No id may occur twice."""
    layout, at = cache.layout, cache.layout.block_axis
    if not ids_J.size:
        return cache
    fresh = pack(layout, jnp.moveaxis(blocks_JLBCKD, 0, CANONICAL.index("N")))
    index = (slice(None),) * at + (ids_J,)
    return cache.replace(data=cache.data.at[index].set(fresh, mode="drop", unique_indices=True))


def pack(layout: KVLayout, blocks_LNBCKD: Array) -> Array:
    """Turns blocks in canonical order into the layout's order; any number of them."""
    if layout.copies > 1:
        blocks_LNBCKD = jnp.repeat(blocks_LNBCKD, layout.copies, axis=CANONICAL.index("K"))
    if layout.order != WORDS:
        return blocks_LNBCKD.transpose([CANONICAL.index(axis) for axis in layout.order])
    *lead, both, heads, head_dim = blocks_LNBCKD.shape
    ranked = blocks_LNBCKD.reshape(*lead, both, layout.num_ranks, heads // layout.num_ranks, head_dim)
    ranked = jnp.moveaxis(ranked, -3, -4).reshape(*lead, layout.num_ranks, -1)
    padding = words.width(layout.of_rank.num_kv_heads, head_dim) - ranked.shape[-1]
    return words.to_words(jnp.pad(ranked, [(0, 0)] * 4 + [(0, padding)]).reshape(*lead, -1))


def unpack(layout: KVLayout, data: Array) -> Array:
    """The inverse of `pack`."""
    if layout.order != WORDS:
        blocks_LNBCKD = data.transpose([layout.order.index(axis) for axis in CANONICAL])
        return blocks_LNBCKD[..., :: layout.copies, :]
    flat, heads = words.from_words(data, layout.dtype), layout.of_rank.num_kv_heads
    lead = flat.shape[:3]
    ranked = flat.reshape(*lead, layout.num_ranks, -1)[..., : 2 * heads * layout.head_dim]
    ranked = ranked.reshape(*lead, layout.num_ranks, 2, heads, layout.head_dim)
    return jnp.moveaxis(ranked, -4, -3).reshape(*lead, 2, -1, layout.head_dim)[..., :: layout.copies, :]
