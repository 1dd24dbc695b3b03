"""Rows with few queries: decode, and speculative tokens.

A trip's products, softmax and merge are one basic block, which the compiler can fill. Its order is the product's: all
QKᵀ, all softmax, all PV, over P chunks times the head groups, so that the matrix unit does not wait for one softmax.
Softmax is in base 2 and merged as in Flash-Decoding; see Milakov & Gimelshein 2018, section 3.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.tpu.trips import MASKED, Orders, Settings, Trips
from pallas_kernels.tpu.walk import Count, Item
from pallas_kernels.tpu.words import LANES

MOST_QUERIES = 8


class Decode(Trips):
    """Rows of few queries."""

    @staticmethod
    def scratch(settings: Settings) -> dict[str, Any]:
        heads, _, cut, tiling, _ = settings
        count, height = tiling.items * heads.count, cut.queries * heads.rows
        own: dict[str, Any] = {}
        if tiling.staged or cut.queries > 1:
            own["scores"] = pltpu.VMEM((count, height, cut.chunk), jnp.float32)
        if cut.queries > 1:
            kind = jnp.float32 if settings.dtype == "float32" else jnp.bfloat16
            own["weights"] = pltpu.VMEM((count, height, cut.chunk), kind)
            own["peaks"] = own["masses"] = pltpu.VMEM((count, height, LANES), jnp.float32)
        return own

    def _once_a_row(self, i: Count, p: int) -> None:
        self._finish(i, p)
        self._settle(i, p, self.walk.item(i, p))

    def _attend(self, i: Count, orders: Orders) -> None:
        pairs = [(p, u) for p in range(self.cut.items) for u in range(self.heads.count)]
        spread = _Spread(orders, self.tiling.early, len(pairs))
        scores = [self._keep(k, spread.after(self._scores(i, p, u))) for k, (p, u) in enumerate(pairs)]
        weigh = self._weights if self.cut.queries == 1 else self._weights_in_a_loop
        weights = weigh(i, pairs, scores)
        values = [spread.after(self._values(i, p, u, w[2]())) for (p, u), w in zip(pairs, weights, strict=True)]
        spread.rest()
        mine, groups = self.mine, range(self.heads.count)
        top, total, held = ([ref[u] for u in groups] for ref in (mine.top, mine.total, mine.sum))
        for (p, u), (peak, mass, _), value in zip(pairs, weights, values, strict=True):
            first = self.walk.is_first(self.walk.item(i, p))
            before = jnp.where(first, self.sinks[u] if self.features.sinks else MASKED, top[u])
            now = jnp.maximum(before, peak)
            old, fresh = jnp.exp2(before - now), jnp.exp2(peak - now)
            total[u] = jnp.where(first, float(self.features.sinks), total[u]) * old + mass * fresh
            held[u] = jnp.where(first, 0.0, held[u]) * self._wide(old) + value * self._wide(fresh)
            top[u] = now
            out = held[u] * self._wide(1 / (total[u]))
            if self.features.scales:
                out = out * self._wide(self.scales[1, u])
            rows = slice(u * self.heads.rows, (u + 1) * self.heads.rows)
            out = out.reshape(self.cut.queries, self.heads.rows, self.heads.out_lanes)
            mine.out[(i & 1) * self.cut.items + p, :, rows, :] = out.astype(mine.out.dtype)
        for u in groups:
            mine.top[u], mine.total[u], mine.sum[u] = top[u], total[u], held[u]

    def _keep(self, k: int, score: Array) -> Callable[[], Array]:
        """A chunk's scores until they are wanted: in VMEM if all of them would not fit into registers."""
        place = self.mine.own.get("scores")
        if place is None:
            return lambda: score
        place[k] = score
        return lambda: place[k]

    def _row_head(self, lanes: int) -> Array:
        """The head of the group that each row belongs to."""
        shape = self.cut.queries * self.heads.rows, lanes
        return lax.broadcasted_iota(jnp.int32, shape, 0) % self.heads.rows // self.heads.queries_per_head

    def _scores(self, i: Count, p: int, u: int) -> Array:
        heads = self.heads
        q = self.mine.q[self._slot(i, p), :, u * heads.rows : (u + 1) * heads.rows, :]
        q = q.reshape(self.cut.queries * heads.rows, heads.q_lanes)
        if heads.dense and heads.heads > 1:
            own = self._row_head(heads.head_dim)
            q = jnp.concatenate([jnp.where(own == j, q, jnp.zeros_like(q)) for j in range(heads.heads)], axis=1)
        parts = []
        for start in range(0, heads.key_lanes, self.tiling.lanes):
            count = min(self.tiling.lanes, heads.key_lanes - start)
            keys = self._lanes(i, p, heads.key_start(u) + start, count)
            parts.append(self._dot(q[:, start : start + count], keys, 1))
        return functools.reduce(operator.add, parts)

    def _weights(
        self, i: Count, pairs: list[tuple[int, int]], scores: list[Callable[[], Array]]
    ) -> list[tuple[Array, Array, Callable[[], Array]]]:
        """Peak, sum and weights of the softmax of each item's groups."""
        masked = []
        for k, (p, u) in enumerate(pairs):
            item = self.walk.item(i, p)
            masked.append(self._keep(k, self._masked(item, u, 0, slice(None), scores[k]())))
        found = [_softmax(score, self._kind) for score in masked]
        return [(peak, mass, lambda weight=weight: weight) for peak, mass, weight in found]

    def _weights_in_a_loop(
        self, i: Count, pairs: list[tuple[int, int]], scores: list[Callable[[], Array]]
    ) -> list[tuple[Array, Array, Callable[[], Array]]]:
        """The same for rows of several queries, which would not fit into registers all at once."""
        own, rows, groups = self.mine.own, self.heads.rows, self.heads.count

        def one(k: Count, _: None) -> None:
            item = self.walk.item(i, k // groups)
            for t in range(self.cut.queries):
                mine = pl.ds(t * rows, rows)
                own["scores"][k, mine, :] = self._masked(item, k % groups, t, mine, own["scores"][k, mine, :])
                peak, mass, weight = _softmax(lambda mine=mine: own["scores"][k, mine, :], self._kind)
                own["weights"][k, mine, :] = weight
                own["peaks"][k, mine, :] = jnp.broadcast_to(peak, (rows, LANES))
                own["masses"][k, mine, :] = jnp.broadcast_to(mass, (rows, LANES))

        lax.fori_loop(0, len(pairs), one, None, unroll=softmaxes_at_once(len(pairs)))
        return [(own["peaks"][k], own["masses"][k], lambda k=k: own["weights"][k]) for k in range(len(pairs))]

    def _masked(self, item: Item, u: Any, t: int, rows: Any, score: Array) -> Array:
        """Scores of query t in base 2; very low where it does not see a token."""
        if self.features.scales:
            score = score * jnp.concatenate([self.scales[0, u, rows, :]] * (score.shape[1] // LANES), axis=1)
        else:
            score = score * self.floats[0]
        if self.features.soft_cap:
            score = jnp.tanh(score) * self.floats[1]
        place = lax.broadcasted_iota(jnp.int32, score.shape, 1)
        count, queries = self.walk.in_chunk(item), self.walk.queries(item.row)
        limit = count - queries + 1 + t
        seen = place < limit
        if self.features.tree:
            bits = self.tree[self.walk.table_row(item.row) * self.cut.queries + t]
            nth = place - (count - queries)
            shown = lax.shift_right_logical(jnp.broadcast_to(bits, nth.shape), jnp.clip(nth, 0, 31)) & 1
            before = self.walk.in_window(nth < 0, place, limit)  # branches of a tree are shorter than they lie
            return jnp.where(before | ((shown == 1) & (place < count)), score, MASKED)
        return jnp.where(self.walk.in_window(seen, place, limit), score, MASKED)

    @property
    def _kind(self) -> Any:
        return jnp.float32 if self.dtype == jnp.float32 else jnp.bfloat16

    def _values(self, i: Count, p: int, u: int, weight: Array) -> Array:
        heads, parts = self.heads, []
        for start in range(0, heads.value_lanes, self.tiling.lanes):
            count = min(self.tiling.lanes, heads.value_lanes - start)
            values = self._lanes(i, p, heads.value_start(u) + start, count)
            parts.append(self._dot(weight, values, 0))
        value = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        if not heads.dense:
            return value
        width = heads.head_dim
        own, picked = self._row_head(width), value[:, :width]
        for j in range(1, heads.heads):
            picked = jnp.where(own == j, value[:, j * width : (j + 1) * width], picked)
        return picked


def softmaxes_at_once(pairs: int) -> int:
    """How many of a trip's softmaxes of several queries a turn of their loop does; two hide each other's latency."""
    return 2 if pairs % 2 == 0 else 1


def _softmax(score: Callable[[], Array], kind: Any) -> tuple[Array, Array, Array]:
    """Peak, sum and weights of a chunk's scores."""
    peak = jnp.max(score(), axis=1, keepdims=True)
    weight = jnp.exp2(score() - peak)
    return peak, jnp.sum(weight, axis=1, keepdims=True), weight.astype(kind)


class _Spread:
    """Puts orders between products, evenly: a share of them after the first half of the products."""

    def __init__(self, orders: list[Callable[[], None]], early: float, half: int):
        self._orders, self._count = list(orders), len(orders)
        self._early, self._half, self._done = early, half, 0

    def after(self, result: Array) -> Array:
        self._done += 1
        share = self._done / self._half * self._early
        if self._done > self._half:
            share = self._early + (self._done / self._half - 1) * (1 - self._early)
        left = self._count - round(self._count * share)
        while len(self._orders) > left:
            self._orders.pop(0)()
        return result

    def rest(self) -> None:
        for order in self._orders:
            order()
