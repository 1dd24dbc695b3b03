"""Rows with few queries: decode, and speculative tokens.

A trip's products, softmax and merge are one basic block, which the compiler can fill. Its order is the product's: all
QKᵀ, all softmax, all PV, over P chunks times the head groups, so that the matrix unit does not wait for one softmax.
Where that would take more registers than there are, a loop does some head groups a turn (`Tiling.groups`). Softmax is
in base 2 and merged as in Flash-Decoding; see Milakov & Gimelshein 2018, section 3.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.tpu.trips import MASKED, Settings, Trips
from pallas_kernels.tpu.walk import Count, Item
from pallas_kernels.tpu.words import LANES

Pairs: TypeAlias = list[tuple[Any, Any]]  # of an item of the trip and a head group


class Weights(NamedTuple):
    """Of a softmax over a chunk, each row's peak and sum, and where its weights are."""

    peak: Array
    mass: Array
    weights: Callable[[], Array]


class Decode(Trips):
    """Rows of few queries."""

    @staticmethod
    def scratch(settings: Settings) -> dict[str, Any]:
        heads, _, cut, tiling, *_ = settings
        count, height = tiling.items * heads.count // tiling.turns(heads.count), cut.queries * heads.rows
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

    def _attend(self, i: Count) -> None:
        groups, count, later = self.tiling.groups, self.heads.count, i + self.ahead
        turns = self.tiling.turns(count)
        if turns == 1:
            pairs: Pairs = [(p, u) for p in range(self.cut.items) for u in range(count)]
            self._turn(i, pairs, _Spread(self._orders(later), self.tiling.early, len(pairs)))
            return
        each, orders = count // groups, self._orders_in_turns(later, turns)

        def turn(n: Count, _: None) -> None:
            p, first = n // each, n % each * groups
            pairs = [(p, first + u) for u in range(groups)]
            self._turn(i, pairs, _Spread(orders(n), self.tiling.early, len(pairs)))

        lax.fori_loop(0, turns, turn, None)

    def _turn(self, i: Count, pairs: Pairs, spread: _Spread) -> None:
        """What one basic block does: some items' head groups, each item's being the same ones in the same order."""
        scores = [self._keep(k, spread.after(self._scores(i, p, u))) for k, (p, u) in enumerate(pairs)]
        weigh = self._weights if self.cut.queries == 1 else self._weights_of_queries
        weights = weigh(i, pairs, scores)
        values = [spread.after(self._values(i, p, u, w.weights())) for (p, u), w in zip(pairs, weights, strict=True)]
        spread.rest()
        mine, groups = self.mine, [u for _, u in pairs[: self.tiling.groups or self.heads.count]]
        top, total, held = ([ref[u] for u in groups] for ref in (mine.top, mine.total, mine.sum))
        for k, ((p, u), (peak, mass, _), value) in enumerate(zip(pairs, weights, values, strict=True)):
            g, first = k % len(groups), self.walk.is_first(self.walk.item(i, p))
            before = jnp.where(first, self.sinks[u] if self.features.sinks else MASKED, top[g])
            now = jnp.maximum(before, peak)
            old, fresh = jnp.exp2(before - now), jnp.exp2(peak - now)
            total[g] = jnp.where(first, float(self.features.sinks), total[g]) * old + mass * fresh
            held[g] = jnp.where(first, 0.0, held[g]) * self._wide(old) + value * self._wide(fresh)
            top[g] = now
            out = held[g] * self._wide(1 / (total[g]))
            if self.features.scales:
                out = out * self._wide(self.scales[1, u])
            out = out.reshape(self.cut.queries, self.heads.rows, self.heads.out_lanes)
            mine.out[(i & 1) * self.cut.items + p, :, u] = out.astype(mine.out.dtype)
        for g, u in enumerate(groups):
            mine.top[u], mine.total[u], mine.sum[u] = top[g], total[g], held[g]

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

    def _scores(self, i: Count, p: Any, u: Any) -> Array:
        heads = self.heads
        q = self.mine.q[self._slot(i, p), :, u]
        q = q.reshape(self.cut.queries * heads.rows, heads.q_lanes)
        if heads.dense and heads.heads > 1:
            own = self._row_head(heads.head_dim)
            q = jnp.concatenate([jnp.where(own == j, q, jnp.zeros_like(q)) for j in range(heads.heads)], axis=1)
        parts = []
        for start in range(0, heads.key_lanes, self.tiling.lanes):
            count = min(self.tiling.lanes, heads.key_lanes - start)
            keys = self._lanes(i, p, self._start(0, u) + start, count)
            parts.append(self._dot(q[:, start : start + count], keys, 1))
        return functools.reduce(operator.add, parts)

    def _weights(self, i: Count, pairs: Pairs, scores: list[Callable[[], Array]]) -> list[Weights]:
        """Of each pair."""
        masked = []
        for k, (p, u) in enumerate(pairs):
            item = self.walk.item(i, p)
            masked.append(self._keep(k, self._masked(item, u, 0, slice(None), scores[k]())))
        found = [_softmax(score, self._kind) for score in masked]
        return [Weights(peak, mass, lambda weight=weight: weight) for peak, mass, weight in found]

    def _weights_of_queries(self, i: Count, pairs: Pairs, scores: list[Callable[[], Array]]) -> list[Weights]:
        """The same for rows of several queries, in a loop: all at once they would not fit into registers."""
        (p, u), own, rows, count = pairs[0], self.mine.own, self.heads.rows, self.heads.count

        def one(k: Count, _: None) -> None:
            nth = u + k
            item = self.walk.item(i, p + nth // count)
            for t in range(self.cut.queries):
                mine = pl.ds(t * rows, rows)
                own["scores"][k, mine, :] = self._masked(item, nth % count, t, mine, own["scores"][k, mine, :])
                peak, mass, weight = _softmax(lambda mine=mine: own["scores"][k, mine, :], self._kind)
                own["weights"][k, mine, :] = weight
                own["peaks"][k, mine, :] = jnp.broadcast_to(peak, (rows, LANES))
                own["masses"][k, mine, :] = jnp.broadcast_to(mass, (rows, LANES))

        lax.fori_loop(0, len(pairs), one, None, unroll=softmaxes_at_once(len(pairs)))
        weights = [lambda k=k: own["weights"][k] for k in range(len(pairs))]
        return [Weights(own["peaks"][k], own["masses"][k], weight) for k, weight in enumerate(weights)]

    def _masked(self, item: Item, u: Any, t: int, rows: Any, score: Array) -> Array:
        """Scores of query t in base 2; very low where it does not see a token."""
        if self.features.scales:
            score = score * jnp.concatenate([self.scales[0, u, rows, :]] * (score.shape[1] // LANES), axis=1)
        else:
            score = score * self.floats[0]
        if self.features.soft_cap:
            score = jnp.tanh(score) * self.floats[1]
        place, starts = self._places(score.shape[0])
        seen = [self._seen(item, t, place, start) for start in starts]
        pieces = [score[:, n * LANES : (n + 1) * LANES] for n in range(len(starts))]
        return jnp.concatenate([jnp.where(*pair, MASKED) for pair in zip(seen, pieces, strict=True)], axis=1)

    def _seen(self, item: Item, t: int, place: Array, start: int) -> Array:
        """Whether query t sees the tokens at ``start + place`` of the chunk."""
        count, queries = self.walk.in_chunk(item) - start, self.walk.queries(item.row)
        limit = count - queries + 1 + t
        if not self.features.tree:
            return self.walk.in_window(place < limit, place, limit)
        bits = self.tree[self.walk.table_row(item.row) * self.cut.queries + t]
        nth = place - (count - queries)
        shown = lax.shift_right_logical(jnp.broadcast_to(bits, nth.shape), jnp.clip(nth, 0, 31)) & 1
        before = self.walk.in_window(nth < 0, place, limit)  # branches of a tree are shorter than they lie
        return before | ((shown == 1) & (place < count))

    @property
    def _kind(self) -> Any:
        return jnp.float32 if self.dtype == jnp.float32 else jnp.bfloat16

    def _values(self, i: Count, p: Any, u: Any, weight: Array) -> Array:
        heads, parts = self.heads, []
        for start in range(0, heads.value_lanes, self.tiling.lanes):
            count = min(self.tiling.lanes, heads.value_lanes - start)
            values = self._lanes(i, p, self._start(heads.values_begin, u) + start, count)
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
    """How many of a turn's softmaxes of several queries a turn of their loop does; two hide each other's latency."""
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
