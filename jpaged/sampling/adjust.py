"""What a request changes in its logits before anything is drawn: bans, biases and penalties.

It knows the tokens of each row so far. It does not know temperature or cuts, and it keeps no state of its own: counts
are made anew from the history, and only in steps where a row needs them.

The order is vLLM's (vllm/v1/sample/sampler.py): bad words, minimum length, biases, then penalties.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jpaged.checks import FLOAT32_MAX
from jpaged.config import NO_TOKEN
from jpaged.sampling.rows import SamplerRows


def adjust(
    logits_RV: Float32[Array, "R V"],
    rows: SamplerRows,
    history_RP: Int32[Array, "R P"],
    lengths_R: Int32[Array, " R"],
    vocab_limit: int,
) -> Float32[Array, "R V"]:
    """The logits as a request wants them; -inf for what it forbids, and for ids from `vocab_limit` on.

    Args:
      logits_RV: The model's.
      rows: The settings.
      history_RP: Each row's tokens by position, prompt then output; what stands from `lengths_R` on is not read.
      lengths_R: Tokens of each row so far.
      vocab_limit: Ids from here on are never sampled; static.
    """
    if vocab_limit < logits_RV.shape[1]:
        logits_RV = jnp.where(lax.broadcasted_iota(jnp.int32, logits_RV.shape, 1) < vocab_limit, logits_RV, -jnp.inf)
    penalised_R = (rows.presence_R != 0) | (rows.frequency_R != 0) | (rows.repetition_R != 1)
    short_R = lengths_R < rows.min_len_R
    any_bias, any_word = (jnp.any(ids != NO_TOKEN) for ids in (rows.bias_ids_RJ, rows.bad_words_RWL))

    def all_of_them(x_RV: Array) -> Array:
        x_RV = lax.cond(any_word, lambda x: _ban(x, _completing(rows, history_RP, lengths_R)), _same, x_RV)
        x_RV = _ban(x_RV, jnp.where(short_R[:, None], rows.stop_ids_RE, NO_TOKEN))
        x_RV = x_RV.at[_row_numbers(rows.bias_ids_RJ), rows.bias_ids_RJ].add(rows.bias_RJ, mode="drop")
        return lax.cond(jnp.any(penalised_R), lambda x: _penalise(x, rows, history_RP, lengths_R), _same, x_RV)

    # One branch around them all, for on most steps no row wants any.
    return lax.cond(jnp.any(penalised_R | short_R) | any_bias | any_word, all_of_them, _same, logits_RV)


def _same(x_RV: Array) -> Array:
    return x_RV


def _row_numbers(ids_RJ: Array) -> Array:
    return jnp.arange(ids_RJ.shape[0], dtype=jnp.int32)[:, None]


def _ban(x_RV: Float32[Array, "R V"], ids_RJ: Int32[Array, "R J"]) -> Float32[Array, "R V"]:
    return x_RV.at[_row_numbers(ids_RJ), ids_RJ].set(-jnp.inf, mode="drop")


def _completing(
    rows: SamplerRows, history_RP: Int32[Array, "R P"], lengths_R: Int32[Array, " R"]
) -> Int32[Array, "R W"]:
    """The last id of each bad word that the next token could complete; NO_TOKEN for the other words.

    Only the output counts: a word that begins in the prompt is not completed.
    """
    before = rows.bad_words_RWL.shape[2] - 1
    positions_RL = lengths_R[:, None] - before + lax.broadcasted_iota(jnp.int32, (1, before), 1)
    tail_RL = jnp.take_along_axis(history_RP, jnp.maximum(positions_RL, 0), axis=1, mode="clip")
    tail_RL = jnp.where(positions_RL >= rows.prompt_len_R[:, None], tail_RL, -1)  # -1 is no token of a word
    prefix_RWL = rows.bad_words_RWL[:, :, :before]
    matches_RWL = (prefix_RWL == NO_TOKEN) | (prefix_RWL == tail_RL[:, None, :])
    return jnp.where(jnp.all(matches_RWL, axis=2), rows.bad_words_RWL[:, :, before], NO_TOKEN)


def _penalise(
    x_RV: Float32[Array, "R V"], rows: SamplerRows, history_RP: Int32[Array, "R P"], lengths_R: Int32[Array, " R"]
) -> Float32[Array, "R V"]:
    """Repetition, then frequency, then presence penalty."""
    positions_RP = lax.broadcasted_iota(jnp.int32, history_RP.shape, 1)
    ids_RP = jnp.where(positions_RP < lengths_R[:, None], history_RP, NO_TOKEN)
    output_RP = positions_RP >= rows.prompt_len_R[:, None]
    numbers_R1 = _row_numbers(ids_RP)
    seen_RV = jnp.zeros(x_RV.shape, jnp.bool_).at[numbers_R1, ids_RP].set(True, mode="drop")
    counts_RV = jnp.zeros(x_RV.shape, jnp.int32).at[numbers_R1, ids_RP].add(output_RP.astype(jnp.int32), mode="drop")

    repetition_R1 = rows.repetition_R[:, None]
    repeated_RV = jnp.where(x_RV > 0, x_RV / repetition_R1, x_RV * repetition_R1)
    repeated_RV = jnp.clip(repeated_RV, -FLOAT32_MAX, FLOAT32_MAX)  # what is infinite could not be sampled
    x_RV = jnp.where(seen_RV & jnp.isfinite(x_RV), repeated_RV, x_RV)
    x_RV -= rows.frequency_R[:, None] * counts_RV.astype(jnp.float32)
    return x_RV - rows.presence_R[:, None] * (counts_RV > 0).astype(jnp.float32)
