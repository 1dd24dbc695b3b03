"""Whether a request can be served, before anything runs: prompt, parameters and limits together.

It reads a prompt into ids and collects everything that is wrong in whole sentences. It raises nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpaged import checks
from jpaged.config import BeamSearchParams, SamplingParams
from jpaged.model import LoadedModel
from jpaged.sizing import ResolvedConfig
from jpaged.tokenizer import Tokenizer

PRIORITIES = (-(2**31), 2**31 - 1)  # so that times, in seconds, still count beside them


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What requests are held against.

    Attributes:
      vocab_size: Ids that the model's logits cover.
      sampled_vocab: Ids that can be sampled: those that the tokenizer knows.
      eos_ids: Ids that end a text.
      tokenizer: For stop strings and bad words; None for a model that runs on ids.
      config: The engine's settings, resolved.
    """

    vocab_size: int
    sampled_vocab: int
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    config: ResolvedConfig

    @property
    def pool_tokens(self) -> int:
        return self.config.num_blocks * self.config.block_size


def limits(loaded: LoadedModel, config: ResolvedConfig) -> RequestLimits:
    """The limits of an engine."""
    vocab, tokenizer = loaded.model.spec.vocab_size, loaded.tokenizer
    if tokenizer is None:
        eos = tuple(getattr(loaded.config, "eos_token_ids", ()))
        return RequestLimits(vocab, loaded.sampled_vocab, eos, None, config)
    eos = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *getattr(loaded.config, "eos_token_ids", ()))))
    return RequestLimits(vocab, loaded.sampled_vocab, eos, tokenizer, config)


class ReadPrompt(NamedTuple):
    """A prompt.

    Attributes:
      text: None if it was given as ids.
      ids: Empty if there are faults.
      cache_salt: Only prompts with the same one share blocks.
      faults: What is wrong with it, in sentences.
    """

    text: str | None
    ids: list[int]
    cache_salt: str | None
    faults: list[str]


def read_prompt(prompt: Any, tokenizer: Tokenizer | None) -> ReadPrompt:
    """A prompt's text, ids and salt, or why it has none."""
    salt = None
    if isinstance(prompt, Mapping) and "cache_salt" in prompt:
        salt = prompt["cache_salt"]
        prompt = {key: value for key, value in prompt.items() if key != "cache_salt"}
        if salt is not None and not (isinstance(salt, str) and salt):
            return ReadPrompt(None, [], None, [f"cache_salt={salt!r} must be a string with something in it; try 'a'"])
    text, ids, faults = _text_and_ids(prompt, tokenizer)
    return ReadPrompt(text, ids, salt, faults)


def _text_and_ids(prompt: Any, tokenizer: Tokenizer | None) -> tuple[str | None, list[int], list[str]]:
    text, ids = prompt, None
    if isinstance(prompt, Mapping):
        unknown = sorted(map(str, set(prompt) - {"prompt", "prompt_token_ids"}))
        if unknown:
            hint = "try 'prompt', 'prompt_token_ids' or 'cache_salt'"
            return None, [], [f"the prompt has unknown keys {unknown}; {hint}"]
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif not isinstance(prompt, str):
        text, ids = None, prompt
    if text is not None and not isinstance(text, str):
        kind = type(text).__name__
        return None, [], [f"the prompt's text must be a string, not {kind}; try a string or a list of ids"]
    if ids is not None:
        if hasattr(ids, "__array__"):  # NumPy's, JAX's and everybody's
            ids = np.asarray(ids).tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            return text, [], [f"prompt_token_ids must be a list of ids, not {type(ids).__name__}; try [1, 2, 3]"]
        odd = [i for i in ids if isinstance(i, bool) or not isinstance(i, int | np.integer)]
        if odd:
            return text, [], [f"prompt_token_ids must be integers, not {odd[0]!r}; try whole numbers"]
        return text, [int(i) for i in ids], []
    if text is None:
        return None, [], ["the prompt is missing; try a text, a list of ids, or 'prompt' in a mapping"]
    if tokenizer is None:
        return text, [], ["this model has no tokenizer, so it cannot read text; try prompt_token_ids"]
    try:
        return text, tokenizer.encode(text), []
    except ValueError as error:
        return text, [], [str(error)]


def prompt_problems(ids: Sequence[int], limits: RequestLimits) -> list[str]:
    """What is wrong with a prompt's ids."""
    if not len(ids):
        return ["the prompt is empty; try at least one token"]
    faults = []
    outside = [i for i in ids if not 0 <= i < limits.vocab_size]
    if outside:
        faults.append(
            f"prompt token {outside[0]} is out of range; ids must be from 0 to {limits.vocab_size - 1}, so try the "
            "tokenizer that belongs to this model"
        )
    if len(ids) > limits.config.max_model_len:
        faults.append(
            f"the prompt has {len(ids)} tokens and max_model_len is {limits.config.max_model_len}; try a shorter one"
        )
    return faults


def request_problems(ids: Sequence[int], params: SamplingParams, limits: RequestLimits) -> list[str]:
    """What is wrong with a request."""
    config = limits.config
    faults = prompt_problems(ids, limits)
    faults += params.problems(config, vocab_size=limits.sampled_vocab)
    if params.stop and limits.tokenizer is None:
        faults.append("this model has no tokenizer, so stop strings cannot be found; try stop_token_ids")
    if params.bad_words and limits.tokenizer is None:
        faults.append("this model has no tokenizer, so bad_words cannot be read; try logit_bias")
    if faults:
        return faults
    wanted = len(ids) + (1 if params.max_tokens is None else params.max_tokens)
    if wanted > config.max_model_len:
        asked = f"max_tokens={params.max_tokens}" if params.max_tokens else "one token more"
        return [
            f"{len(ids)} prompt tokens and {asked} exceed max_model_len={config.max_model_len}; try fewer of either"
        ]
    need = len(ids) + max_tokens(params, len(ids), limits) - 1
    if need > limits.pool_tokens:
        return [
            f"the request may need KV for {need} tokens, {-(-need // config.block_size)} blocks, and the pool has "
            f"{config.num_blocks} of {config.block_size}; try fewer tokens, or more num_blocks or kv_cache_memory"
        ]
    try:
        ids_of_words = bad_word_ids(params, limits.tokenizer)
    except ValueError as error:  # text that has no encoding
        return [f"bad_words: {error}"]
    longest = max(map(len, ids_of_words), default=0)
    if len(ids_of_words) > config.max_bad_words:
        faults.append(
            f"bad_words become {len(ids_of_words)} token sequences and max_bad_words={config.max_bad_words}; "
            "try fewer, or raise max_bad_words"
        )
    if longest > config.max_bad_word_tokens:
        faults.append(
            f"a bad word has {longest} tokens and max_bad_word_tokens={config.max_bad_word_tokens}; "
            "try a shorter one, or raise max_bad_word_tokens"
        )
    return faults + _stop_problems(params, limits)


def search_problems(ids: Sequence[int], params: BeamSearchParams, limits: RequestLimits) -> list[str]:
    """What is wrong with a beam search."""
    config = limits.config
    faults = prompt_problems(ids, limits) + params.problems(config, vocab_size=limits.sampled_vocab)
    if faults:
        return faults
    if len(ids) + params.max_tokens > config.max_model_len:
        asked = f"{len(ids)} prompt tokens and max_tokens={params.max_tokens}"
        return [f"{asked} exceed max_model_len={config.max_model_len}; try fewer of either"]
    # All of its beams run together, and in the worst case share nothing but the prompt's full blocks.
    full, size = len(ids) // config.block_size, config.block_size
    need = full + params.beam_width * (-(-(len(ids) + params.max_tokens - 1) // size) - full)
    if need > config.num_blocks:
        return [
            f"the search may need {need} blocks of {size} tokens and the pool has {config.num_blocks}; try fewer beams "
            "or tokens, or more num_blocks or kv_cache_memory"
        ]
    return _stop_problems(params, limits)


def _stop_problems(params: SamplingParams | BeamSearchParams, limits: RequestLimits) -> list[str]:
    stops, most = len(stop_ids(params, limits)), limits.config.max_stop_token_ids
    if stops <= most:
        return []
    return [
        f"there are {stops} stop ids, EOS included, and max_stop_token_ids={most}; "
        "try fewer, ignore_eos, or raise max_stop_token_ids"
    ]


def priorities(priority: Any, count: int, config: ResolvedConfig) -> tuple[list[int], list[str]]:
    """One for each of so many requests, and what is wrong with them."""
    listed = [priority] * count if checks.is_integer(priority) else priority
    if isinstance(listed, str | Mapping) or not isinstance(listed, Sequence) or not all(map(checks.is_integer, listed)):
        return [], [f"priority={priority!r} must be an integer, or a list of such; the lowest come first"]
    if len(listed) != count:
        return [], [f"there are {count} prompts and {len(listed)} priorities; try one for all, or as many"]
    faults = [fault for each in set(listed) for fault in checks.integer("priority", each, *PRIORITIES, "0 is usual")]
    if faults:
        return [], faults
    if any(listed) and config.scheduling_policy != "priority":
        return [], [
            f"priority={priority!r} means nothing with scheduling_policy={config.scheduling_policy!r}; "
            "try scheduling_policy='priority'"
        ]
    return [int(each) for each in listed], []


def timeout_problems(timeout: Any) -> list[str]:
    return [] if timeout is None else checks.number("timeout", timeout, 0, None, "it counts seconds", above=True)


def max_tokens(params: SamplingParams, prompt_len: int, limits: RequestLimits) -> int:
    """Tokens that a sample may have; without a wish, as many as the model and the pool can hold."""
    room = min(limits.config.max_model_len - prompt_len, limits.pool_tokens - prompt_len + 1)
    return max(1, room) if params.max_tokens is None else params.max_tokens


def stop_ids(params: SamplingParams | BeamSearchParams, limits: RequestLimits) -> tuple[int, ...]:
    """Ids that end a sample."""
    eos = () if params.ignore_eos else limits.eos_ids
    return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))


def bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Token sequences to ban: each word as it begins a text, and as it follows a space, as vLLM reads them.

    vLLM takes all white space off a word first, and so bans nothing for a line break; here only spaces go, and not all.

    Raises:
      ValueError: the tokenizer has no token for a word, or the word is no Unicode.
    """
    found: list[list[int]] = []
    if tokenizer is None:
        return found
    for word in params.bad_words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare else (word,):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if not ids:
                raise ValueError(f"{word!r} has no token, so it cannot be banned; leave it out")
            if ids not in found:
                found.append(ids)
    return found
