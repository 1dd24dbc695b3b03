"""Engines take turns on one workload, after a run each that warms them up."""

from __future__ import annotations

from collections.abc import Callable

from jpaged.config import SamplingParams
from jpaged.llm import LLM

from . import paged
from .contiguous import StaticBatches
from .measure import Run
from .paged import GREEDY, Clock
from .peers import Peer
from .report import Results
from .workloads import Workload

ClockOf = Callable[[LLM], Clock]


def throughput(
    results: Results, llm: LLM, clock_of: ClockOf, peer: Peer | None, repeats: int, done: Callable[[], None]
) -> None:
    """Fills ``results``: paged engine, static batches, peer, in turn.

    Raises:
      RuntimeError: something compiled in a timed run, so its time means nothing.
      PeerError: the peer ended.
    """
    workload, config = results.workload, llm.config
    static = StaticBatches(
        llm.engine.loaded,
        slots=workload.slots,
        max_len=workload.longest,
        dtype=config.dtype,
        decode_steps=config.decode_steps,
    )
    paged.run(llm, workload, clock_of(llm))
    done()
    static.run(workload)
    done()
    for _ in range(repeats):
        results.paged.append(timed(llm, workload, clock_of))
        done()
        results.baseline.append(static.run(workload))
        done()
        if peer is not None:
            seconds, results.peer_outputs = peer.run()
            results.peer_seconds.append(seconds)
            done()


def sampling(
    results: Results, llm: LLM, clock_of: ClockOf, params: SamplingParams, repeats: int, done: Callable[[], None]
) -> list[Run]:
    """Fills ``results`` with greedy runs and returns as many sampled ones, in turn."""
    for warm in (GREEDY, params):
        paged.run(llm, results.workload, clock_of(llm), warm)
        done()
    sampled = []
    for _ in range(repeats):
        results.paged.append(timed(llm, results.workload, clock_of))
        sampled.append(timed(llm, results.workload, clock_of, params))
        done()
    return sampled


def contexts(
    llm: LLM, workload: Workload, lengths: tuple[int, int], steps: int, repeats: int, done: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Seconds of a decode step after two lengths of context, in turn.

    The step is measured while contexts grow from the length by ``steps``, so half of it is taken off the prompts.
    """
    short, long = (
        [prompt[: max(1, length - steps // 2)] for prompt in workload.prompts] for length in lengths
    )
    found: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for prompts, seconds in zip((short, long), found, strict=True):
            once = paged.step_seconds(llm, prompts, steps)
            done()
            if repeat:
                seconds.append(once)
    return found


def timed(llm: LLM, workload: Workload, clock_of: ClockOf, params: SamplingParams = GREEDY) -> Run:
    """A run in which nothing may compile."""
    before = llm.engine.steps.traces.total()
    run = paged.run(llm, workload, clock_of(llm), params)
    if llm.engine.steps.traces.total() != before:
        raise RuntimeError("a step was compiled in a timed run; its shape was not among those that were warmed up")
    return run
