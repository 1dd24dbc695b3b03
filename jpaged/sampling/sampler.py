"""From logits to tokens: one step of sampling for R rows.

It puts the other files of this package together, and skips what no row of the step wants.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.config import GREEDY_BELOW
from jpaged.sampling import logprobs, ranks, weights
from jpaged.sampling.adjust import adjust
from jpaged.sampling.rows import RowLayout, SamplerRows


class Sampled(struct.PyTreeNode):
    """What was sampled for each row; a decode of several steps has one more axis in front.

    Attributes:
      token_R: The token; 0 where `bad_R`.
      bad_R: Rows that cannot be sampled: the best logit is NaN or infinite, or every token is forbidden.
      logprob_R, rank_R, top_ids_RJ, top_logprobs_RJ: As in `logprobs.TokenLogprobs`; zeros throughout if no row of the
        step asked for logprobs.
    """

    token_R: Int32[Array, "*R"]
    bad_R: Bool[Array, "*R"]
    logprob_R: Float32[Array, "*R"]
    rank_R: Int32[Array, "*R"]
    top_ids_RJ: Int32[Array, "*R J"]
    top_logprobs_RJ: Float32[Array, "*R J"]


def blank(layout: RowLayout, shape: tuple[int, ...]) -> Sampled:
    """Zeros in the form of `Sampled`, to be filled in step by step; `shape` takes the place of R."""
    return Sampled(
        token_R=jnp.zeros(shape, jnp.int32),
        bad_R=jnp.zeros(shape, jnp.bool_),
        logprob_R=jnp.zeros(shape, jnp.float32),
        rank_R=jnp.zeros(shape, jnp.int32),
        top_ids_RJ=jnp.zeros((*shape, layout.max_logprobs), jnp.int32),
        top_logprobs_RJ=jnp.zeros((*shape, layout.max_logprobs), jnp.float32),
    )


def sample(
    logits_RV: Float32[Array, "R V"],
    rows: SamplerRows,
    history_RP: Int32[Array, "R P"],
    lengths_R: Int32[Array, " R"],
    *,
    vocab_limit: int,
) -> Sampled:
    """Samples the token at position ``lengths_R[r]`` of each row.

    A row's token depends on its own logits, settings, history and length, and on nothing else of the batch. Its random
    bits come from the key ``fold_in(fold_in(key(seed), stream), position)``, with the number of the round (see
    `weights.draw`) folded in last.

    Args:
      logits_RV: The model's logits for that position.
      rows: The settings of the rows.
      history_RP: Each row's tokens by position, prompt then output.
      lengths_R: Tokens of each row so far.
      vocab_limit: Ids from here on are never sampled; static.
    """
    x_RV = adjust(logits_RV, rows, history_RP, lengths_R, vocab_limit)
    peak_R, best_R = ranks.best(x_RV)
    bad_R = jnp.isinf(peak_R)
    random_R = (rows.temperature_R >= GREEDY_BELOW) & ~bad_R

    def draw() -> Array:
        temperature_R = jnp.where(random_R, rows.temperature_R, 1)
        weights_RV = weights.weigh(x_RV, peak_R, temperature_R, rows.min_p_R)
        weights_RV = weights.keep_top_k(weights_RV, x_RV, rows.top_k_R, random_R)
        target_R = weights.top_p_target(weights_RV, rows.top_p_R)
        return weights.draw(weights_RV, x_RV, target_R, random_R, _random_bits(rows, lengths_R))

    drawn_R = lax.cond(jnp.any(random_R), draw, lambda: best_R)
    token_R = jnp.where(bad_R, 0, jnp.where(random_R, drawn_R, best_R))

    scores = lax.cond(
        jnp.any(rows.logprobs_R >= 0),
        lambda: logprobs.token_logprobs(logits_RV, token_R, rows.max_logprobs),
        lambda: logprobs.blank(token_R.shape[0], rows.max_logprobs),
    )
    return Sampled(token_R, bad_R, scores.logprob_T, scores.rank_T, scores.top_ids_TJ, scores.top_logprobs_TJ)


def is_over(sampled: Sampled, rows: SamplerRows, lengths_R: Int32[Array, " R"]) -> Bool[Array, " R"]:
    """Whether the token sampled for position ``lengths_R[r]`` ends its sequence: a stop id, the limit, a bad row."""
    length_R = lengths_R + 1
    stops_R = jnp.any(sampled.token_R[:, None] == rows.stop_ids_RE, axis=1) & (length_R >= rows.min_len_R)
    return stops_R | (length_R >= rows.limit_R) | sampled.bad_R


def _random_bits(rows: SamplerRows, position_R: Int32[Array, " R"]) -> Callable[[Array], UInt32[Array, " R"]]:
    """Random bits for each row by the number of a round; see `weights.draw`."""

    def key_data(seed_2: Array, stream: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, stream), position))

    keys_R2 = jax.vmap(key_data)(rows.seed_R2, rows.stream_R, position_R)

    def bits(key_2: Array, round_: Array) -> Array:
        key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, round_), (), jnp.uint32)

    return lambda round_: jax.vmap(bits, in_axes=(0, None))(keys_R2, round_)
