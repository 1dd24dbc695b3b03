"""Ctrl-C at any line of a step: either nothing is lost, or the engine says that it cannot go on.

Every line would take long; every few of them are tried, of a step of each kind.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.packing import Packer
from tests.models_tiny import SMALL, few_shapes, golden, is_whole, tiny

pytestmark = pytest.mark.one_python

CASES = golden("llama", "golden_float32")
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
TIGHT: dict[str, Any] = {**SMALL, "max_num_seqs": 6, "decode_steps": 2, "num_blocks": 30, "preemption_mode": "swap"}
HOME = jpaged.__file__.removesuffix("__init__.py")
ROOMS = (
    "engine",
    "scheduler",
    "seats",
    "ledger",
    "schedule",
    "prefix",
    "swap",
    "packing",
    "reading",
    "request",
    "stats",
)
SHORT_OF_MEMORY = frozenset(
    [
        "_pause",
        "_vacate",
        "_expire",
        "abort",
        "store",
        "lay_out",
        "take",
        "put",
        "get",
        "discard",
        "discards",
        "_discard",
        "arrived",
        "arrive",
        "fetch",
        "evict",
        "want",
        "unwant",
        "lose",
        "keeps",
        "release",
        "_forget",
        "_makes_room",
    ]
)
FILES = {HOME + name + ".py" for name in ROOMS}


class At:
    """Raises KeyboardInterrupt once, at the so-manyth line that runs in the files of a step, or of functions there."""

    def __init__(self, line: int, functions: frozenset[str] | None = None):
        self.left, self._functions = line, functions

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in FILES or (self._functions is not None and code.co_name not in self._functions):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


class Clock:
    """Stands still until it is told to jump."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fresh(like: LLM | None, **settings: Any) -> LLM:
    """An engine with what another one has compiled."""
    llm = few_shapes(LLM(tiny("llama"), **settings))
    if like is not None:
        llm.engine.steps = llm.engine.swapper._steps = like.engine.steps
    return llm


def served(llm: LLM, params: SamplingParams, at: At, steps: range, deadline: int, *, gives_up: bool) -> bool:
    """Serves a request for each case, the last with a deadline that passes before the so-manyth step. One of the steps
    is interrupted; then all goes on, or everybody gives up. Asserts that all is told; returns whether it was
    interrupted."""
    engine, told, interrupted = llm.engine, {}, False
    clock = engine._clock = Clock()
    prompts = [case["prompt"] for case in CASES]
    requests = [*llm.make_requests(prompts[:-1], params), *llm.make_requests(prompts[-1:], params, timeout=1.0)]
    engine.add(*requests)
    step = 0
    while engine.has_work:
        step += 1
        clock.now += 2.0 * (step == deadline)
        try:
            sys.settrace(at if step in steps else None)
            changed = engine.step()
        except KeyboardInterrupt:
            sys.settrace(None)
            interrupted = True
            if gives_up:
                engine.abort(*requests)
            continue
        finally:
            sys.settrace(None)
        for sample in changed:
            told[sample] = len(sample.token_ids), sample.finish_reason
    if engine.failure is None:
        for request, case in zip(requests, CASES, strict=True):
            (sample,) = request.samples
            if sample.finish_reason != "abort":
                assert told[sample] == (len(sample.token_ids), sample.finish_reason)
            whole = params.max_tokens if sample.finish_reason == "length" else len(sample.token_ids)
            assert sample.token_ids == case["greedy"][:whole]
        if not (interrupted and gives_up):
            assert [request.samples[0].finish_reason for request in requests] == ["length", "length", "timeout"]
        assert is_whole(llm)
        engine.check()
    return interrupted


def every_few_lines(
    settings: dict[str, Any], params: SamplingParams, few: int, steps: range, deadline: int, functions=None
) -> int:
    """Interrupts a run at every few lines, each time another one; returns after how many lines there was none left."""
    llm, line, failures = fresh(None, **settings), 1, 0
    while served(llm, params, At(line, functions), steps, deadline, gives_up=line // few % 2 == 1):
        if llm.engine.failure is not None:
            failures += 1
            with pytest.raises(RuntimeError, match="make a new one"):
                llm.engine.step()
            llm = fresh(llm, **settings)
        line += few
    assert failures > 0
    return line


@pytest.mark.usefixtures("annotations_unchecked")
def test_nothing_is_lost_or_the_engine_says_so():
    assert every_few_lines({**SMALL, "num_blocks": 40}, GREEDY, 7, range(3, 4), deadline=3) > 300


@pytest.mark.every_setting
@pytest.mark.usefixtures("annotations_unchecked")
def test_the_same_where_memory_is_short():
    assert every_few_lines(TIGHT, LONGER, 101, range(1, 1000), 40, SHORT_OF_MEMORY) > 300


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_copy_that_was_planned_and_that_nobody_wants_any_more_is_not_made(monkeypatch: pytest.MonkeyPatch):
    llm, pack, interrupted = fresh(None, **TIGHT), Packer.pack, []

    def interrupting(self: Packer, planned: Any, shape: Any) -> Any:
        if planned.stores and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return pack(self, planned, shape)

    monkeypatch.setattr(Packer, "pack", interrupting)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([case["prompt"] for case in CASES], LONGER)
    assert interrupted and is_whole(llm)
