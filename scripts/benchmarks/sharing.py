"""What sharing saves: blocks that are in use, and blocks that would be if nobody shared, step by step; and its speed.

As in the paper (PagedAttention, SOSP'23, section 6.3), the saving is the blocks saved by sharing over the blocks
without sharing, here over all steps of a run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from jpaged.config import BeamSearchParams, SamplingParams
from jpaged.intake import AnyRequest
from jpaged.llm import LLM

from . import paged
from .turns import nothing_compiles

# Figures of the paper, its figure 15 and the text below, for 2 to 6 sequences: the least and the most saved.
PAPER = {
    "parallel": {"alpaca": (0.061, 0.098), "sharegpt": (0.162, 0.305)},
    "beam": {"alpaca": (0.376, 0.552), "sharegpt": (0.443, 0.663)},
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is measured.

    Attributes:
      case: "parallel", so many samples of each prompt; "beam", so many beams; "prefix", requests that begin alike.
      width: Samples or beams; 1 for "prefix".
      requests, prompt_len, output_len: As of a workload.
      prefix_len: Tokens that all prompts begin with.
    """

    case: str
    width: int
    requests: int
    prompt_len: int
    output_len: int
    prefix_len: int = 0


@dataclasses.dataclass
class Found:
    """What came of it.

    Attributes:
      asked: The question.
      used, unshared: Blocks in use, and what they would be without sharing, summed over steps.
      peak, unshared_peak: The same, the most after any step.
      prefill_tokens: Prompt tokens that were computed.
      output_tokens: Tokens that were generated.
      seconds, apart_seconds: Of each timed run, with and without sharing.
    """

    asked: Asked
    used: int = 0
    unshared: int = 0
    peak: int = 0
    unshared_peak: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    apart_seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def saved(self) -> float:
        return 1 - self.used / self.unshared


def measure(llm: LLM, asked: Asked, repeats: int, seed: int, done: Callable[[], None]) -> Found:
    """Counts blocks in a run of its own, which warms up; then runs take turns, with and without sharing.

    Without sharing, "parallel" and "prefix" are requests that may not share; "beam" is as many greedy requests, which
    is what as many rows cost that do not search.
    """
    rng, vocab = np.random.default_rng(seed), llm.engine.loaded.model.spec.vocab_size
    prefix = rng.integers(0, vocab, asked.prefix_len).tolist()
    prompts = [prefix + rng.integers(0, vocab, asked.prompt_len).tolist() for _ in range(asked.requests)]
    found = Found(asked)
    _count(llm, _shared(llm, asked, prompts), found)
    done()
    _run(llm, _apart(llm, asked, prompts))
    done()
    for _ in range(repeats):
        with nothing_compiles():
            found.seconds.append(_run(llm, _shared(llm, asked, prompts)))
            found.apart_seconds.append(_run(llm, _apart(llm, asked, prompts)))
        done()
    return found


def _shared(llm: LLM, asked: Asked, prompts: Sequence[Sequence[int]]) -> Sequence[AnyRequest]:
    if asked.case == "beam":
        search = BeamSearchParams(beam_width=asked.width, max_tokens=asked.output_len, ignore_eos=True)
        return llm.make_searches(paged.salted(prompts), search)
    sampled = SamplingParams(
        n=asked.width, temperature=float(asked.width > 1), seed=0, max_tokens=asked.output_len, ignore_eos=True
    )
    return llm.make_requests(paged.salted(prompts), sampled)


def _apart(llm: LLM, asked: Asked, prompts: Sequence[Sequence[int]]) -> Sequence[AnyRequest]:
    params = SamplingParams(
        temperature=float(asked.case == "parallel"), seed=0, max_tokens=asked.output_len, ignore_eos=True
    )
    return [
        request
        for prompt in prompts
        for _ in range(asked.width)
        for request in llm.make_requests(paged.salted([prompt]), params)
    ]


def _run(llm: LLM, requests: Sequence[AnyRequest]) -> float:
    begin = time.perf_counter()
    llm.engine.add(*requests)
    while llm.engine.has_work:
        llm.engine.step()
    return time.perf_counter() - begin


def _count(llm: LLM, requests: Sequence[AnyRequest], found: Found) -> None:
    engine, size = llm.engine, llm.config.block_size
    computed, made = engine.stats.prefill_tokens, engine.stats.decode_tokens
    engine.add(*requests)
    while engine.has_work:
        engine.step()
        memory = engine.state.paged
        unshared = int((-(-np.asarray(memory.lengths_S) // size)).sum())
        if not unshared:
            continue
        used = llm.config.num_blocks - int(memory.pool.num_free) - engine.scheduler.idle_blocks
        found.used, found.unshared = found.used + used, found.unshared + unshared
        found.peak, found.unshared_peak = max(found.peak, used), max(found.unshared_peak, unshared)
    found.prefill_tokens = engine.stats.prefill_tokens - computed
    found.output_tokens = engine.stats.decode_tokens - made
