"""Runs a workload through the paged engine and notes when what came. Greedy, to the exact length, unless told else."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from jpaged.config import SamplingParams
from jpaged.llm import LLM
from jpaged.request import Request, Sample

from .measure import Run, Served
from .workloads import Workload

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Clock(Protocol):
    """Steps an engine and times prefill and decode: `common.usage.Clock`."""

    def step(self) -> list[Sample]: ...

    @property
    def prefill_rate(self) -> float | None: ...

    @property
    def decode_rate(self) -> float | None: ...


def requests(llm: LLM, workload: Workload, params: SamplingParams = GREEDY) -> list[Request]:
    """Checked requests.

    Raises:
      ValueError: naming each that the engine cannot serve.
    """
    wanted = [dataclasses.replace(params, max_tokens=output) for output in workload.outputs]
    return llm.make_requests([list(prompt) for prompt in workload.prompts], wanted)


def run(
    llm: LLM,
    workload: Workload,
    clock: Clock,
    params: SamplingParams = GREEDY,
    arrivals: Sequence[float] | None = None,
) -> Run:
    """Serves the workload.

    Args:
      llm: The engine, idle.
      workload: What to serve.
      clock: Steps the engine.
      params: How to sample.
      arrivals: Seconds at which each request comes, ascending; None: all at once.
    """
    waiting = list(zip(arrivals or [0.0] * len(workload.prompts), requests(llm, workload, params), strict=True))
    served = {request.samples[0]: Served(arrival) for arrival, request in waiting}
    waiting.reverse()
    llm.engine.stats.reset()
    begin = time.perf_counter()
    while waiting or llm.engine.has_work:
        while waiting and waiting[-1][0] <= time.perf_counter() - begin:
            llm.engine.add(waiting.pop()[1])
        if not llm.engine.has_work:
            time.sleep(max(0.0, waiting[-1][0] - (time.perf_counter() - begin)))
            continue
        changed = clock.step()
        now = time.perf_counter() - begin
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
      ValueError: the engine has no room for that.
    """
    config, count = llm.config, len(prompts)
    # Until the last prompt is computed, the first sequences get a token a step; and some dispatches are in flight.
    prefills = sum(map(len, prompts)) // max(1, config.max_num_batched_tokens - count) + count
    wanted = dataclasses.replace(GREEDY, max_tokens=prefills + steps + 4 * config.decode_steps)
    running = llm.make_requests([list(prompt) for prompt in prompts], wanted)
    try:
        for request in running:
            llm.engine.add(request)
        while not all(request.samples[0].token_ids for request in running):
            llm.engine.step()
        begin, before, made = time.perf_counter(), _tokens(running), 0
        while made < steps * count:
            llm.engine.step()
            if any(request.finished for request in running):
                raise ValueError(f"{count} sequences do not fit at once; try more num_blocks or max_num_seqs")
            made = _tokens(running) - before
        return (time.perf_counter() - begin) * count / made
    finally:
        for request in running:
            llm.engine.abort(request)
        while llm.engine.has_work:
            llm.engine.step()


def _tokens(running: Sequence[Request]) -> int:
    return sum(len(request.samples[0].token_ids) for request in running)
