"""The order of the vocabulary without sorting it: the best entry, the best few, and what stands before an entry.

Entries rank by value, greatest first, and equal values by index, lowest first. It knows arrays of values and of integer
weights, [R, V]; it does not know what they mean. A sort of a vocabulary costs more than the sampler may.

Blocks of 128 entries make the searches short: they look for the block first, then inside it. Here C counts blocks and B
the entries of one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

BLOCK = 128

# Up to here `kth` finds entry after entry; beyond, its 32 passes over all of them are quicker.
MOST_STEPS = 256


class Place(NamedTuple):
    """An entry of each row, as far as its rank needs it."""

    value_R: Float32[Array, " R"]
    index_R: Int32[Array, " R"]


def best(x_RV: Float32[Array, "R V"]) -> Place:
    """Each row's first entry in rank. A row with a NaN answers with +inf and some index."""
    blocks_RCB = _blocks(x_RV, -jnp.inf)
    # Not every backend's maximum of a NaN and a number is NaN.
    peak = _first_greatest(jnp.max(jnp.where(jnp.isnan(blocks_RCB), jnp.inf, blocks_RCB), axis=2))
    within = _first_greatest(_pick(blocks_RCB, peak.index_R))
    return Place(peak.value_R, peak.index_R * BLOCK + within.index_R)


def best_few(x_RV: Float32[Array, "R V"], count: int) -> tuple[Int32[Array, "R count"], Float32[Array, "R count"]]:
    """Indices and values of each row's first `count` entries in rank; V and -inf where it has no more above -inf."""
    blocks_RCB = _blocks(x_RV, -jnp.inf)

    def step(carry: tuple[Array, Place], _: None) -> tuple[tuple[Array, Place], tuple[Array, Array]]:
        peaks_RC, place = _next(blocks_RCB, *carry)
        found = place.value_R > -jnp.inf
        return (peaks_RC, place), (jnp.where(found, place.index_R, x_RV.shape[1]), place.value_R)

    _, (index_JR, value_JR) = lax.scan(step, _start(blocks_RCB), length=count)
    return index_JR.T, value_JR.T


def kth(x_RV: Float32[Array, "R V"], k_R: Int32[Array, " R"]) -> Place:
    """Each row's k-th entry in rank, for k from 1 to the number of its entries above -inf."""
    return lax.cond(jnp.max(k_R) <= MOST_STEPS, _kth_by_steps, _kth_by_halving, x_RV, k_R)


def weight_before(x_RV: Float32[Array, "R V"], weights_RV: Int32[Array, "R V"], place: Place) -> Int32[Array, " R"]:
    """The sum of the weights of the entries that rank before a place."""
    return jnp.sum(jnp.where(before(x_RV, place), weights_RV, 0), axis=1, dtype=jnp.int32)


def before(x_RV: Float32[Array, "R V"], place: Place) -> Array:
    """Marks the entries of each row that rank before a place."""
    index_1V = lax.broadcasted_iota(jnp.int32, (1, x_RV.shape[1]), 1)
    value_R1, place_R1 = place.value_R[:, None], place.index_R[:, None]
    return (x_RV > value_R1) | ((x_RV == value_R1) & (index_1V < place_R1))


def first_reaching(weights_RV: Int32[Array, "R V"], need_R: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """The least index i with ``sum(weights[:i + 1]) >= need``, which is never one of weight 0.

    ``1 <= need <= sum(weights)``, and the sum must fit an int32.
    """
    blocks_RCB = _blocks(weights_RV, 0)
    ends_RC = jnp.cumsum(jnp.sum(blocks_RCB, axis=2, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    before_R = jnp.sum(ends_RC < need_R[:, None], axis=1, dtype=jnp.int32)
    block_R = jnp.minimum(before_R, ends_RC.shape[1] - 1)  # a need out of range stays inside the array
    weights_RB = _pick(blocks_RCB, block_R)
    rest_R = need_R - (_pick(ends_RC, block_R) - jnp.sum(weights_RB, axis=1, dtype=jnp.int32))
    within_R = jnp.sum(jnp.cumsum(weights_RB, axis=1, dtype=jnp.int32) < rest_R[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(block_R * BLOCK + within_R, weights_RV.shape[1] - 1)


def at(x_RV: Float32[Array, "R V"], index_R: Int32[Array, " R"]) -> Place:
    """The place of the entry with an index."""
    return Place(_pick(x_RV, index_R), index_R)


def _kth_by_steps(x_RV: Float32[Array, "R V"], k_R: Int32[Array, " R"]) -> Place:
    blocks_RCB = _blocks(x_RV, -jnp.inf)

    def step(i: Array, carry: tuple[Array, Place]) -> tuple[Array, Place]:
        peaks_RC, place = _next(blocks_RCB, *carry)
        return peaks_RC, _where(i < k_R, place, carry[1])

    return lax.fori_loop(0, jnp.max(k_R), step, _start(blocks_RCB))[1]


def _kth_by_halving(x_RV: Float32[Array, "R V"], k_R: Int32[Array, " R"]) -> Place:
    """Halves the interval of floats, by their bit patterns in order, until it holds the k-th value alone.

    With A(v) the number of entries above v, ``A(high) < k <= A(low)`` throughout.
    """

    def halve(_: Array, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        low_R, high_R = interval
        middle_R = (low_R & high_R) + ((low_R ^ high_R) >> 1)  # the mean, rounded down, without overflow
        value_R1 = lax.bitcast_convert_type(_flip(middle_R), jnp.float32)[:, None]
        few_R = jnp.sum(x_RV > value_R1, axis=1, dtype=jnp.int32) < k_R
        return jnp.where(few_R, low_R, middle_R), jnp.where(few_R, middle_R, high_R)

    low_R, high_R = (
        _flip(lax.bitcast_convert_type(jnp.full(k_R.shape, v, jnp.float32), jnp.int32)) for v in (-jnp.inf, jnp.inf)
    )
    _, high_R = lax.fori_loop(0, 32, halve, (low_R, high_R))
    value_R = lax.bitcast_convert_type(_flip(high_R), jnp.float32)
    # Of the entries with that value, the first few by index make up what is missing above it.
    above_R = jnp.sum(x_RV > value_R[:, None], axis=1, dtype=jnp.int32)
    index_R = first_reaching((x_RV == value_R[:, None]).astype(jnp.int32), k_R - above_R)
    return at(x_RV, index_R)


def _flip(bits: Array) -> Array:
    """Between the bits of a float and an integer that orders as the floats do; its own inverse."""
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _start(blocks_RCB: Array) -> tuple[Array, Place]:
    """Where `_next` starts: the greatest value of each block, and a place before all entries."""
    rows = blocks_RCB.shape[0]
    nowhere = Place(jnp.full(rows, jnp.inf, jnp.float32), jnp.full(rows, -1, jnp.int32))
    return jnp.max(blocks_RCB, axis=2), nowhere


def _next(blocks_RCB: Array, peaks_RC: Array, last: Place) -> tuple[Array, Place]:
    """The entry that follows `last` in rank, given the greatest value of each block among those that follow it.

    A step costs one look at the peaks and one at a block, whatever V is.
    """
    peak = _first_greatest(peaks_RC)
    block_R = peak.index_R
    values_RB = _pick(blocks_RCB, block_R)
    indices_RB = block_R[:, None] * BLOCK + lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)

    def following(place: Place) -> Array:
        value_R1, index_R1 = place.value_R[:, None], place.index_R[:, None]
        after_RB = (values_RB < value_R1) | ((values_RB == value_R1) & (indices_RB > index_R1))
        return jnp.where(after_RB, values_RB, -jnp.inf)

    place = Place(peak.value_R, block_R * BLOCK + _first_greatest(following(last)).index_R)
    rest_R = jnp.max(following(place), axis=1)
    taken_from_RC = lax.broadcasted_iota(jnp.int32, peaks_RC.shape, 1) == block_R[:, None]
    return jnp.where(taken_from_RC, rest_R[:, None], peaks_RC), place


def _first_greatest(x_RN: Array) -> Place:
    """As `best`, in one look: for short rows."""
    value_R = jnp.max(x_RN, axis=1)
    index_RN = lax.broadcasted_iota(jnp.int32, x_RN.shape, 1)
    index_R = jnp.min(jnp.where(x_RN == value_R[:, None], index_RN, x_RN.shape[1] - 1), axis=1)  # NaN equals nothing
    return Place(value_R, index_R)


def _where(mask_R: Array, yes: Place, no: Place) -> Place:
    return Place(jnp.where(mask_R, yes.value_R, no.value_R), jnp.where(mask_R, yes.index_R, no.index_R))


def _blocks(x_RV: Array, fill: float) -> Array:
    """[R, V] as [R, C, BLOCK]; the last block is filled up."""
    rows, size = x_RV.shape
    if short := -size % BLOCK:
        x_RV = jnp.pad(x_RV, ((0, 0), (0, short)), constant_values=fill)
    return x_RV.reshape(rows, -1, BLOCK)


def _pick(x_RN: Array, index_R: Array) -> Array:
    """One entry of each row: ``x[r, index[r]]``."""
    return x_RN[jnp.arange(x_RN.shape[0], dtype=jnp.int32), index_R]
