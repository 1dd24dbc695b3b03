"""Runs a workload through the paged engine and notes when what came. Greedy and to the exact length, unless told else."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from jpaged.config import SamplingParams
from jpaged.llm import LLM
from jpaged.request import Request, Sample

from .measure import Run, Served
from .workloads import Workload

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Clock:
    """Splits the time between the steps that are read into those that computed prompt tokens and those that did not.

    The device runs steps one after another and the engine waits for each, so that the time from one reading to the next
    is that of the step.
    """

    def __init__(self, llm: LLM):
        self._stats = llm.engine.stats
        self._stats.reset()
        self._seen = (0, 0, 0)
        self._last = time.perf_counter()
        self.prefill, self.decode = (0, 0.0), (0, 0.0)

    def tick(self) -> float:
        """Call after each `Engine.step`. Returns the time."""
        now = time.perf_counter()
        stats = self._stats
        steps, prompt, sampled = self._seen
        if stats.steps > steps:
            seconds, self._last = now - self._last, now
            if stats.prefill_tokens > prompt:
                self.prefill = (self.prefill[0] + stats.prefill_tokens - prompt, self.prefill[1] + seconds)
            else:
                self.decode = (self.decode[0] + stats.decode_tokens - sampled, self.decode[1] + seconds)
            self._seen = (stats.steps, stats.prefill_tokens, stats.decode_tokens)
        return now

    def idle(self) -> None:
        """Nothing ran until now."""
        self._last = time.perf_counter()


def requests(llm: LLM, workload: Workload, params: SamplingParams = GREEDY) -> list[Request]:
    """Checked requests.

    Raises:
      ValueError: naming each that the engine cannot serve.
    """
    wanted = [dataclasses.replace(params, max_tokens=output) for output in workload.outputs]
    return llm.make_requests([list(prompt) for prompt in workload.prompts], wanted)


def run(
    llm: LLM, workload: Workload, params: SamplingParams = GREEDY, arrivals: Sequence[float] | None = None
) -> Run:
    """Serves the workload.

    Args:
      llm: The engine, idle.
      workload: What to serve.
      params: How to sample.
      arrivals: Seconds at which each request comes, ascending; None: all at once.
    """
    waiting = list(zip(arrivals or [0.0] * len(workload.prompts), requests(llm, workload, params), strict=True))
    served = {request.samples[0]: Served(arrival) for arrival, request in waiting}
    begin, clock = time.perf_counter(), Clock(llm)
    waiting.reverse()
    while waiting or llm.engine.has_work:
        while waiting and waiting[-1][0] <= time.perf_counter() - begin:
            llm.engine.add(waiting.pop()[1])
        if not llm.engine.has_work:
            time.sleep(max(0.0, waiting[-1][0] - (time.perf_counter() - begin)))
            clock.idle()
            continue
        changed = llm.engine.step()
        now = clock.tick() - begin
        for sample in changed:
            _receive(served[sample], sample, now)
    stats = llm.engine.stats
    return Run(
        list(served.values()),
        max(one.deltas[-1][0] for one in served.values()),
        prefill=clock.prefill,
        decode=clock.decode,
        blocks_peak=stats.blocks_peak,
        kv_share=stats.kv_share,
    )


def step_seconds(llm: LLM, workload: Workload) -> float:
    """Seconds of one decode step of all requests together, prompts long since computed."""
    left = requests(llm, workload)
    for request in left:
        llm.engine.add(request)
    while not all(request.samples[0].token_ids for request in left):
        llm.engine.step()
    begin = now = time.perf_counter()
    before = sum(len(request.samples[0].token_ids) for request in left)
    while llm.engine.has_work:
        if llm.engine.step():
            now = time.perf_counter()
    made = sum(len(request.samples[0].token_ids) for request in left) - before
    return (now - begin) * len(left) / made


def _receive(one: Served, sample: Sample, now: float) -> None:
    one.receive(now, sample.token_ids[len(one.tokens) :])
