"""`LLM`: prompts in, text out. The calls and defaults that vLLM's users know, on this engine.

It turns prompts into ids, checks every request before anything runs, and drives the engine. It schedules nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jpaged import cache as kv
from jpaged import validate
from jpaged.backends import resolve_backend
from jpaged.config import BeamSearchParams, EngineConfig, SamplingParams
from jpaged.engine import Engine
from jpaged.hypotheses import BeamRequest
from jpaged.intake import AnyRequest
from jpaged.model import AttentionView, LoadedModel
from jpaged.outputs import BeamSearchOutput, Delta, RequestOutput
from jpaged.request import Request, Sample
from jpaged.sizing import ResolvedConfig
from jpaged.tokenizer import Message
from jpaged.turns import Turns
from jpaged.validate import ReadPrompt

Prompt: TypeAlias = str | Sequence[int] | np.ndarray | jax.Array | Mapping[str, Any]
EXAMPLES = {SamplingParams: "SamplingParams()", BeamSearchParams: "BeamSearchParams(beam_width=4, max_tokens=64)"}

_SETTINGS = {field.name for field in dataclasses.fields(EngineConfig)}


class LLM:
    """A model ready to generate. Threads may share one: each gets its own results.

    >>> llm = LLM("default")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text

    Args:
      model: A `LoadedModel`, or a name or path that a loader of the entry-point group ``jpaged.models`` knows: for
        jpaged's own, "default", a Hugging Face directory, a GGUF file or a converted checkpoint.
      **settings: Fields of `EngineConfig`.

    Raises:
      TypeError: a setting that there is not.
      ValueError: settings or a model that cannot be served; the message says why and what to do.
    """

    def __init__(self, model: LoadedModel | str | os.PathLike[str], **settings: Any):
        if unknown := sorted(settings.keys() - _SETTINGS):
            near = difflib.get_close_matches(unknown[0], _SETTINGS, n=1)
            others = near[0] if near else f"one of {', '.join(sorted(_SETTINGS))}"
            raise TypeError(f"LLM has no setting {unknown[0]!r}; try {others}")
        config = EngineConfig(**settings)
        resolve_backend(config.backend)  # before a model is fetched and loaded for nothing
        loaded = load(os.fspath(model), config.dtype) if isinstance(model, str | os.PathLike) else model
        self.engine = Engine(loaded, config)
        self._turns = Turns(self.engine)
        self._ids = itertools.count()

    @property
    def config(self) -> ResolvedConfig:
        """The settings, with nothing left open."""
        return self.engine.config

    @property
    def tokenizer(self):
        """The model's tokenizer, or None."""
        return self.engine.loaded.tokenizer

    def problems(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> dict[int, list[str]]:
        """What is wrong with each request, by index; requests that can be served are not in it."""
        listed, params_list = _paired(prompts, sampling_params)
        checked = (self._check(prompt, each) for prompt, each in zip(listed, params_list, strict=True))
        return {index: prompt.faults for index, prompt in enumerate(checked) if prompt.faults}

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt, batched continuously; outputs are in the order of the prompts.

        Args:
          prompts: A text, a list of ids, a mapping with "prompt" or "prompt_token_ids", or a list of such. A mapping
            may have a "cache_salt", too: only prompts with the same one share what the prefix cache has.
          sampling_params: One for all, or one a prompt; None is `SamplingParams()`.
          priority: One for all, or one a prompt; the lowest come first. Needs ``scheduling_policy="priority"``.
          timeout: Seconds after which what is not finished ends with the reason "timeout".
          use_tqdm: Whether to show a progress bar; None shows one on a terminal.

        Raises:
          ValueError: naming every request that is wrong, before anything runs.
        """
        requests = self.make_requests(prompts, sampling_params, priority=priority, timeout=timeout)
        self._run_all(requests, use_tqdm)
        return [request.output() for request in requests]

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams | Iterable[BeamSearchParams],
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches for the likeliest continuations of every prompt, on the device, batched with all else that runs.

        Beams share the blocks of what they have in common, and only a block that is not full is ever copied. The first
        search compiles its steps, unless `warmup` was asked to.

        Args:
          prompts, priority, timeout, use_tqdm: As of `generate`.
          params: One for all, or one a prompt.

        Raises:
          ValueError: naming every request that is wrong, before anything runs.
        """
        requests = self.make_searches(prompts, params, priority=priority, timeout=timeout)
        self._run_all(requests, use_tqdm)
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> Generator[Delta, None, None]:
        """As `generate`, handing out what each sample gains as it comes. Closing the iterator aborts what is left.

        Raises:
          ValueError: as `generate`, at the call.
        """
        return self._turns.run(
            self.make_requests(prompts, sampling_params, priority=priority, timeout=timeout), Sample.delta
        )

    def make_requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> list[Request]:
        """Requests for `Engine.add`, checked as `generate` checks them."""
        listed, params_list = _paired(prompts, sampling_params)
        read = [self._check(prompt, each) for prompt, each in zip(listed, params_list, strict=True)]
        return [
            Request(
                **common,
                params=each,
                bad_words=validate.bad_word_ids(each, self.tokenizer),
                max_tokens=validate.max_tokens(each, len(common["prompt_token_ids"]), self._limits),
            )
            for common, each in zip(self._admit(read, params_list, priority, timeout), params_list, strict=True)
        ]

    def make_searches(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams | Iterable[BeamSearchParams],
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> list[BeamRequest]:
        """Requests for `Engine.add`, checked as `beam_search` checks them."""
        listed, params_list = _paired(prompts, params, BeamSearchParams)
        read = [self._check(prompt, each, BeamSearchParams) for prompt, each in zip(listed, params_list, strict=True)]
        return [
            BeamRequest(**common, search=each, max_tokens=each.max_tokens)
            for common, each in zip(self._admit(read, params_list, priority, timeout), params_list, strict=True)
        ]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params=None, **options: Any
    ) -> list[RequestOutput]:
        """`generate` on conversations, rendered by the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        return self.generate(
            [self.chat_prompt(conversation) for conversation in conversations], sampling_params, **options
        )

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt that stands for a conversation; the template has written BOS itself where the model wants it."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it has no chat template; try prompt_token_ids")
        text = self.tokenizer.apply_chat_template(messages)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def compute_logits(self, token_ids: Sequence[int] | np.ndarray | jax.Array) -> np.ndarray:
        """Logits [n, V], float32, after each of ``n`` tokens of one sequence; for tests and evaluation.

        Runs through a paged cache of its own, all tokens in one step.

        Raises:
          ValueError: no tokens, too many, or ids out of range.
        """
        if isinstance(token_ids, str):
            raise ValueError(f"token_ids={token_ids[:80]!r} is a text; try llm.tokenizer.encode(text)")
        _, token_ids, _, faults = validate.read_prompt(token_ids, None)
        faults = faults or validate.prompt_problems(token_ids, self._limits)
        if faults:
            raise ValueError("; ".join(faults))
        layout = self.engine.layout
        padded = 4 ** max(2, -(-(len(token_ids) - 1).bit_length() // 2))  # few shapes, so few compilations
        padded = max(len(token_ids), min(padded, self.config.max_model_len))
        tokens = np.zeros(padded, np.int32)
        tokens[: len(token_ids)] = token_ids
        small = dataclasses.replace(layout, num_blocks=-(-padded // layout.block_size))
        loaded = self.engine.loaded
        return np.asarray(self._all_logits(loaded.weights, jnp.asarray(tokens), np.int32(len(token_ids)), small))[
            : len(token_ids)
        ]

    def warmup(self, *, beams: bool = False, use_tqdm: bool | None = None) -> int:
        """Compiles every bucket, so that no request meets a compilation; returns how many there are.

        Args:
          beams: Whether to compile what `beam_search` needs, too, which is as much again.
          use_tqdm: As of `generate`.
        """
        with tqdm(unit="bucket", desc="compiling", disable=_hidden(use_tqdm), leave=False) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            return self._turns.alone(lambda: self.engine.warmup(show, beams=beams))

    @functools.cached_property
    def _all_logits(self) -> Callable[..., jax.Array]:
        model, backend = self.engine.loaded.model, self.config.backend

        def run(weights, tokens_T, count, layout):
            num_blocks = layout.num_blocks
            view = AttentionView(
                cache=kv.create(layout),
                block_tables_RM=jnp.arange(num_blocks, dtype=jnp.int32)[None],
                kv_lens_R=count[None],
                cu_q_lens_R1=jnp.stack([jnp.zeros_like(count), count]),
                backend=backend,
            ).prepared(model.spec, tokens_T.shape[0])
            hidden_TE, _ = model.hidden(weights, tokens_T, view.rows(tokens_T.shape[0]).position_T, view)
            return model.logits(weights, hidden_TE)

        return jax.jit(run, static_argnums=3)

    @functools.cached_property
    def _limits(self) -> validate.RequestLimits:
        return validate.limits(self.engine.loaded, self.config)

    def _check(self, prompt: Prompt, params: Any, kind: type = SamplingParams) -> ReadPrompt:
        read = validate.read_prompt(prompt, self.tokenizer)
        problems = validate.search_problems if kind is BeamSearchParams else validate.request_problems
        if not isinstance(params, kind):
            wrong = f"its parameters must be {kind.__name__}, not {type(params).__name__}; try {EXAMPLES[kind]}"
            return read._replace(faults=[*read.faults, wrong])
        return read._replace(faults=read.faults or problems(read.ids, params, self._limits))

    def _admit(
        self, prompts: Sequence[ReadPrompt], params: Sequence[Any], priority: Any, timeout: Any
    ) -> list[dict[str, Any]]:
        """What new requests have in common, whatever they ask for: fields of `Asked`.

        Raises:
          ValueError: naming all that is wrong with any of them.
        """
        ranks, faults = validate.priorities(priority, len(prompts), self.config)
        faults += validate.timeout_problems(timeout)
        for index, read in enumerate(prompts):
            if read.faults:
                faults.append(f"request {index}: " + "; ".join(fault.rstrip(".") for fault in read.faults))
        if faults:
            raise ValueError("\n".join(faults))
        return [
            {
                "id": next(self._ids),
                "prompt": read.text,
                "prompt_token_ids": read.ids,
                "tokenizer": self.tokenizer,
                "stop_ids": frozenset(validate.stop_ids(each, self._limits)),
                "priority": rank,
                "timeout": timeout,
                "cache_salt": read.cache_salt,
            }
            for rank, read, each in zip(ranks, prompts, params, strict=True)
        ]

    def _run_all(self, requests: Sequence[AnyRequest], use_tqdm: bool | None) -> None:
        with tqdm(total=len(requests), unit="request", disable=_hidden(use_tqdm), leave=False) as bar:
            unfinished = set(requests)
            for request in self._turns.run(requests, lambda sample: sample.request):
                if request.finished and request in unfinished:
                    unfinished.remove(request)
                    bar.update()


def load(name: str, dtype: str) -> LoadedModel:
    """Asks the loaders of the entry-point group ``jpaged.models`` for a model, by name or path.

    Raises:
      ValueError: no loader is installed, or the loader cannot load it.
    """
    found = importlib.metadata.entry_points(group="jpaged.models")
    family, _, rest = name.partition(":")
    chosen = [point for point in found if point.name == family and rest] or [p for p in found if p.name == "default"]
    if not chosen:
        raise ValueError(
            f"model={name!r} cannot be loaded: no package offers loaders; try `pip install -e .` of jpaged"
        )
    return chosen[0].load()(rest if chosen[0].name == family and rest else name, dtype=dtype)


def _paired(prompts: Any, params: Any, kind: type = SamplingParams) -> tuple[list[Prompt], list[Any]]:
    if hasattr(prompts, "__array__"):  # NumPy's, JAX's and everybody's
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r} must be a text, a list of ids, or a list of such; try a string")
    listed: list[Any] = [prompts]
    if not isinstance(prompts, str | bytes | Mapping):
        several = list(prompts)
        one_of_ids = several and all(isinstance(item, int | np.integer) for item in several)
        listed = [several] if one_of_ids else several
    name = kind.__name__
    if params is None and kind is SamplingParams:
        params = SamplingParams()
    if isinstance(params, kind):
        return listed, [params] * len(listed)
    if not isinstance(params, Iterable) or isinstance(params, str | Mapping):
        argument = "sampling_params" if kind is SamplingParams else "params"
        raise ValueError(f"{argument}={params!r} must be {name} or several of them; try {name}(...)")
    params = list(params)
    if len(params) != len(listed):
        raise ValueError(f"there are {len(listed)} prompts and {len(params)} {name}; try one for all, or as many")
    return listed, params


def _hidden(use_tqdm: bool | None) -> bool:
    return not (sys.stderr.isatty() if use_tqdm is None else use_tqdm)
