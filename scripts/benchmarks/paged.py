"""Runs a workload through the paged engine and notes when what came. Greedy, to the exact length, unless told else.

A run finds nothing in the prefix cache of what another run has left there: each has a salt of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

from common.usage import Clock
from jpaged.config import SamplingParams
from jpaged.intake import AnySample
from jpaged.llm import LLM
from jpaged.request import Request

from .measure import Run, Served
from .workloads import Workload

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

_salts = itertools.count()


def requests(llm: LLM, workload: Workload, params: SamplingParams = GREEDY) -> list[Request]:
    """Checked requests.

    Raises:
      ValueError: naming each that the engine cannot serve.
    """
    wanted = [dataclasses.replace(params, max_tokens=output) for output in workload.outputs]
    return llm.make_requests(salted(workload.prompts), wanted)


def salted(prompts: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """Prompts that share the blocks of each other, and of nobody else."""
    salt = str(next(_salts))
    return [{"prompt_token_ids": list(prompt), "cache_salt": salt} for prompt in prompts]


def run(llm: LLM, workload: Workload, params: SamplingParams = GREEDY, arrivals: Sequence[float] | None = None) -> Run:
    """Serves the workload.

    Args:
      llm: The engine, idle; it is idle again afterwards.
      workload: What to serve.
      params: How to sample.
      arrivals: Seconds at which each request comes, ascending; None: all at once.

    Raises:
      ValueError: the engine cannot serve a request, or one failed: the model's scores may be NaN.
    """
    asked = requests(llm, workload, params)
    waiting = list(zip(arrivals or [0.0] * len(asked), asked, strict=True))
    served: dict[AnySample, Served] = {request.samples[0]: Served(arrival) for arrival, request in waiting}
    waiting.reverse()
    llm.engine.stats.reset()
    clock = Clock(llm.engine)
    begin = time.perf_counter()
    while waiting or llm.engine.has_work:
        due = []
        while waiting and waiting[-1][0] <= time.perf_counter() - begin:
            due.append(waiting.pop()[1])
        if due:
            llm.engine.add(*due)  # together, for each call copies the queue
        if not llm.engine.has_work:
            time.sleep(max(0.0, waiting[-1][0] - (time.perf_counter() - begin)))
            continue
        changed = clock.step()
        now = time.perf_counter() - begin
        _check(llm, asked, changed)
        for sample in changed:
            one = served[sample]
            one.receive(now, sample.token_ids[len(one.tokens) :])
    stats = llm.engine.stats
    return Run(
        list(served.values()),
        max(one.deltas[-1][0] for one in served.values()),
        prefill_rate=clock.prefill_rate,
        decode_rate=clock.decode_rate,
        blocks_peak=stats.blocks_peak,
        kv_share=stats.kv_share,
    )


def step_seconds(llm: LLM, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """Seconds of one decode step of all prompts' sequences together, once all prompts are computed.

    Measured over ``steps`` steps, rounded up to whole dispatches; then everything is aborted.

    Raises:
      ValueError: the engine has no room for that, or a request failed: the model's scores may be NaN.
    """
    config, count = llm.config, len(prompts)
    # Until the last prompt is computed, the first sequences get a token a step; and some dispatches are in flight.
    prefills = sum(map(len, prompts)) // max(1, config.max_num_batched_tokens - count) + count
    wanted = dataclasses.replace(GREEDY, max_tokens=prefills + steps + 4 * config.decode_steps)
    running = llm.make_requests(salted(prompts), wanted)
    try:
        llm.engine.add(*running)
        while not all(request.samples[0].token_ids for request in running):
            _check(llm, running, llm.engine.step())
        begin, before, made = time.perf_counter(), _tokens(running), 0
        while made < steps * count:
            _check(llm, running, llm.engine.step())
            if any(request.finished for request in running):
                raise ValueError(f"{count} sequences do not fit at once; try more num_blocks or max_num_seqs")
            made = _tokens(running) - before
        return (time.perf_counter() - begin) * count / made
    finally:
        _let_go(llm, running)


def _check(llm: LLM, running: Sequence[Request], changed: Sequence[AnySample]) -> None:
    """Whether a step went well for all whom it changed. If not, the engine is left idle.

    Raises:
      ValueError: a request failed, so there is nothing to measure, and some of its tokens will never come.
    """
    for sample in changed:
        if sample.finish_reason == "error":
            _let_go(llm, running)
            raise ValueError(f"a request failed, so nothing can be measured: {sample.request.error}")


def _let_go(llm: LLM, running: Sequence[Request]) -> None:
    llm.engine.abort(*running)
    while llm.engine.has_work:
        llm.engine.step()


def _tokens(running: Sequence[Request]) -> int:
    return sum(len(request.samples[0].token_ids) for request in running)
