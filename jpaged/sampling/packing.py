"""One request's parameters as one packed row, on the host and in NumPy.

The parameters must have passed `SamplingParams.problems`; here only what does not fit the arrays is refused.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, UInt32

from jpaged.config import INT32_MAX, NO_TOKEN, SamplingParams
from jpaged.sampling.rows import RowLayout


def seed_words(seed: int) -> UInt32[np.ndarray, "2"]:
    """A 64-bit seed as the data of a threefry key: its two's complement, high word first.

    For seeds that fit 32 bits unsigned this is the key that ``jax.random.key(seed)`` makes; for others, JAX without
    64-bit types would drop the high word.
    """
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def pack_row(
    layout: RowLayout,
    params: SamplingParams,
    *,
    index: int,
    seed: int,
    prompt_len: int,
    max_tokens: int,
    stop_ids: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> Int32[np.ndarray, " width"]:
    """The packed row of one continuation.

    Args:
      layout: The engine's layout.
      params: The request's parameters.
      index: Which of the request's continuations this is.
      seed: The seed to use: the request's, or the engine's choice for it.
      prompt_len: Tokens of the prompt.
      max_tokens: The most output tokens; for a request that left it open, the engine's choice.
      stop_ids: Ids that end the output, the model's own included unless the request ignores them.
      bad_words: Token sequences to ban, none of them empty.

    Returns:
      A vector of ``layout.width`` integers.

    Raises:
      ValueError: naming every list that the layout has no room for.
    """
    bias = params.logit_bias
    longest = max(map(len, bad_words), default=0)
    faults = [
        f"{count} {what} exceed the {room} that the engine has room for; raise {setting} or give fewer."
        for count, room, what, setting in (
            (len(stop_ids), layout.stop_ids, "stop ids", "max_stop_token_ids"),
            (len(bias), layout.biases, "biased ids", "max_logit_bias"),
            (len(bad_words), layout.bad_words, "bad words", "max_bad_words"),
            (longest, layout.bad_word_tokens, "tokens of a bad word", "max_bad_word_tokens"),
        )
        if count > room
    ]
    if not all(map(len, bad_words)):
        faults.append("A bad word without tokens bans everything or nothing; leave it out.")
    if faults:
        raise ValueError(" ".join(faults))

    words_WL = np.full((layout.bad_words, layout.bad_word_tokens), NO_TOKEN, np.int32)
    for word, row_L in zip(bad_words, words_WL, strict=False):
        row_L[-len(word) :] = word
    return layout.pack(
        {
            "temperature_R": np.float32(0 if params.greedy else params.temperature),
            "top_p_R": np.float32(params.top_p),
            "min_p_R": np.float32(params.min_p),
            "presence_R": np.float32(params.presence_penalty),
            "frequency_R": np.float32(params.frequency_penalty),
            "repetition_R": np.float32(params.repetition_penalty),
            "top_k_R": np.int32(params.top_k),
            "logprobs_R": np.int32(-1 if params.logprobs is None else params.logprobs),
            "prompt_logprobs_R": np.int32(-1 if params.prompt_logprobs is None else params.prompt_logprobs),
            "prompt_len_R": np.int32(prompt_len),
            "min_len_R": np.int32(prompt_len + params.min_tokens),
            "limit_R": np.int32(min(prompt_len + max_tokens, INT32_MAX)),
            "stream_R": np.int32(index),
            "seed_R2": seed_words(seed),
            "stop_ids_RE": _padded(stop_ids, layout.stop_ids),
            "bias_ids_RJ": _padded([token for token, _ in bias], layout.biases),
            "bias_RJ": np.array([value for _, value in bias] + [0.0] * (layout.biases - len(bias)), np.float32),
            "bad_words_RWL": words_WL,
        }
    )


def _padded(ids: Sequence[int], size: int) -> Int32[np.ndarray, " size"]:
    return np.array([*ids] + [NO_TOKEN] * (size - len(ids)), np.int32)
