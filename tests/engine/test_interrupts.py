"""Ctrl-C at any line of a step: either nothing is lost, or the engine says that it cannot go on."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

import jpaged
from jpaged import LLM, SamplingParams
from tests.models_tiny import SMALL, few_shapes, golden, tiny

pytestmark = pytest.mark.one_python

CASES = golden("llama", "golden_float32")[:2]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
HOME = jpaged.__file__.removesuffix("__init__.py")
FILES = {HOME + name + ".py" for name in ("engine", "scheduler", "seats", "prefix", "swap", "packing", "reading")}


class At:
    """Raises KeyboardInterrupt once, at the so-manyth line that runs in the files of a step."""

    def __init__(self, line: int):
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.fixture(scope="module")
def lasting() -> LLM:
    return few_shapes(LLM(tiny("llama"), **SMALL, num_blocks=40))


def served(llm: LLM, at: At | None) -> tuple[list[list[int]], bool]:
    """What two requests get if one step of theirs is interrupted and the next call goes on; and if it was."""
    engine = llm.engine
    requests = llm.make_requests([case["prompt"] for case in CASES], GREEDY)
    told: dict[Any, int] = {}
    engine.add(*requests)
    steps, interrupted = 0, False
    while engine.has_work:
        steps += 1
        try:
            if at is not None and steps == 3:
                sys.settrace(at)
            changed = engine.step()
        except KeyboardInterrupt:
            interrupted = True
            continue
        finally:
            sys.settrace(None)
        for sample in changed:
            told[sample] = len(sample.token_ids)
    if engine.failure is None:
        assert all(told[request.samples[0]] == len(request.samples[0].token_ids) for request in requests)
        engine.check()
    return [request.samples[0].token_ids for request in requests], interrupted


@pytest.mark.usefixtures("annotations_unchecked")
def test_nothing_is_lost_or_the_engine_says_so(lasting: LLM, monkeypatch: pytest.MonkeyPatch):
    wanted = [case["greedy"][:10] for case in CASES]
    llm, lines, failures = lasting, 1, 0
    while True:
        tokens, interrupted = served(llm, At(lines))
        if not interrupted:
            break
        if llm.engine.failure is None:
            assert tokens == wanted, f"at line {lines}"
        else:
            failures += 1
            with pytest.raises(RuntimeError, match="make a new one"):
                llm.engine.step()
            steps = llm.engine.steps  # compiled already
            llm = few_shapes(LLM(tiny("llama"), **SMALL, num_blocks=40))
            llm.engine.steps = steps
            llm.engine.swapper._steps = steps
        lines += 7
    assert lines > 300 and failures > 0
