"""The order of the vocabulary without sorting it: the best entry, the best few, and where to cut.

Entries rank by value, greatest first, and equal values by index, lowest first. It knows arrays of values and of integer
weights, [R, V]; it does not know what they mean.

A sort of a vocabulary costs more than the sampler may. A cut, the place in the ranking where a sum of weights reaches
a target, needs none: it is found by narrowing a bracket of values, one pass over the row for each guess. The weights
are integers, so every sum is exact and no order of summation can move a cut.

Blocks of 128 entries make the searches short: they look for the block first, then inside it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

BLOCK = 128


def best(x_RV: Float32[Array, "R V"]) -> tuple[Int32[Array, " R"], Float32[Array, " R"]]:
    """The index and value of each row's first entry in rank. A row with a NaN answers with its first NaN."""
    blocks_RCB = _blocks(x_RV, -jnp.inf)
    block_R = jnp.argmax(jnp.max(blocks_RCB, axis=2), axis=1).astype(jnp.int32)
    values_RB = _pick(blocks_RCB, block_R)
    index_R = jnp.argmax(values_RB, axis=1).astype(jnp.int32)
    return block_R * BLOCK + index_R, _pick(values_RB, index_R)


def best_few(x_RV: Float32[Array, "R V"], count: int) -> tuple[Int32[Array, "R count"], Float32[Array, "R count"]]:
    """Indices and values of each row's first `count` entries in rank; V and -inf where it has no more above -inf.

    One pass finds the maximum of each block; then `count` small steps each take the best block's best entry.
    """
    rows, size = x_RV.shape
    blocks_RCB = _blocks(x_RV, -jnp.inf)
    within_1B = lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)

    def take(peaks_RC: Array, last: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        index_R, value_R = last
        block_R = jnp.argmax(peaks_RC, axis=1).astype(jnp.int32)
        values_RB = _pick(blocks_RCB, block_R)
        indices_RB = block_R[:, None] * BLOCK + within_1B
        after_RB = _ranks_after(values_RB, indices_RB, value_R[:, None], index_R[:, None])
        offset_R, value_R = best(jnp.where(after_RB, values_RB, -jnp.inf))
        index_R = block_R * BLOCK + offset_R
        after_RB = _ranks_after(values_RB, indices_RB, value_R[:, None], index_R[:, None])
        peak_R = jnp.max(jnp.where(after_RB, values_RB, -jnp.inf), axis=1)
        return peaks_RC.at[jnp.arange(rows), block_R].set(peak_R), (index_R, value_R)

    def step(carry: tuple, _: None) -> tuple[tuple, tuple[Array, Array]]:
        peaks_RC, taken = take(*carry)
        found = taken[1] > -jnp.inf
        return (peaks_RC, taken), (jnp.where(found, taken[0], size), taken[1])

    before_all = (jnp.full(rows, -1, jnp.int32), jnp.full(rows, jnp.inf, jnp.float32))
    _, (index_JR, value_JR) = lax.scan(step, (jnp.max(blocks_RCB, axis=2), before_all), length=count)
    return index_JR.T, value_JR.T


def rank_of(x_RV: Float32[Array, "R V"], index_R: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """The rank of one entry in each row, counted from 1."""
    value_R = _pick(x_RV, index_R)
    ahead_RV = ~_ranks_after(x_RV, _indices(x_RV), value_R[:, None], index_R[:, None])
    return jnp.sum(ahead_RV.astype(jnp.int32), axis=1)


def first_reaching(weights_RV: Int32[Array, "R V"], need_R: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """The least index i with ``sum(weights[:i + 1]) >= need``, which is never one of weight 0.

    ``1 <= need <= sum(weights)``, and the sum must fit an int32.
    """
    blocks_RCB = _blocks(weights_RV, 0)
    ends_RC = jnp.cumsum(jnp.sum(blocks_RCB, axis=2), axis=1)
    before_R = jnp.sum((ends_RC < need_R[:, None]).astype(jnp.int32), axis=1)
    block_R = jnp.minimum(before_R, ends_RC.shape[1] - 1)  # a need out of range stays inside the array
    weights_RB = _pick(blocks_RCB, block_R)
    rest_R = need_R - (_pick(ends_RC, block_R) - jnp.sum(weights_RB, axis=1))
    within_R = jnp.sum((jnp.cumsum(weights_RB, axis=1) < rest_R[:, None]).astype(jnp.int32), axis=1)
    return jnp.minimum(block_R * BLOCK + within_R, weights_RV.shape[1] - 1)


def keep_first(
    x_RV: Float32[Array, "R V"],
    weights_RV: Int32[Array, "R V"],
    target_R: Int32[Array, " R"],
    wanted_R: Bool[Array, " R"],
) -> Bool[Array, "R V"]:
    """Marks the entries of each row before which, in rank, less than `target` of weight stands.

    Args:
      x_RV: The values that entries rank by; no NaN in a row that is wanted.
      weights_RV: The weight of each, at least 0, with a sum that fits an int32.
      target_R: From 1 to the row's sum.
      wanted_R: Rows to cut; the others are marked throughout.

    Returns:
      The marks. An entry of weight 0 may be marked or not.
    """
    value_R, above_R = jax.vmap(_boundary)(x_RV, weights_RV, target_R, wanted_R)
    # Of the entries that share the boundary value, the first few by index make up what is missing above it.
    ties_RV = x_RV == value_R[:, None]
    last_R = first_reaching(jnp.where(ties_RV, weights_RV, 0), target_R - above_R)
    return ~_ranks_after(x_RV, _indices(x_RV), value_R[:, None], last_R[:, None]) | ~wanted_R[:, None]


def _boundary(
    x_V: Float32[Array, " V"], weights_V: Int32[Array, " V"], target: Int32[Array, ""], wanted: Bool[Array, ""]
) -> tuple[Float32[Array, ""], Int32[Array, ""]]:
    """The value of the last kept entry, and the weight that stands strictly above that value.

    With A(v) the weight of the entries above v, the boundary is the least value of an entry with A(v) < target. The
    bracket holds ``A(high) < target <= A(low)``. Guesses move its ends; then the ends snap to entries: `high` down to
    an entry, and `least` to the first entry above `low`. When these two meet, the boundary is found.

    Guesses by interpolation and by halving the values suit logits, which are spread out evenly near the boundary;
    halving the floats' bit patterns bounds the number of guesses, whatever the values are.
    """

    def guess(bracket: _Bracket, value: Array) -> _Bracket:
        low, least, high, below, above = bracket
        # Whatever rounding makes of a guess, least <= guess < high, so that each one makes progress.
        value = jnp.where(value < high, jnp.maximum(value, least), least)
        weight = jnp.sum(jnp.where(x_V > value, weights_V, 0))
        lower = weight < target
        return (
            jnp.where(lower, low, value),
            jnp.where(lower, least, jnp.maximum(least, value)),
            jnp.where(lower, value, high),
            jnp.where(lower, below, weight),
            jnp.where(lower, weight, above),
        )

    def narrow(bracket: _Bracket) -> _Bracket:
        bracket = guess(bracket, _interpolated(bracket, target))
        bracket = guess(bracket, _halfway(bracket))
        bracket = guess(bracket, _halfway(bracket))
        low, _, high, below, above = guess(bracket, _halfway_in_bits(bracket))
        least = jnp.min(jnp.where(x_V > low, x_V, jnp.inf))
        high = jnp.max(jnp.where(x_V > high, -jnp.inf, x_V))
        return low, least, high, below, above

    high = jnp.max(x_V)
    least = jnp.where(wanted, jnp.min(jnp.where(weights_V > 0, x_V, jnp.inf)), high)
    start = (jnp.float32(-jnp.inf), least, high, jnp.sum(weights_V), jnp.int32(0))
    _, _, value, _, above = lax.while_loop(lambda bracket: bracket[1] < bracket[2], narrow, start)
    return value, above


_Bracket = tuple[Array, Array, Array, Array, Array]  # low, least, high, A(low), A(high)


def _interpolated(bracket: _Bracket, target: Array) -> Array:
    _, least, high, below, above = bracket
    share = (target - above).astype(jnp.float32) / (below - above).astype(jnp.float32)
    return high - (high - least) * jnp.clip(share, 0.02, 0.98)


def _halfway(bracket: _Bracket) -> Array:
    return 0.5 * bracket[1] + 0.5 * bracket[2]


def _halfway_in_bits(bracket: _Bracket) -> Array:
    low, high = _ordered_bits(bracket[1]), _ordered_bits(bracket[2])
    return lax.bitcast_convert_type(_flip((low & high) + ((low ^ high) >> 1)), jnp.float32)  # a mean without overflow


def _ordered_bits(x: Array) -> Array:
    """Integers in the order of the floats whose bits they are made of."""
    return _flip(lax.bitcast_convert_type(x, jnp.int32))


def _flip(bits: Array) -> Array:
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _ranks_after(x: Array, index: Array, than_x: Array, than_index: Array) -> Array:
    return (x < than_x) | ((x == than_x) & (index > than_index))


def _indices(x_RV: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, (1, x_RV.shape[1]), 1)


def _blocks(x_RV: Array, fill: float) -> Array:
    """[R, V] as [R, C, BLOCK]; the last block is filled up."""
    rows, size = x_RV.shape
    if short := -size % BLOCK:
        x_RV = jnp.pad(x_RV, ((0, 0), (0, short)), constant_values=fill)
    return x_RV.reshape(rows, -1, BLOCK)


def _pick(x_RN: Array, index_R: Array) -> Array:
    """One entry of each row: ``x[r, index[r]]``."""
    return x_RN[jnp.arange(x_RN.shape[0]), index_R]
