"""Copies of queries, keys and values into shared memory, and how they lie there.

On Hopper and later the tensor memory accelerator copies, and a barrier in each slot says that a chunk is there. Before,
cp.async copies, and what is waited for is that no more than so many copies are on their way.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.form import Form
from pallas_kernels.gpu.mosaic import plgpu
from pallas_kernels.gpu.spans import Span
from pallas_kernels.gpu.tiling import THREADS, WARPS

_TILE = 8  # rows that are swizzled together


def swizzle(rows: int, columns: int, dtype: Any, *, tma: bool) -> int | None:
    """Bytes of a swizzled row, the most that suit; None if none do: TMA brings that all the same, plainly.

    Args:
      rows, columns, dtype: Of what one copy brings.
      tma: Whether TMA brings it; cp.async wants as many tiles for each warp.
    """
    size = columns * jnp.dtype(dtype).itemsize
    fitting = (bytes_ for bytes_ in (128, 64, 32) if size % bytes_ == 0)
    return next((bytes_ for bytes_ in fitting if tma or rows // _TILE * (size // bytes_) % WARPS == 0), None)


def transforms(rows: int, columns: int, dtype: Any, *, tma: bool) -> tuple[Any, ...]:
    """How an array of shared memory is tiled and swizzled."""
    bytes_ = swizzle(rows, columns, dtype, tma=tma)
    if bytes_ is None:
        return ()
    return (
        plgpu.TilingTransform((_TILE, bytes_ // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(bytes_),
    )


def strided(shape: tuple[int, int], dtype: Any) -> Any:
    """The layout in which the threads of a program share out an array by as wide pieces as they can."""
    numbers = shape[0] * shape[1]
    sizes = [size for size in (16, 8, 4, 2, 1) if size * jnp.dtype(dtype).itemsize <= 16]
    return plgpu.Layout.WG_STRIDED(shape, vec_size=next(size for size in sizes if numbers % (size * THREADS) == 0))


class Moves:
    """A program's copies."""

    def __init__(self, form: Form, cache: Any, tables: Any, layer: Any, head: Any, span: Span, smem: dict[str, Any]):
        self._form, self._cache, self._tables, self._head = form, cache, tables, head
        self._span, self._smem = span, smem
        self._base = layer * (form.num_blocks * 2 * form.num_kv_heads)
        self._at_once = min(form.block_size, form.tiling.chunk)  # tokens

    def begin(self, queries: Any) -> None:
        """Fetches the queries and, but for one slot, as many chunks as there are slots.

        Without TMA queries are there when the first chunk is, which is ordered after them.
        """
        here = self._smem["q_smem"]
        if self._form.chip.has_tma:
            plgpu.copy_gmem_to_smem(queries, here, self._smem["q_there"])
        else:
            _cp_async(queries, here)
        pl.loop(0, jnp.minimum(self._span.chunks, self._form.tiling.stages - 1))(self.fetch)
        if self._form.chip.has_tma:
            plgpu.barrier_wait(self._smem["q_there"])

    def fetch(self, nth: Any) -> None:
        """Begins to fetch a chunk into its slot. Behind the row's last token it is that token's block again."""
        form, chunk = self._form, self._form.tiling.chunk
        slot = lax.rem(nth, jnp.int32(form.tiling.stages))
        for k in range(chunk // self._at_once):
            token = (self._span.first + nth) * chunk + k * self._at_once
            column = lax.div(jnp.minimum(token, self._span.limit - 1), jnp.int32(form.block_size))
            block = self._tables[self._span.row, column]
            within = pl.ds(lax.rem(token, jnp.int32(form.block_size)), self._at_once)
            for which, name in enumerate("kv"):
                head = self._base + (block * 2 + which) * form.num_kv_heads + self._head
                there = self._cache.at[head]
                if self._at_once < form.block_size:
                    there = there.at[within]
                here = self._smem[f"{name}_smem"].at[slot, pl.ds(k * self._at_once, self._at_once)]
                if form.chip.has_tma:
                    plgpu.copy_gmem_to_smem(there, here, self._smem[f"{name}_there"].at[slot])
                else:
                    _cp_async(there, here)

    def turn(self, nth: Any) -> Any:
        """Waits for a chunk's keys, and begins to fetch what comes into the slot just read; returns this slot."""
        form, stages = self._form, self._form.tiling.stages
        slot, further = lax.rem(nth, jnp.int32(stages)), nth + (stages - 1)
        if form.chip.has_tma:
            plgpu.commit_smem()  # or the copy could overtake the reads of what it overwrites
            pl.when(further < self._span.chunks)(lambda: self.fetch(further))
            plgpu.barrier_wait(self._smem["k_there"].at[slot])
            return slot
        # A wait is for all threads: behind it, none reads any more what the copy overwrites.
        on_their_way = 2 * (form.tiling.chunk // self._at_once) * (stages - 2)
        if on_their_way:
            pl.when(further <= self._span.chunks)(lambda: plgpu.wait_gmem_to_smem(on_their_way))
            pl.when(further > self._span.chunks)(lambda: plgpu.wait_gmem_to_smem(0))  # the last chunks: fewer are
        else:
            plgpu.wait_gmem_to_smem(0)
        pl.when(further < self._span.chunks)(lambda: self.fetch(further))
        return slot

    def wait_for_values(self, slot: Any) -> None:
        """Without TMA they came with their keys."""
        if self._form.chip.has_tma:
            plgpu.barrier_wait(self._smem["v_there"].at[slot])


def _cp_async(there: Any, here: Any) -> None:
    plgpu.copy_gmem_to_smem(there, here, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
