"""The scalar side of a kernel: which piece of which row comes next, and where its blocks are.

A row's tokens are cut into chunks of C tokens, Y blocks. An item is a chunk of a row, and a trip of the kernel's loop
does P of them, which may belong to one row or to several. The walk runs ahead of the arithmetic: its findings wait in a
ring in SMEM, and the part of the block table that an item needs is copied there a trip before it is read, so that
tables may be larger than SMEM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from pallas_kernels.tpu.words import LANES

FIELDS = 4  # of an item in the ring: its row, its chunk, and the blocks of its first and its last new token
Count = Int32[Array, ""]


class Item(NamedTuple):
    """Chunk ``chunk`` of the row at ``row`` in the kernel's table of rows."""

    row: Count
    chunk: Count


@dataclasses.dataclass(frozen=True)
class Cut:
    """How rows are cut.

    Attributes:
      block: Tokens of a block; a power of two.
      chunk: Tokens of a chunk; a power of two.
      items: Items of a trip.
      queries: The most queries of a row.
    """

    block: int
    chunk: int
    items: int
    queries: int

    @property
    def blocks(self) -> int:
        return self.chunk // self.block

    @property
    def ids(self) -> int:
        """Entries of the table that are copied for an item: whole tiles, since a copy may not begin elsewhere."""
        return max(self.blocks, LANES)


def halves(count: Count | int, most: int) -> Iterator[tuple[Any, int, Any]]:
    """Cuts ``count``, of at most ``most``, into powers of two: (where it begins, how many, whether it is there)."""
    size = 1 << (most.bit_length() - 1)
    while size:
        yield (count & -(2 * size)), size, (count & size) != 0
        size //= 2


class Walk:
    """The walk of one core; `i` counts trips and `p` the items of a trip."""

    def __init__(self, cut: Cut, rows: Any, num_rows: int, ring: Any, window: Count | None):
        self.cut, self.num_rows, self.window = cut, num_rows, window
        self._rows, self._ring = rows, ring
        self._trips = ring.shape[0] // (FIELDS * cut.items)  # a power of two
        self._log_chunk = cut.chunk.bit_length() - 1
        self._log_block = cut.block.bit_length() - 1

    def _part(self, part: int, row: Count) -> Count:
        return self._rows[part * (self.num_rows + 1) + row]

    def is_row(self, row: Count) -> Array:
        return row < self.num_rows

    def table_row(self, row: Count) -> Count:
        return self._part(0, row)

    def tokens(self, row: Count) -> Count:
        return self._part(1, row)

    def first_query(self, row: Count) -> Count:
        return self._part(2, row)

    def queries(self, row: Count) -> Count | int:
        return self._part(3, row) if self.cut.queries > 1 else 1

    def _oldest(self, row: Count) -> Count:
        """The first position that any query of the row sees."""
        assert self.window is not None
        return jnp.maximum(self.tokens(row) - self.queries(row) - self.window + 1, 0)

    def in_window(self, seen: Array, place: Array | int, limit: Any) -> Array:
        """Of what is seen by queries whose own places end at ``limit``, what the window leaves."""
        return seen if self.window is None else seen & (place >= limit - self.window)

    def last_chunk(self, row: Count) -> Count:
        return (self.tokens(row) - 1) >> self._log_chunk  # -1 for no row

    def first_chunk(self, row: Count) -> Count:
        return jnp.int32(0) if self.window is None else self._oldest(row) >> self._log_chunk

    def in_chunk(self, item: Item) -> Count:
        """The row's tokens, counted from the chunk's first; may be more than a chunk has."""
        return self.tokens(item.row) - item.chunk * self.cut.chunk

    def is_first(self, item: Item) -> Array:
        return item.chunk == self.first_chunk(item.row)

    def is_last(self, item: Item) -> Array:
        return item.chunk == self.last_chunk(item.row)

    def has_new(self, item: Item) -> Array:
        """Whether tokens of the queries themselves lie in the chunk."""
        if self.cut.queries == 1:
            return self.is_last(item)
        return self.is_row(item.row) & (self.in_chunk(item) - self.queries(item.row) < self.cut.chunk)

    def blocks(self, item: Item) -> tuple[Count | int, Count]:
        """The blocks of the chunk that hold tokens which somebody sees: from, up to."""
        before = item.chunk * self.cut.blocks
        end = (self.tokens(item.row) + self.cut.block - 1) >> self._log_block
        end = jnp.clip(end - before, 0, self.cut.blocks)
        if self.window is None:
            return 0, end
        return jnp.clip((self._oldest(item.row) >> self._log_block) - before, 0, end), end

    def new_places(self, item: Item) -> tuple[Count, Count]:
        """Where in the chunk its first and its last new token are."""
        count = self.in_chunk(item)
        last = jnp.minimum(count, self.cut.chunk) - 1
        return (jnp.maximum(count - self.queries(item.row), 0) if self.cut.queries > 1 else last), last

    def enter(self, row: Count, end: Count) -> Item:
        """The first item of a row, or of none if the row is not before ``end``."""
        row = jnp.where(row < end, row, self.num_rows)
        return Item(row, self.first_chunk(row))

    def after(self, item: Item, end: Count) -> Item:
        entered = self.enter(item.row + 1, end)
        last = item.chunk >= self.last_chunk(item.row)
        return Item(jnp.where(last, entered.row, item.row), jnp.where(last, entered.chunk, item.chunk + 1))

    def _place(self, i: Count, p: Count | int) -> Count:
        return ((i & (self._trips - 1)) * self.cut.items + p) * FIELDS

    def clear(self, place: Count) -> None:
        self._ring[place * FIELDS], self._ring[place * FIELDS + 1] = jnp.int32(self.num_rows), jnp.int32(0)

    def note(self, i: Count, p: int, item: Item) -> None:
        self._ring[self._place(i, p)], self._ring[self._place(i, p) + 1] = item.row, item.chunk

    def item(self, i: Count, p: Count | int) -> Item:
        return Item(self._ring[self._place(i, p)], self._ring[self._place(i, p) + 1])

    def note_block(self, i: Count, p: int, k: int, block: Count) -> None:
        self._ring[self._place(i, p) + 2 + k] = block

    def noted_block(self, i: Count, p: int, k: int) -> Count:
        return self._ring[self._place(i, p) + 2 + k]


class TableReader:
    """Copies of the parts of a flat block table that the items of two trips need."""

    def __init__(self, walk: Walk, table: Any, columns: Count, ids: Any, semaphores: Any):
        self._walk, self._table, self._columns = walk, table, columns
        self._ids, self._semaphores = ids, semaphores

    def _begin(self, item: Item) -> Count:
        return self._walk.table_row(item.row) * self._columns + item.chunk * self._walk.cut.blocks

    def copy(self, i: Count, p: int, item: Item) -> Any:
        cut = self._walk.cut
        tile = pl.multiple_of(self._begin(item) & -LANES, LANES)
        return pltpu.make_async_copy(
            self._table.at[pl.ds(tile, cut.ids)], self._ids.at[(i & 1) * cut.items + p], self._semaphores.at[i & 1, p]
        )

    def reader(self, i: Count, p: int, item: Item) -> Any:
        """A function from a block's place in the chunk to its id, once the copy is there."""
        cut = self._walk.cut
        skip = self._begin(item) & (LANES - 1) if cut.blocks < LANES else 0
        return lambda place: self._ids[(i & 1) * cut.items + p, skip + place]
