"""The distribution to draw from: softmax at a temperature, cut by min-p, top-k and top-p, as integer weights.

It knows logits and cuts. It does not know penalties (they have changed the logits before), nor random numbers' keys.

Probabilities are integers that add up to about 2**30: sums are exact, so that the mass of a set of tokens does not
depend on the order of summation, on the rows beside it or on how many devices share the work, and a draw can not land
beside a token. A token with a probability under 2**-31 gets weight 0 and is never drawn.

The cuts follow vLLM's order (vllm/v1/sample/sampler.py): min-p, then top-k, then top-p of what top-k left. They differ
from it in one thing: they cut by rank (see `ranks`), so that top_k=5 keeps five tokens whatever is tied.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.sampling import ranks
from jpaged.sampling.rows import SamplerRows

LOG2_SUM = 30  # a sum is less than 2**30 and what rounding adds, half a unit for each entry: it fits an int32

# How much rounding may move a probability or a sum of them. A cut that stands exactly at its limit, such as top_p=0.3
# over ten equal tokens, must fall on the same side for every way to round 0.3 and 1/10.
SLACK = 2.0**-20


def weigh(
    x_RV: Float32[Array, "R V"],
    peak_R: Float32[Array, " R"],
    temperature_R: Float32[Array, " R"],
    min_p_R: Float32[Array, " R"],
) -> Int32[Array, "R V"]:
    """softmax(x / temperature) as integers, without the tokens that are less than min_p times as likely as the best.

    `peak_R` is the row's maximum. A token exactly min_p times as likely stays.
    """
    relative_RV = jnp.exp((x_RV - peak_R[:, None]) / temperature_R[:, None])
    total_R = jnp.maximum(jnp.sum(relative_RV, axis=1), 1)  # at least the best token's own 1
    # total is in [2**e, 2**(e+1)): scale by the power of two that brings it just under 2**LOG2_SUM. Multiplying by a
    # power of two is exact, and the last bits of `total` do not matter.
    exponent_R = lax.bitcast_convert_type(total_R, jnp.int32) >> 23
    scale_R = lax.bitcast_convert_type((127 + LOG2_SUM - 1 + 127 - exponent_R) << 23, jnp.float32)
    weights_RV = (relative_RV * scale_R[:, None] + 0.5).astype(jnp.int32)
    return jnp.where(relative_RV >= min_p_R[:, None] * (1 - SLACK), weights_RV, 0)


def cut(
    weights_RV: Int32[Array, "R V"], x_RV: Float32[Array, "R V"], rows: SamplerRows, active_R: Bool[Array, " R"]
) -> Int32[Array, "R V"]:
    """The weights with 0 for the tokens that top-k and top-p leave out.

    Tokens rank by `x_RV`, their logits, from which the temperature takes nothing: tokens whose probabilities it made
    equal are not ties. With weight before(i) of the tokens that rank before i, among those that top-k left,

    * top-k keeps i if it ranks among the first k;
    * top-p keeps i if ``before(i) < (top_p - SLACK) * total``, and always the first.

    A cut runs only if one of the `active_R` rows asks for it.
    """
    by_k_R = active_R & (rows.top_k_R > 0) & (rows.top_k_R < x_RV.shape[1])
    by_p_R = active_R & (rows.top_p_R < 1)

    def top_k(weights_RV: Array) -> Array:
        counts_RV = (weights_RV > 0).astype(jnp.int32)
        target_R = jnp.minimum(rows.top_k_R, jnp.sum(counts_RV, axis=1))
        return jnp.where(ranks.keep_first(x_RV, counts_RV, target_R, by_k_R), weights_RV, 0)

    def top_p(weights_RV: Array) -> Array:
        total_R = jnp.sum(weights_RV, axis=1)
        target_R = jnp.ceil(total_R.astype(jnp.float32) * (rows.top_p_R - SLACK)).astype(jnp.int32)
        target_R = jnp.clip(target_R, 1, total_R)
        return jnp.where(ranks.keep_first(x_RV, weights_RV, target_R, by_p_R), weights_RV, 0)

    weights_RV = lax.cond(jnp.any(by_k_R), top_k, lambda same: same, weights_RV)
    return lax.cond(jnp.any(by_p_R), top_p, lambda same: same, weights_RV)


def draw(weights_RV: Int32[Array, "R V"], bits_R: UInt32[Array, " R"]) -> Int32[Array, " R"]:
    """One token a row, in proportion to its weight: the inverse of the cumulative sum at bits / 2**32.

    Never a token of weight 0, unless all of a row's are.
    """
    total_R = jnp.sum(weights_RV, axis=1)
    return ranks.first_reaching(weights_RV, _scaled(bits_R, total_R) + 1)


def _scaled(bits: UInt32[Array, " R"], total: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """``bits * total >> 32``, which is in [0, total), by halves of words: the product has no type of its own."""
    high, low = bits >> 16, bits & jnp.uint32(0xFFFF)
    factor = total.astype(jnp.uint32)
    factor_high, factor_low = factor >> 16, factor & jnp.uint32(0xFFFF)
    middle = high * factor_low + (low * factor_low >> 16)
    carry = low * factor_high + (middle & jnp.uint32(0xFFFF))
    return (high * factor_high + (middle >> 16) + (carry >> 16)).astype(jnp.int32)
