"""The loop that streams a ragged batch's KV through VMEM, whatever is done with it there.

One loop does all rows of a core, P chunks a trip (`walk`). While a trip computes, the blocks of a later one are on
their way; what is ordered stands between the products, in the same basic block, because it takes the scalar unit as
long as the matrix unit takes for its part. Only what happens once a row is behind a branch.

Blocks that hold nothing of a row are never ordered. What lies in their place in VMEM, and behind the last token of a
block, may be anything, and so is kept out of the scores by a mask and out of the values by zeros.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.tpu import eighths, products, words
from pallas_kernels.tpu.heads import HeadGroups
from pallas_kernels.tpu.tiling import Tiling
from pallas_kernels.tpu.walk import FIELDS, Count, Cut, Item, TableReader, Walk, halves
from pallas_kernels.tpu.words import LANES, PIECE, SUBLANES

MASKED = -1e30  # finite, so that a chunk that a query sees nothing of merges without NaN

Orders: TypeAlias = list[Callable[[], None]]


class Features(NamedTuple):
    """What a kernel is compiled with."""

    writes: bool
    window: bool
    soft_cap: bool
    sinks: bool
    scales: bool
    tree: bool


class Scratch(NamedTuple):
    """A core's own memory; i counts trips, p the items of a trip."""

    ring: Any  # SMEM, the walk's
    ids: Any  # SMEM [2·P, ids]: parts of the block tables
    kv: Any  # [buffers·P, Y, W, F] words
    q: Any  # [buffers·P, Q, U, V, X]
    new: Any  # [buffers·P, Q, 1, F] words; None if nothing is written
    out: Any  # [2·P, Q, U, V, X]
    top: Any  # [U, Q·V, 128]: the running maximum of each row
    total: Any  # [U, Q·V, 128]: the running sum of the weights
    sum: Any  # [U, Q·V, X]: the running weighted sum of the values
    ids_there: Any
    kv_there: Any
    new_there: Any
    kv_gone: Any
    out_gone: Any
    own: dict[str, Any]  # what a kind of trip needs besides


class Far(NamedTuple):
    """Refs to HBM."""

    q: Any
    new: Any
    out: Any
    blocks: Any  # of the layer


class Settings(NamedTuple):
    """What a kernel is compiled for."""

    heads: HeadGroups
    dtype: str
    cut: Cut
    tiling: Tiling
    features: Features
    converts: bool


class Operands(NamedTuple):
    """Refs that the arithmetic reads; None if there are none."""

    floats: Any  # SMEM: the factor on the scores, the cap
    sinks: Any  # [U, Q·V, 128]
    scales: Any  # [2, U, Q·V, 128]
    tree: Any  # SMEM [R·Q]


class Trips(abc.ABC):
    """The loop of one core. What a trip does with the KV that has come is a subclass's."""

    def __init__(
        self, settings: Settings, walk: Walk, reader: TableReader, far: Far, mine: Scratch, operands: Operands
    ):
        self.heads, dtype, self.cut, self.tiling, self.features, self.converts = settings
        self.walk, self.reader, self.far, self.mine = walk, reader, far, mine
        self.floats, self.sinks, self.scales, self.tree = operands
        self.dtype = jnp.dtype(dtype)
        self.per_word = words.per_word(dtype)
        self.num_words = self.cut.block // self.per_word
        self.tile = min(SUBLANES, self.num_words)  # words of the smallest piece that is read, changed and written
        self.ahead = self.tiling.buffers - 1

    @staticmethod
    def scratch(settings: Settings) -> dict[str, Any]:
        """Memory that this kind of trip needs besides: `Scratch.own`."""
        return {}

    def run(self, begin: Count, end: Count) -> None:
        walk, cut = self.walk, self.cut
        num_places = self.mine.ring.shape[0] // FIELDS
        lax.fori_loop(0, num_places, lambda place, _: walk.clear(place), None)
        item = self._lead(jnp.int32(0), walk.enter(begin, end), end)
        for i in range(self.ahead):
            item = self._lead(jnp.int32(i + 1), item, end)
            for order in self._orders(jnp.int32(i)):
                order()
        for state in (self.mine.top, self.mine.total, self.mine.sum):
            state[...] = jnp.zeros_like(state)

        def trip(carry: tuple[Count, Item, Array]) -> tuple[Count, Item, Array]:
            i, item, _ = carry
            for p in range(cut.items):
                self._await(i, p)
            for p in range(cut.items):
                self._once_a_row(i, p)
            item = self._lead(i + self.ahead + 1, item, end)
            self._attend(i)
            return i + 1, item, walk.is_row(walk.item(i + 1, 0).row)

        start = jnp.int32(0), item, walk.is_row(walk.item(jnp.int32(0), 0).row)
        count, _, _ = lax.while_loop(lambda carry: carry[2], trip, start)
        for p in range(cut.items):
            self._finish(count, p)
            item = walk.item(count - 1, p)
            for copy, there in self._out_copies(count - 1, p, item):
                pl.when(walk.is_last(item) & there)(copy.wait)
            self.reader.copy(count + self.ahead, p, walk.item(count + self.ahead, p)).wait()

    def _lead(self, i: Count, item: Item, end: Count) -> Item:
        for p in range(self.cut.items):
            self.walk.note(i, p, item)
            self.reader.copy(i, p, item).start()
            item = self.walk.after(item, end)
        return item

    def _slot(self, i: Count, p: Any) -> Count:
        return self._buffer(i) * self.cut.items + p

    def _buffer(self, i: Count) -> Count:
        return i & (self.tiling.buffers - 1)

    def _orders(self, i: Count) -> Orders:
        """All copies that trip i needs, each small."""
        orders: Orders = []
        for p in range(self.cut.items):
            rows, block = self._orders_of(i, p)
            orders += [rows, *(functools.partial(block, k) for k in range(self.cut.blocks))]
        return orders

    def _orders_in_turns(self, i: Count, turns: int) -> Callable[[Count], Orders]:
        """The same where a loop makes several turns: the orders of turn n, once those that come first are made."""
        of_items, share = [self._orders_of(i, p) for p in range(self.cut.items)], -(-self.cut.blocks // turns)

        def of_turn(n: Count) -> Orders:
            rows = [functools.partial(pl.when(n == 0), rows) for rows, _ in of_items]
            return rows + [functools.partial(block, n * share + k) for _, block in of_items for k in range(share)]

        return of_turn

    def _orders_of(self, i: Count, p: int) -> tuple[Callable[[], None], Callable[[Any], None]]:
        """The orders for an item: of what there is once a row, and of block k."""
        item = self.walk.item(i, p)
        self.reader.copy(i, p, item).wait()
        read = self.reader.reader(i, p, item)
        begin, end = self.walk.blocks(item)
        rows = functools.partial(self._order_rows, i, p, item, read)
        return rows, lambda k: self._order_block(i, p, k, begin, end, read)

    def _order_block(self, i: Count, p: int, k: Any, begin: Count | int, end: Count, read: Any) -> None:
        seen = k < end if isinstance(begin, int) else (k >= begin) & (k < end)

        @pl.when(seen)
        def _() -> None:
            source, target = self.far.blocks.at[read(k)], self.mine.kv.at[self._slot(i, p), k]
            pltpu.make_async_copy(source, target, self.mine.kv_there.at[self._buffer(i), p]).start()

    def _order_rows(self, i: Count, p: int, item: Item, read: Any) -> None:
        for copy, there in self._q_copies(i, p, item):
            pl.when(there)(copy.start)
        if not self.features.writes:
            return
        for copy, there in self._new_copies(i, p, item):
            pl.when(there & self.walk.has_new(item))(copy.start)
        for k, place in enumerate(self.walk.new_places(item)[: 2 if self.cut.queries > 1 else 1]):
            block = jnp.clip(place >> (self.cut.block.bit_length() - 1), 0, self.cut.blocks - 1)
            self.walk.note_block(i, p, k, read(block))

    def _queries(self, item: Item) -> Any:
        return jnp.where(self.walk.is_row(item.row), self.walk.queries(item.row), 0)

    def _row_copies(self, item: Item, near: Any, far: Any, outward: bool, semaphore: Any) -> list[tuple[Any, Any]]:
        """Copies of what there is for each query of a row, and whether they are to be made."""
        copies, first = [], self.walk.first_query(item.row)
        for begin, size, there in halves(self._queries(item), self.cut.queries):
            ends = near.at[pl.ds(begin, size)], far.at[pl.ds(first + begin, size)]
            source, target = ends if outward else ends[::-1]
            copies.append((pltpu.make_async_copy(source, target, semaphore), there))
        return copies

    def _q_copies(self, i: Count, p: int, item: Item) -> list[tuple[Any, Any]]:
        there = self.mine.kv_there.at[self._buffer(i), p]
        return self._row_copies(item, self.mine.q.at[self._slot(i, p)], self.far.q, False, there)

    def _new_copies(self, i: Count, p: int, item: Item) -> list[tuple[Any, Any]]:
        there = self.mine.new_there.at[self._buffer(i), p]
        return self._row_copies(item, self.mine.new.at[self._slot(i, p)], self.far.new, False, there)

    def _out_copies(self, i: Count, p: int, item: Item) -> list[tuple[Any, Any]]:
        gone = self.mine.out_gone.at[i & 1, p]
        return self._row_copies(item, self.mine.out.at[(i & 1) * self.cut.items + p], self.far.out, True, gone)

    def _await(self, i: Count, p: int) -> None:
        item = self.walk.item(i, p)
        begin, end = self.walk.blocks(item)
        for _, size, there in halves(end - begin, self.cut.blocks):
            piece = self.mine.kv.at[self._slot(i, p), pl.ds(0, size)]
            pl.when(there)(pltpu.make_async_copy(piece, piece, self.mine.kv_there.at[self._buffer(i), p]).wait)
        for copy, there in self._q_copies(i, p, item):
            pl.when(there)(copy.wait)

    def _finish(self, i: Count, p: int) -> None:
        """Sends off what trip i − 1 has finished, and makes sure that what trip i − 2 has sent has gone."""
        walk, before = self.walk, self.walk.item(i - 2, p)
        for copy, there in self._out_copies(i - 2, p, before):
            pl.when(walk.is_last(before) & there)(copy.wait)
        item = walk.item(i - 1, p)
        if self.features.writes:
            for copy, there in self._write_copies(i - 1, p, item):
                pl.when(walk.has_new(item) & there)(copy.wait)
        for copy, there in self._out_copies(i - 1, p, item):
            pl.when(walk.is_last(item) & there)(copy.start)

    @abc.abstractmethod
    def _once_a_row(self, i: Count, p: int) -> None:
        """What happens where a row begins or ends, before the arithmetic of its chunk."""

    @abc.abstractmethod
    def _attend(self, i: Count) -> None:
        """The arithmetic of a trip, and between it the orders for a later one."""

    def _settle(self, i: Count, p: int, item: Item) -> None:
        """Makes the chunk readable: zeroes for values of tokens that nobody sees, and new tokens in their place."""
        walk = self.walk
        if self.features.window:
            pl.when(walk.is_first(item))(lambda: self._zero(i, p, 0, walk.blocks(item)[0] * self.num_words))
        once = self.cut.queries == 1 or not self.features.writes  # new tokens of several queries may lie in two chunks
        if not once:
            pl.when(walk.has_new(item))(lambda: self._put(i, p, item))

        @pl.when(walk.is_last(item))
        def _() -> None:
            if once:
                self._put(i, p, item)
            used = (walk.in_chunk(item) + self.per_word - 1) // self.per_word
            self._zero(i, p, (used + self.tile - 1) & -self.tile, self.cut.chunk // self.per_word)

    def _tile_of(self, place: Count) -> tuple[Count, Count]:
        """The block and the first word in it of the tile that holds a place of the chunk."""
        word = place // self.per_word
        return word // self.num_words, pl.multiple_of(word % self.num_words & -self.tile, self.tile)

    def _write_copies(self, i: Count, p: int, item: Item) -> list[tuple[Any, Any]]:
        """The tiles of new tokens on their way to HBM; up to eight tokens lie in one or two."""
        tokens, copies = self.tile * self.per_word, []
        first, last = self.walk.new_places(item)
        pair = [(first, True)] if self.cut.queries == 1 else [(first, True), (last, first // tokens != last // tokens)]
        for k, (place, there) in enumerate(pair):
            block, word = self._tile_of(place)
            near = self.mine.kv.at[self._slot(i, p), block, pl.ds(word, self.tile)]
            far = self.far.blocks.at[self.walk.noted_block(i, p, k), pl.ds(word, self.tile)]
            copies.append((pltpu.make_async_copy(near, far, self.mine.kv_gone.at[self._buffer(i), p]), there))
        return copies

    def _put(self, i: Count, p: int, item: Item) -> None:
        """Puts new tokens into the chunk and sends them to HBM; without any, clears what follows the last token in its
        tile."""
        walk, writes = self.walk, self.features.writes
        first, last = walk.new_places(item)
        if writes:
            for copy, there in self._new_copies(i, p, item):
                pl.when(there)(copy.wait)
            places = [first] if self.cut.queries == 1 else [first, last]
            for (copy, there), place in zip(self._write_copies(i, p, item), places, strict=True):

                def put(copy: Any = copy, place: Count = place) -> None:
                    self._change_tile(i, p, item, place)
                    copy.start()

                pl.when(there)(put)
        else:
            self._change_tile(i, p, item, last)

    def _change_tile(self, i: Count, p: int, item: Item, place: Count) -> None:
        block, word = self._tile_of(place)
        tile = self.mine.kv.at[self._slot(i, p), block, pl.ds(word, self.tile)]
        row = lax.broadcasted_iota(jnp.int32, (self.tile, 1), 0)
        base = (block * self.num_words + word) * self.per_word
        count = self.walk.in_chunk(item)
        kept = count - self.walk.queries(item.row) if self.features.writes else count
        mask = words.first_tokens(kept - base - row * self.per_word, self.per_word)
        for lane in range(0, tile.shape[1], PIECE):
            piece = slice(lane, min(lane + PIECE, tile.shape[1]))
            held = tile[:, piece] & mask
            if self.features.writes:
                for t in range(self.cut.queries):
                    at = kept + t - base
                    fresh = self.mine.new[self._slot(i, p), t, :, piece]
                    fresh = fresh << ((at & (self.per_word - 1)) * (32 // self.per_word))
                    # No query, no token; a token of the next chunk is beyond the tile.
                    at = at if t == 0 else jnp.where(t < self.walk.queries(item.row), at, -1)
                    held |= jnp.where(row == at >> (self.per_word.bit_length() - 1), fresh, 0)
            tile[:, piece] = held

    def _zero(self, i: Count, p: int, begin: Any, end: Any) -> None:
        """Zeroes the values of whole tiles of words."""
        first = self.heads.values_begin

        def one(k: Count, _: None) -> None:
            word = k * self.tile
            at = pl.ds(pl.multiple_of(word % self.num_words, self.tile), self.tile)
            piece = self.mine.kv.at[self._slot(i, p), word // self.num_words, at]
            piece[:, first:] = jnp.zeros((self.tile, piece.shape[1] - first), jnp.int32)

        lax.fori_loop(begin // self.tile, end // self.tile, one, None)

    def _wide(self, rows: Array) -> Array:
        """What is the same on 128 lanes, on as many as an output has."""
        return jnp.concatenate([rows] * (self.heads.out_lanes // LANES), axis=1)

    def _lanes(self, i: Count, p: Any, start: Any, count: int) -> Array:
        """Lanes of a trip's KV, [C, count]."""
        held = self.mine.kv[self._slot(i, p), :, :, pl.ds(start, count)].reshape(-1, count)
        if self._by_hand:
            return eighths.to_bfloat16(held, self.dtype.name)
        kv_tokens = pltpu.bitcast(held, self.dtype)
        return kv_tokens.astype(jnp.bfloat16) if self.dtype == jnp.int8 else kv_tokens

    @property
    def _by_hand(self) -> bool:
        return self.per_word == 4 and not self.converts

    def _start(self, first: int, u: Any) -> Any:
        """Where the lanes of a head group begin, ``first`` being where those of group 0 do."""
        return pl.multiple_of(first + u * self.heads.key_lanes, LANES)

    def _places(self, rows: int) -> tuple[Array, list[int]]:
        """The tokens of the chunk in the columns of a product, 128 at a time: in each lane, and what to add in each
        piece. So a mask takes one register for all pieces, where the tokens' numbers would take one each."""
        lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        if self._by_hand:
            return eighths.places(lane, self.cut.chunk)
        return lane, list(range(0, self.cut.chunk, LANES))

    def _dot(self, a: Array, b: Array, axis: int) -> Array:
        return products.dot(a, b, axis, part=self.tiling.part or self.tiling.lanes)
