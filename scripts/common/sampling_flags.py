"""Flags for one request's `SamplingParams`. Names and meanings are vLLM's; greedy and 128 tokens are ours.

Only what needs no model is refused here; the rest when the model is known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from jpaged.config import INT32_MAX, EngineConfig, SamplingParams

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}

flags.DEFINE_integer("max_tokens", 128, "The most tokens of an answer.", lower_bound=1)
flags.DEFINE_integer("min_tokens", 0, "Tokens before which nothing ends an answer.", lower_bound=0)
flags.DEFINE_integer("n", 1, "Answers to each prompt; above 1 they differ only with a --temperature.", lower_bound=1)
flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token, 1 samples as the model says.", lower_bound=0)
flags.DEFINE_float("top_p", _DEFAULTS["top_p"], "Sample from the likeliest tokens whose mass reaches this.")
flags.DEFINE_integer("top_k", _DEFAULTS["top_k"], "Sample from so many of the likeliest tokens; 0 is all.")
flags.DEFINE_float("min_p", _DEFAULTS["min_p"], "Sample from tokens this likely, relative to the likeliest.")
flags.DEFINE_float("presence_penalty", 0.0, "Taken off the score of a token that the answer has, from -2 to 2.")
flags.DEFINE_float("frequency_penalty", 0.0, "The same, once for each time that the answer has it.")
flags.DEFINE_float("repetition_penalty", 1.0, "Above 1, tokens that prompt or answer have become less likely.")
flags.DEFINE_multi_string("stop", None, "Text that ends an answer.")
flags.DEFINE_multi_integer("stop_token_ids", None, "Token id that ends an answer.")
flags.DEFINE_boolean("include_stop_str_in_output", False, "Leave in the text what ended it.")
flags.DEFINE_boolean("ignore_eos", False, "Go on after the model's end-of-text token.")
flags.DEFINE_multi_string("bad_words", None, "Word that an answer must not have.")
flags.DEFINE_multi_string("logit_bias", None, "ID:BIAS adds to the score of a token.")
flags.DEFINE_integer("logprobs", None, "With --json, so many alternatives at each token.", lower_bound=0)
flags.DEFINE_integer("prompt_logprobs", None, "The same for the prompt.", lower_bound=0)

SAMPLING = (
    "max_tokens",
    "min_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "bad_words",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
)


def sampling_params(config: EngineConfig) -> SamplingParams:
    """What the flags ask for, the same for every prompt; `seed` is the engine's.

    Raises:
      ValueError: naming every flag that no model could serve.
    """
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in SAMPLING if name != "seed"}
    given["logit_bias"] = [_bias(text) for text in given["logit_bias"] or ()]
    params = SamplingParams(**given)
    refuse(params, config, vocab_size=INT32_MAX)
    return params


def refuse(params: SamplingParams, config: EngineConfig, *, vocab_size: int) -> None:
    """Raises ValueError with all that is wrong with the parameters, whatever the prompt."""
    if faults := params.problems(config, vocab_size=vocab_size):
        raise ValueError("; ".join(fault.rstrip(".") for fault in faults))


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias={text!r} must be a token id, a colon and a number; try 17:-100") from None
