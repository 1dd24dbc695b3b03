"""What a benchmark asks for: named cases, seeded, as token ids and exact output lengths. It runs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from . import azure

Range = tuple[int, int]  # both ends included


@dataclasses.dataclass(frozen=True)
class Case:
    """The shape of a workload.

    Attributes:
      about: For people.
      requests: How many.
      prompt_len, output_len: Tokens of each, drawn evenly from the range.
      slots: Requests that run at once, and the size of a static batch.
      lengths: Of the prompt and output of each request, in place of what is drawn.
      kv_tokens: Tokens that the KV memory has room for, the same for all; None: as many as are needed.
      paged_slots: Requests that the paged engine may run at once in that memory; None: as many as ``slots``.
    """

    about: str
    requests: int
    prompt_len: Range
    output_len: Range
    slots: int
    lengths: tuple[tuple[int, int], ...] = ()
    kv_tokens: int | None = None
    paged_slots: int | None = None


CASES = {
    "single": Case("one request", 1, (64, 64), (128, 128), 1),
    "parallel16": Case("16 parallel requests", 16, (64, 64), (128, 128), 16),
    "mixed": Case("64 requests of mixed lengths", 64, (16, 512), (16, 256), 16),
    "azure": Case(
        "64 requests with the lengths of real conversations, KV memory for 8 of the longest",
        len(azure.LENGTHS),
        (1, 2047),
        (1, 2047),
        8,
        azure.LENGTHS,
        kv_tokens=8 * 2048,
        paged_slots=32,
    ),
    "sampling": Case("16 parallel requests, sampled and greedy", 16, (64, 64), (128, 128), 16),
    "context": Case("a decode step at a long and at a short context", 16, (16, 1024), (32, 32), 16),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in order of arrival: prompts as ids, and how many tokens each generates, EOS or not."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    slots: int

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + output for prompt, output in zip(self.prompts, self.outputs, strict=True))


def synthetic(case: Case, vocab_size: int, seed: int = 0) -> Workload:
    """Random ids; the same for the same seed, whatever machine draws them."""
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(case.prompt_len[0], case.prompt_len[1] + 1, case.requests)
    outputs = rng.integers(case.output_len[0], case.output_len[1] + 1, case.requests)
    if case.lengths:
        few = case.lengths[: case.requests]
        prompt_lens, outputs = (np.array(column) for column in zip(*few, strict=True))
    prompts = tuple(tuple(rng.integers(0, vocab_size, length).tolist()) for length in prompt_lens.tolist())
    return Workload(prompts, tuple(outputs.tolist()), case.slots)


def given(case: Case, prompts: Sequence[Sequence[int]], seed: int = 0) -> Workload:
    """Prompts from elsewhere, as ids; the case says how many tokens each generates, and the slots."""
    outputs = np.random.default_rng(seed).integers(case.output_len[0], case.output_len[1] + 1, len(prompts))
    return Workload(tuple(tuple(prompt) for prompt in prompts), tuple(outputs.tolist()), case.slots)


def parse_range(text: str) -> Range:
    """`"16:512"` is (16, 512), `"64"` is (64, 64).

    Raises:
      ValueError: not such a range of positive numbers.
    """
    ends = text.split(":")
    if len(ends) > 2 or not all(end.isdecimal() and int(end) for end in ends) or int(ends[0]) > int(ends[-1]):
        raise ValueError(f"{text!r} must be a length or a range of lengths; try 64 or 16:512")
    return int(ends[0]), int(ends[-1])


def arrivals(requests: int, rate: float, seed: int = 0) -> Sequence[float]:
    """Seconds at which requests come: a Poisson process of ``rate`` a second, or all at 0 for rate 0."""
    if rate <= 0:
        return [0.0] * requests
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests)).tolist()
