"""Engines take turns on one workload, after a run each that warms them up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from common import usage
from jpaged.llm import LLM

from . import paged
from .contiguous import StaticBatches
from .measure import Run
from .paged import GREEDY
from .peers import Peer
from .results import Results
from .workloads import Workload

SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95, seed=0)


def throughput(results: Results, llm: LLM, peer: Peer | None, repeats: int, done: Callable[[], None]) -> None:
    """Fills ``results``: paged engine, static batches, peer, in turn.

    Raises:
      RuntimeError: see `nothing_compiles`.
      ValueError: see `paged.run`.
      PeerError: the peer ended.
    """
    workload = results.workload
    static = _static(llm, workload)
    paged.run(llm, workload)
    done()
    static.run(workload)
    done()
    for _ in range(repeats):
        with nothing_compiles():
            results.paged.append(paged.run(llm, workload))
            done()
            results.baseline.append(static.run(workload))
            done()
        if peer is not None:
            seconds, results.peer_outputs = peer.run()
            results.peer_seconds.append(seconds)
            done()


def sampling(results: Results, llm: LLM, repeats: int, done: Callable[[], None]) -> list[Run]:
    """Fills ``results`` with greedy runs and returns as many sampled ones, in turn."""
    for warm in (GREEDY, SAMPLED):
        paged.run(llm, results.workload, warm)
        done()
    sampled = []
    for _ in range(repeats):
        with nothing_compiles():
            results.paged.append(paged.run(llm, results.workload))
            sampled.append(paged.run(llm, results.workload, SAMPLED))
            done()
    return sampled


def latency(results: Results, llm: LLM, arrivals: Sequence[float], repeats: int, done: Callable[[], None]) -> None:
    """Fills ``results``: paged engine and static batches, in turn, with requests that come at these times.

    Which shapes a run meets depends on its timing, so all are compiled before.
    """
    workload = results.workload
    static = _static(llm, workload)
    llm.warmup()
    paged.run(llm, workload)
    done()
    static.warmup(workload)
    done()
    for _ in range(repeats):
        with nothing_compiles():
            results.paged.append(paged.run(llm, workload, arrivals=arrivals))
            done()
            results.baseline.append(static.run(workload, arrivals))
            done()


def contexts(
    llm: LLM, workload: Workload, lengths: tuple[int, int], steps: int, repeats: int, done: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Seconds of a decode step after two lengths of context, in turn.

    The step is measured while contexts grow from the length by ``steps``, so half of it is taken off the prompts.
    """
    short, long = ([prompt[: max(1, length - steps // 2)] for prompt in workload.prompts] for length in lengths)
    found: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for prompts, seconds in zip((short, long), found, strict=True):
            once = paged.step_seconds(llm, prompts, steps)
            done()
            if repeat:
                seconds.append(once)
    return found


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    """A context in which times are taken.

    Raises:
      RuntimeError: something was compiled in it, so the times mean nothing: warming up has missed a shape.
    """
    with usage.compiled() as found:
        yield
    if found:
        raise RuntimeError(f"{', '.join(found)} compiled in a timed run; warming up has missed a shape")


def _static(llm: LLM, workload: Workload) -> StaticBatches:
    """The baseline on the same model, with a cache as long as the workload needs."""
    config = llm.config
    return StaticBatches(
        llm.engine.loaded,
        slots=workload.slots,
        max_len=workload.longest,
        dtype=config.dtype,
        decode_steps=config.decode_steps,
    )
