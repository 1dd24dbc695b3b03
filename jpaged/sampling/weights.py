"""The distribution to draw from, and the draw: softmax at a temperature, cut by min-p, top-k and top-p.

It knows logits and cuts. It does not know penalties (they have changed the logits before), nor seeds.

Probabilities are integers that add up to about 2**30: sums are exact, so that the mass of a set of tokens does not
depend on the order of summation, on the rows beside it or on how many devices share the work, and a draw can not land
beside a token. A token with a probability under 2**-31 has weight 0 and is never drawn.

The cuts follow vLLM's order (vllm/v1/sample/sampler.py): min-p, then top-k, then top-p of what top-k left. They differ
from it in one thing: they cut by rank (see `ranks`), so that top_k=5 keeps five tokens whatever is tied. Tokens rank by
their logits, from which the temperature takes nothing: those whose probabilities it made equal are not ties.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.sampling import ranks
from jpaged.sampling.ranks import Place

LOG2_SUM = 30  # a sum is less than 2**30 and what rounding adds, half a unit for each token: it fits an int32

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
    # At 1e30 all weights are equal already. Far beyond, a compiler that multiplies by the reciprocal multiplies by 0.
    relative_RV = jnp.exp((x_RV - peak_R[:, None]) / jnp.minimum(temperature_R, 1e30)[:, None])
    total_R = jnp.maximum(jnp.sum(relative_RV, axis=1), 1)  # at least the best token's own 1
    # Scale by the power of two that brings the total into the octave below 2**LOG2_SUM: multiplying so is exact, and
    # the last bits of the total do not matter. In the bits of a float, 1 has exponent 127.
    exponent_R = (lax.bitcast_convert_type(total_R, jnp.int32) >> 23) - 127
    scale_R = lax.bitcast_convert_type((127 + LOG2_SUM - 1 - exponent_R) << 23, jnp.float32)
    weights_RV = (relative_RV * scale_R[:, None] + 0.5).astype(jnp.int32)
    return jnp.where(relative_RV >= min_p_R[:, None] * (1 - SLACK), weights_RV, 0)


def keep_top_k(
    weights_RV: Int32[Array, "R V"],
    x_RV: Float32[Array, "R V"],
    top_k_R: Int32[Array, " R"],
    active_R: Bool[Array, " R"],
) -> Int32[Array, "R V"]:
    """The weights, with 0 for all but the first k in rank; k = 0, and a row that is not active, keeps all."""
    wanted_R = active_R & (top_k_R > 0) & (top_k_R < x_RV.shape[1])

    def cut(weights_RV: Array) -> Array:
        # A token of weight 0 may count among the k or not: it is never drawn. All that weigh anything is enough.
        heavy_R = jnp.sum(weights_RV > 0, axis=1, dtype=jnp.int32)
        last = ranks.kth(x_RV, jnp.where(wanted_R, jnp.minimum(top_k_R, heavy_R), 1))
        after_last = Place(last.value_R, last.index_R + 1)
        return jnp.where(ranks.before(x_RV, after_last) | ~wanted_R[:, None], weights_RV, 0)

    return lax.cond(jnp.any(wanted_R), cut, lambda same: same, weights_RV)


def top_p_target(weights_RV: Int32[Array, "R V"], top_p_R: Float32[Array, " R"]) -> Int32[Array, " R"]:
    """How much weight may stand before a token that top-p keeps: less than this.

    It is ``(top_p - SLACK) * total``, but at least 1, so that the first token stays, and all there is for top_p = 1.
    """
    total_R = jnp.sum(weights_RV, axis=1, dtype=jnp.int32)
    target_R = jnp.ceil(total_R.astype(jnp.float32) * (top_p_R - SLACK)).astype(jnp.int32)
    return jnp.where(top_p_R < 1, jnp.clip(target_R, 1, total_R), total_R)


def draw(
    weights_RV: Int32[Array, "R V"],
    x_RV: Float32[Array, "R V"],
    target_R: Int32[Array, " R"],
    active_R: Bool[Array, " R"],
    bits_of: Callable[[Array], UInt32[Array, " R"]],
) -> Int32[Array, " R"]:
    """One token a row, in proportion to its weight, among those before which less than the target stands in rank.

    Draws from all tokens until one is among them. A token that is not is also a bound: all that rank behind it are out,
    so the next draw is from those that rank before it. That leaves the distribution as it would be, needs no threshold
    to be searched for, and takes two passes a round. A first draw is accepted with a probability of at least top_p;
    later rounds halve what can be rejected, on average.
    (The idea of a shrinking support is FlashInfer's, https://flashinfer.ai/2025/03/10/sampling.html.)

    Args:
      weights_RV: At least 0; an active row has a token that weighs something.
      x_RV: What tokens rank by.
      target_R: From 1 to the row's total.
      active_R: The other rows are answered with anything.
      bits_of: Random bits for each row, given the number of the round.
    """

    def again(carry: tuple[Array, Array, Array, Place, Array]) -> Array:
        return jnp.any(~carry[1])

    def attempt(carry: tuple[Array, Array, Array, Place, Array]) -> tuple[Array, Array, Array, Place, Array]:
        round_, done_R, token_R, bound, mass_R = carry
        inside_RV = jnp.where(ranks.before(x_RV, bound), weights_RV, 0)
        drawn_R = ranks.first_reaching(inside_RV, scaled(bits_of(round_), mass_R) + 1)
        token_R = jnp.where(done_R, token_R, drawn_R)
        bound = ranks.at(x_RV, token_R)
        before_R = ranks.weight_before(x_RV, weights_RV, bound)
        # Each rejection takes weight away. Where none does, no token weighs anything: settings out of range end here.
        done_R = done_R | (before_R < target_R) | (before_R >= mass_R)
        return round_ + 1, done_R, token_R, bound, before_R

    everything = Place(jnp.full_like(x_RV[:, 0], -jnp.inf), jnp.full_like(target_R, x_RV.shape[1]))
    start = (
        jnp.int32(0),
        ~active_R,
        jnp.zeros_like(target_R),
        everything,
        jnp.sum(weights_RV, axis=1, dtype=jnp.int32),
    )
    return lax.while_loop(again, attempt, start)[2]


def scaled(bits_R: UInt32[Array, " R"], total_R: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """``bits * total >> 32``, which is in [0, total), by halves of words: the product has no type of its own."""
    high_R, low_R = bits_R >> 16, bits_R & jnp.uint32(0xFFFF)
    total_R = total_R.astype(jnp.uint32)
    total_high_R, total_low_R = total_R >> 16, total_R & jnp.uint32(0xFFFF)
    middle_R = high_R * total_low_R + (low_R * total_low_R >> 16)
    carry_R = low_R * total_high_R + (middle_R & jnp.uint32(0xFFFF))
    return (high_R * total_high_R + (middle_R >> 16) + (carry_R >> 16)).astype(jnp.int32)
