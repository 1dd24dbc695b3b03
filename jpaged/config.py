"""What a user may ask: of an engine (`EngineConfig`), a request (`SamplingParams`), a search (`BeamSearchParams`).

It knows names, defaults and ranges. It does not know JAX, the tokenizer or how anything is carried out, and it reads no
environment variable. The names and defaults of `SamplingParams` are vLLM's (vllm/sampling_params.py), so that scripts
carry over.

An engine has one config, which raises when it is built. Requests are many, and one bad one must not stop the others:
building `SamplingParams` never raises, and `SamplingParams.problems` returns every fault as a sentence. All judge the
types of their values themselves, for these come from JSON and flags: hence `no_type_check`, to which run-time checkers
listen.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, no_type_check

from jpaged import checks

DType = Literal["auto", "float32", "bfloat16"]
Backend = Literal["xla", "tpu", "gpu", "tpu_interpret", "gpu_interpret"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "recompute", "swap"]

GREEDY_BELOW = 1e-5  # a temperature under this is greedy, as in vLLM

INT32_MAX = 2**31 - 1
NO_TOKEN = INT32_MAX  # pads lists of token ids: past every vocabulary, so that a scatter with mode="drop" ignores it
FLOAT32_TINY = 2.0**-126  # the device may take for 0 what is less
SEED_RANGE = (-(2**63), 2**63 - 1)


@no_type_check
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine. They are refused together: one ValueError names every fault.

    The last five say how much one request may ask of the sampler: they are widths of arrays that every slot has.

    Attributes:
      block_size: tokens that one block holds.
      num_blocks: blocks in the pool.
      kv_cache_memory: bytes for keys and values, another way to say `num_blocks`. With neither, the engine takes what
        `max_num_seqs` sequences of `max_model_len` need, or as much of it as the device can give (1 GiB on a CPU).
      max_num_seqs: sequence slots: how many sequences may run at once.
      max_model_len: the most tokens of a sequence, prompt and output together; None: what the model was made for.
      max_num_batched_tokens: the most query tokens of one step; at least one for each slot.
      decode_steps: decode steps that one dispatch makes.
      dtype: type of weights and activations; "auto" is the best that the device has.
      backend: attention backend; None picks one, a name never falls back.
      enable_prefix_caching: whether blocks stay after their sequences, for texts that begin in the same way.
      scheduling_policy: "fcfs" serves in the order of arrival, "priority" those with the lowest `priority` first.
      priority_ageing: with "priority": seconds of waiting that count as one level, so that nobody waits for ever.
      preemption_mode: what becomes of a request that pauses for want of memory: "recompute" computes its tokens again,
        "swap" copies their KV to the host if it must go, "auto" does what was measured to be quicker.
      swap_space: bytes of the host for that.
      max_beam_width: the greatest width of a beam search.
      check_every_step: whether to compare the device's memory with the host's books after every step, which waits for
        it: to look for faults of jpaged itself.
      seed: what requests without a seed derive theirs from.
      max_logprobs: the most alternatives that a token's logprobs may list.
      max_stop_token_ids: the most ids that may end a request, the model's own end-of-sequence ids included.
      max_logit_bias: the most token ids that a request may bias.
      max_bad_words: the most token sequences that a request may ban; a word can take two, see `SamplingParams`.
      max_bad_word_tokens: the most tokens of one of them.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    max_num_seqs: int = 16
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    decode_steps: int = 8
    dtype: DType = "auto"
    backend: Backend | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_ageing: float = 60.0
    preemption_mode: PreemptionMode = "auto"
    swap_space: int = 4 * 2**30
    max_beam_width: int = 8
    check_every_step: bool = False
    seed: int = 0
    max_logprobs: int = 20
    max_stop_token_ids: int = 16
    max_logit_bias: int = 64
    max_bad_words: int = 32
    max_bad_word_tokens: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, checks.plain(getattr(self, field.name)))
        found = checks.integer("block_size", self.block_size, 1, 65536, "try 16, or 64 and more on a GPU")
        if self.num_blocks is not None:
            found += checks.integer("num_blocks", self.num_blocks, 1, INT32_MAX - 1, "left out, memory sizes the pool")
        if self.kv_cache_memory is not None:
            found += checks.integer("kv_cache_memory", self.kv_cache_memory, 1, 2**63 - 1, "it counts bytes")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            found.append(
                f"num_blocks={self.num_blocks!r} and kv_cache_memory={self.kv_cache_memory!r} both size the pool; "
                "give one of them, or neither."
            )
        found += (slots := checks.integer("max_num_seqs", self.max_num_seqs, 1, 65536, "try 16"))
        if self.max_model_len is not None:
            found += checks.integer("max_model_len", self.max_model_len, 2, 2**24, "left out, it is the model's own")
        found += (tokens := checks.integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**24, "try 512"))
        if not slots and not tokens and self.max_num_batched_tokens < self.max_num_seqs:
            found.append(
                f"max_num_batched_tokens={self.max_num_batched_tokens!r} must be at least max_num_seqs="
                f"{self.max_num_seqs!r}, one token for each running sequence; raise the one or lower the other."
            )
        found += checks.integer("decode_steps", self.decode_steps, 1, 4096, "try 8")
        if self.dtype not in get_args(DType):
            found.append(f"dtype={self.dtype!r} must be one of {checks.names(get_args(DType))}; try dtype='auto'.")
        if self.backend is not None and self.backend not in get_args(Backend):
            found.append(
                f"backend={self.backend!r} must be one of {checks.names(get_args(Backend))}; leave it out for the "
                "machine's own."
            )
        for name, choices in (("scheduling_policy", SchedulingPolicy), ("preemption_mode", PreemptionMode)):
            if (value := getattr(self, name)) not in get_args(choices):
                found.append(f"{name}={value!r} must be one of {checks.names(get_args(choices))}; leave it out.")
        found += checks.number("priority_ageing", self.priority_ageing, 0, None, "try 60", above=True)
        found += checks.integer("swap_space", self.swap_space, 0, 2**63 - 1, "it counts bytes; 0 is none")
        if self.preemption_mode == "swap" and self.enable_prefix_caching is False:
            found.append(
                "preemption_mode='swap' needs enable_prefix_caching, by which blocks are found again; "
                "turn that on, or try preemption_mode='recompute'."
            )
        found += checks.integer("max_beam_width", self.max_beam_width, 1, 4096, "every slot pays for it; try 8")
        for name in ("enable_prefix_caching", "check_every_step"):
            if not isinstance(flag := getattr(self, name), bool):
                found.append(f"{name}={flag!r} must be a bool, not {type(flag).__name__}; try True or False.")
        found += checks.integer("seed", self.seed, *SEED_RANGE, "a seed is a signed 64-bit integer")
        for name in ("max_logprobs", "max_stop_token_ids", "max_logit_bias", "max_bad_words", "max_bad_word_tokens"):
            low = 1 if name == "max_bad_word_tokens" else 0
            found += checks.integer(name, getattr(self, name), low, 4096, "every slot pays for it, so keep it small")
        if found:
            raise ValueError("EngineConfig is refused: " + " ".join(found))


@no_type_check
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Building one never raises; `problems` judges it.

    Some values are brought into one form when an instance is built: lists become tuples without repeats, `logit_bias`
    becomes pairs of (token id, bias) with each bias clamped to [−100, 100], `top_k=-1` becomes 0 and `seed=-1` None.

    Attributes:
      n: how many continuations.
      temperature: divides the logits; 0, and all below 1e-5, is greedy.
      top_p: of the most likely tokens, keep the fewest whose mass reaches this; 1 keeps all.
      top_k: keep this many of the most likely tokens; 0 or −1 keeps all.
      min_p: keep the tokens at least this likely, relative to the most likely one; 0 keeps all.
      presence_penalty: taken off the logit of a token that the output has.
      frequency_penalty: the same, once for each time that the output has it.
      repetition_penalty: divides a positive, multiplies a negative logit of a token that prompt or output have.
      seed: makes the continuation reproducible, whatever else runs; None or −1: the engine chooses.
      max_tokens: the most output tokens; None: as many as the model's length and the pool allow.
      min_tokens: output tokens among which no stop token may be, and no stop string counts.
      stop: string or strings that end the output.
      stop_token_ids: token ids that end the output, beside the model's own.
      ignore_eos: the model's end-of-sequence ids do not end the output.
      logprobs: alternatives to list with each output token's logprob; 0 lists the token alone, None nothing.
      prompt_logprobs: the same for the prompt's tokens.
      logit_bias: added to the logits of these token ids.
      bad_words: words that the output must not have.
      include_stop_str_in_output: leave the stop string in the text.
      skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Any = None  # None | str | iterable of str; (str, ...) once built
    stop_token_ids: Any = None  # None | iterable of int; (int, ...) once built
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Any = None  # None | mapping or pairs of token id and bias; ((int, float), ...) once built
    bad_words: Any = None  # None | iterable of str; (str, ...) once built
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, checks.plain(getattr(self, field.name)))
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, checks.as_tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", checks.as_pairs(self.logit_bias))
        if checks.is_integer(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if checks.is_integer(self.seed) and self.seed == -1:
            object.__setattr__(self, "seed", None)

    @property
    def greedy(self) -> bool:
        """Whether each token is simply the most likely one."""
        return self.temperature < GREEDY_BELOW

    def problems(self, config: EngineConfig, *, vocab_size: int) -> list[str]:
        """Everything that is wrong with these parameters, each as a sentence that ends with a way out.

        What only the tokenizer or the prompt can tell is not judged here: into how many tokens a bad word falls, or
        whether prompt and `max_tokens` fit together.

        Args:
          config: the engine's settings: its caps, `max_num_seqs`, and `max_model_len` unless that is None.
          vocab_size: token ids are below this.
        """
        longest = INT32_MAX if config.max_model_len is None else config.max_model_len
        room = longest - 1
        why = f"max_model_len={longest} less one token of prompt"
        found = checks.integer(
            "n", self.n, 1, config.max_num_seqs, "raise max_num_seqs, or send the prompt several times"
        )
        found += checks.number("temperature", self.temperature, 0, None, "0 is greedy, 1 the model's own")
        found += checks.number("top_p", self.top_p, 0, 1, "1 turns it off", above=True)
        found += checks.integer("top_k", self.top_k, 0, INT32_MAX, "0 and -1 turn it off")
        found += checks.number("min_p", self.min_p, 0, 1, "0 turns it off")
        found += checks.number("presence_penalty", self.presence_penalty, -2, 2, "0 turns it off")
        found += checks.number("frequency_penalty", self.frequency_penalty, -2, 2, "0 turns it off")
        found += checks.number("repetition_penalty", self.repetition_penalty, FLOAT32_TINY, None, "1 turns it off")
        if self.seed is not None:
            found += checks.integer("seed", self.seed, *SEED_RANGE, "left out, the engine chooses")
        most: list[str] = []
        if self.max_tokens is not None:
            most = checks.integer("max_tokens", self.max_tokens, 1, room, why)
        least = checks.integer("min_tokens", self.min_tokens, 0, room, why)
        found += most + least
        if self.max_tokens is not None and not most and not least and self.min_tokens > self.max_tokens:
            found.append(
                f"min_tokens={self.min_tokens!r} must be at most max_tokens={self.max_tokens!r}; "
                "lower the one or raise the other."
            )
        found += checks.strings("stop", self.stop, None)
        found += checks.strings("bad_words", self.bad_words, config.max_bad_words)
        found += checks.token_ids("stop_token_ids", self.stop_token_ids, vocab_size, config.max_stop_token_ids)
        found += checks.bias(self.logit_bias, vocab_size, config.max_logit_bias)
        known = "" if vocab_size == INT32_MAX else f", vocabulary {vocab_size}"  # before a model is loaded
        hint = f"max_logprobs={config.max_logprobs}{known}; left out, there are none"
        for name in ("logprobs", "prompt_logprobs"):
            if (wanted := getattr(self, name)) is not None:
                found += checks.integer(name, wanted, 0, min(config.max_logprobs, vocab_size), hint)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(flag := getattr(self, name), bool):
                found.append(f"{name}={flag!r} must be a bool, not {type(flag).__name__}; try True or False.")
        return found


@no_type_check
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search for the likeliest continuations of one prompt; see `jpaged.beam`. Names are vLLM's, and
    transformers' for `early_stopping`. Building one never raises; `problems` judges it.

    Attributes:
      beam_width: hypotheses that are followed at once, and returned.
      max_tokens: the most output tokens.
      ignore_eos: the model's end-of-sequence ids do not end a hypothesis.
      temperature: for vLLM's sake, where it has no meaning either: the search goes by the model's own probabilities.
      length_penalty: a hypothesis scores the sum of its log-probabilities over its length to this power. Above 0 the
        long gain, below 0 the short; 0 takes the sum.
      early_stopping: end as soon as `beam_width` hypotheses are finished; else once no other can become better than the
        worst of them.
      stop_token_ids: token ids that end a hypothesis, beside the model's own.
      include_stop_str_in_output: leave in the text what ended it.
      skip_special_tokens: leave special tokens out of the text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop_token_ids: Any = None  # None | iterable of int; (int, ...) once built
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, checks.plain(getattr(self, field.name)))
        object.__setattr__(self, "stop_token_ids", checks.as_tuple(self.stop_token_ids))

    def problems(self, config: EngineConfig, *, vocab_size: int) -> list[str]:
        """Everything that is wrong with these parameters; arguments and answer as of `SamplingParams.problems`."""
        room = (INT32_MAX if config.max_model_len is None else config.max_model_len) - 1
        widest = min(config.max_beam_width, config.max_num_seqs)
        found = checks.integer("beam_width", self.beam_width, 1, widest, "raise max_beam_width and max_num_seqs")
        found += checks.number("temperature", self.temperature, 0, 0, "a beam search has none, so leave it out")
        power = checks.number("length_penalty", self.length_penalty, -100, 100, "1 is the mean log-probability")
        most = checks.integer("max_tokens", self.max_tokens, 1, room, f"max_model_len={room + 1} less one of prompt")
        found += most + power
        if not most and not power and abs(self.length_penalty) * math.log10(self.max_tokens) > 30:
            bound = 30 / math.log10(self.max_tokens)
            found.append(
                f"length_penalty={self.length_penalty!r} with max_tokens={self.max_tokens!r} makes scores that no "
                f"float32 holds; try from {-bound:.3g} to {bound:.3g}."
            )
        found += checks.token_ids("stop_token_ids", self.stop_token_ids, vocab_size, config.max_stop_token_ids)
        for name in ("ignore_eos", "early_stopping", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(flag := getattr(self, name), bool):
                found.append(f"{name}={flag!r} must be a bool, not {type(flag).__name__}; try True or False.")
        return found
