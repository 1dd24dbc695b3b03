"""Rows with many queries, cut into tiles of some tokens: prefill.

A trip is a chunk of one tile's keys. Its arithmetic is a loop over head groups, since unrolled it would be tens of
thousands of bundles; in it the tile's rows are taken some at a time, the product with the values one step behind the
softmax (FlashAttention-2, Dao 2023, section 3). Only chunks that some query does not see whole are masked.

The tile's own KV is in memory already (`write`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.tpu.trips import MASKED, Settings, Trips
from pallas_kernels.tpu.walk import Count, Item
from pallas_kernels.tpu.words import LANES


class Prefill(Trips):
    """Rows of many queries; one item a trip."""

    @staticmethod
    def scratch(settings: Settings) -> dict[str, Any]:
        heads, cut = settings.heads, settings.cut
        q_dtype = jnp.float32 if settings.dtype == "float32" else jnp.bfloat16
        return {"q": pltpu.VMEM((heads.count, cut.queries * heads.rows, heads.q_lanes), q_dtype)}

    def _once_a_row(self, i: Count, p: int) -> None:
        item = self.walk.item(i, p)
        self._finish(i, p)
        self._settle(i, p, item)
        pl.when(self.walk.is_first(item))(lambda: self._begin(i))

    def _q_copies(self, i: Count, p: int, item: Item) -> list[tuple[Any, Any]]:
        """Once a tile: `_begin` keeps them."""
        first = self.walk.is_first(item)
        return [(copy, there & first) for copy, there in super()._q_copies(i, p, item)]

    def _begin(self, i: Count) -> None:
        """Puts the rows of a group side by side, and forgets the tile before."""
        heads, height = self.heads, self.mine.own["q"].shape[1]
        for u in range(heads.count):
            self.mine.own["q"][u] = self.mine.q[self._slot(i, 0), :, u].reshape(height, heads.q_lanes)
            self.mine.top[u] = self.sinks[u] if self.features.sinks else jnp.full((height, LANES), MASKED)
        self.mine.total[...] = jnp.full(self.mine.total.shape, float(self.features.sinks))
        self.mine.sum[...] = jnp.zeros(self.mine.sum.shape)

    def _end(self, i: Count) -> None:
        heads = self.heads
        for u in range(heads.count):
            out = self.mine.sum[u] * self._wide(1 / (self.mine.total[u]))
            if self.features.scales:
                out = out * self._wide(self.scales[1, u])
            out = out.reshape(self.cut.queries, heads.rows, heads.out_lanes)
            self.mine.out[i & 1, :, u] = out.astype(self.mine.out.dtype)

    def _attend(self, i: Count) -> None:
        walk, item = self.walk, self.walk.item(i, 0)
        for order in self._orders(i + self.ahead):
            order()
        count, queries = walk.in_chunk(item), walk.queries(item.row)
        whole = count - queries + 1 >= self.cut.chunk  # for the first query, so for all
        whole = walk.in_window(whole, 0, count)  # for the last query

        def groups(masked: bool) -> None:
            one = functools.partial(self._group, i, item, masked)
            lax.fori_loop(0, self.heads.count, lambda u, _: one(u), None, unroll=groups_at_once(self.heads.count))

        pl.when(whole)(lambda: groups(False))
        pl.when(jnp.logical_not(whole))(lambda: groups(True))
        pl.when(walk.is_last(item))(lambda: self._end(i))

    def _group(self, i: Count, item: Item, masked: bool, u: Count) -> None:
        heads, mine = self.heads, self.mine
        keys = self._lanes(i, 0, self._start(0, u), heads.key_lanes)
        values = self._lanes(i, 0, self._start(heads.values_begin, u), heads.value_lanes)
        height, step = mine.own["q"].shape[1], min(self.tiling.rows, mine.own["q"].shape[1])
        behind = None
        for row in range(0, height, step):
            rows = pl.ds(row, min(step, height - row))
            score = self._dot(mine.own["q"][u, rows, :], keys, 1)
            score = self._scaled(score, u, rows)
            if masked:
                score = self._masked(score, item, row)
            before = mine.top[u, rows, :]
            now = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
            old = jnp.exp2(before - now)
            weight = jnp.exp2(score - _across(now, score.shape[1]))
            mine.total[u, rows, :] = mine.total[u, rows, :] * old + jnp.sum(weight, axis=1, keepdims=True)
            mine.top[u, rows, :] = now
            if behind is not None:
                self._add(u, values, *behind)
            behind = rows, weight.astype(jnp.float32 if self.dtype == jnp.float32 else jnp.bfloat16), old
        assert behind is not None
        self._add(u, values, *behind)

    def _add(self, u: Count, values: Array, rows: Any, weight: Array, old: Array) -> None:
        value = self._dot(weight, values, 0)
        if self.heads.dense:
            value = value[:, : self.heads.head_dim]
        self.mine.sum[u, rows, :] = self.mine.sum[u, rows, :] * self._wide(old) + value

    def _scaled(self, score: Array, u: Count, rows: Any) -> Array:
        if self.features.scales:
            score = score * _across(self.scales[0, u, rows, :], score.shape[1])
        else:
            score = score * self.floats[0]
        return jnp.tanh(score) * self.floats[1] if self.features.soft_cap else score

    def _masked(self, score: Array, item: Item, row: int) -> Array:
        lane, starts = self._places(score.shape[0])
        query = (lax.broadcasted_iota(jnp.int32, (score.shape[0], 1), 0) + row) // self.heads.rows
        place, limit = lane - query, self.walk.in_chunk(item) - self.walk.queries(item.row) + 1  # of the first query
        pieces = []
        for n, start in enumerate(starts):
            seen = self.walk.in_window(place < limit - start, place, limit - start)
            pieces.append(jnp.where(seen, score[:, n * LANES : (n + 1) * LANES], MASKED))
        return jnp.concatenate(pieces, axis=1)


def groups_at_once(count: int) -> int:
    """How many groups a turn of the loop does: two, for one's first product hides the other's last."""
    return 2 if count % 2 == 0 else 1


def _across(rows: Array, lanes: int) -> Array:
    return jnp.concatenate([rows] * (lanes // LANES), axis=1)
