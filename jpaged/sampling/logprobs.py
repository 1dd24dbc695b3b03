"""Log-probabilities of tokens and of their best alternatives, by the model alone.

They are the log-softmax of the logits as the model gave them, over the whole vocabulary: no temperature, penalty or
cut has a part in them (vLLM's "raw_logprobs").
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jpaged.config import NO_TOKEN
from jpaged.sampling import ranks
from jpaged.sampling.rows import RowLayout

CHUNK = 64  # prompt tokens whose logits, [CHUNK, V], are in memory at once


class TokenLogprobs(struct.PyTreeNode):
    """Of each of T tokens: how likely it was, and what was likelier.

    Attributes:
      logprob_T: Of the token, in nats.
      rank_T: Its place among all tokens, from 1; equals rank by id.
      top_ids_TJ: The most likely tokens, best first; NO_TOKEN where there are fewer.
      top_logprobs_TJ: Theirs; -inf where there are fewer.
    """

    logprob_T: Float32[Array, " T"]
    rank_T: Int32[Array, " T"]
    top_ids_TJ: Int32[Array, "T J"]
    top_logprobs_TJ: Float32[Array, "T J"]


def blank(num_tokens: int, width: int) -> TokenLogprobs:
    """What stands for logprobs that nobody asked for: zeros."""
    return TokenLogprobs(
        logprob_T=jnp.zeros(num_tokens, jnp.float32),
        rank_T=jnp.zeros(num_tokens, jnp.int32),
        top_ids_TJ=jnp.zeros((num_tokens, width), jnp.int32),
        top_logprobs_TJ=jnp.zeros((num_tokens, width), jnp.float32),
    )


def token_logprobs(logits_TV: Float32[Array, "T V"], tokens_T: Int32[Array, " T"], width: int) -> TokenLogprobs:
    """The logprobs of `tokens_T` and of the `width` most likely tokens beside each."""
    size = logits_TV.shape[1]
    peak_T = jnp.max(logits_TV, axis=1)
    log_sum_T = peak_T + jnp.log(jnp.sum(jnp.exp(logits_TV - peak_T[:, None]), axis=1))
    ids_TJ, values_TJ = ranks.best_few(logits_TV, width)
    place = ranks.at(logits_TV, tokens_T)
    return TokenLogprobs(
        logprob_T=place.value_R - log_sum_T,
        rank_T=1 + jnp.sum(ranks.before(logits_TV, place), axis=1, dtype=jnp.int32),
        top_ids_TJ=jnp.where(ids_TJ < size, ids_TJ, NO_TOKEN),
        top_logprobs_TJ=values_TJ - log_sum_T[:, None],
    )


def prompt_logprobs(
    logits_of: Callable[[Array], Float32[Array, "R V"]],
    hidden_TE: Array,
    next_T: Int32[Array, " T"],
    wanted: Bool[Array, ""],
    layout: RowLayout,
) -> TokenLogprobs:
    """The logprobs of the tokens that follow the tokens of a step; zeros, at no cost, unless somebody wants them.

    Args:
      logits_of: The model's logits for some hidden states.
      hidden_TE: Hidden states after each token.
      next_T: The token that follows each.
      wanted: Whether to compute anything.
      layout: Says how many alternatives there is room for.
    """
    num_tokens, width = hidden_TE.shape[0], layout.max_logprobs
    chunk = min(CHUNK, num_tokens)
    short = -num_tokens % chunk

    def compute() -> TokenLogprobs:
        hidden = jnp.pad(hidden_TE, ((0, short), (0, 0))).reshape(-1, chunk, hidden_TE.shape[1])
        tokens = jnp.pad(next_T, (0, short)).reshape(-1, chunk)
        parts = lax.map(lambda part: token_logprobs(logits_of(part[0]), part[1], width), (hidden, tokens))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], parts)

    return lax.cond(wanted, compute, lambda: blank(num_tokens, width))
