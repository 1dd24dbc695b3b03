"""Who goes first, who is out of time, and what requests say of themselves, by a clock that the test sets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine import Engine
from jpaged.intake import AnyRequest
from jpaged.request import Request
from tests.models_tiny import SMALL, few_shapes, tiny

pytestmark = [pytest.mark.xdist_group("priorities"), pytest.mark.one_python]

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SIZES: dict[str, Any] = {**SMALL, "max_num_seqs": 1, "decode_steps": 2}


@pytest.fixture(scope="module")
def ranked() -> LLM:
    return few_shapes(LLM(tiny("llama"), **SIZES, scheduling_policy="priority", priority_ageing=10))


def order(engine: Engine, *requests: Request) -> list[int]:
    """The requests in the order in which they end."""
    ended: list[AnyRequest] = []
    while engine.has_work:
        ended += [sample.request for sample in engine.step() if sample.finish_reason]
    return [requests.index(request) for request in ended if isinstance(request, Request)]


@pytest.fixture
def clock(ranked: LLM, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The engine's time, to be set."""
    now = [0.0]
    monkeypatch.setattr(ranked.engine, "_clock", lambda: now[0])
    return now


def test_the_lowest_priority_comes_first_and_equals_as_they_came(ranked: LLM, clock: list[float]):
    requests = ranked.make_requests([[1], [2], [3], [4]], ONE, priority=[2, 0, -1, 0])
    ranked.engine.add(*requests)
    assert order(ranked.engine, *requests) == [2, 1, 3, 0]


def test_who_has_waited_for_long_enough_comes_first(ranked: LLM, clock: list[float]):
    (patient,) = ranked.make_requests([1], ONE, priority=3)
    ranked.engine.add(patient)
    clock[0] = 29.0
    (early,) = ranked.make_requests([2], ONE, priority=0)
    clock[0] = 31.0
    ranked.engine.add(early)
    assert order(ranked.engine, patient, early) == [0, 1]
    (patient,) = ranked.make_requests([1], ONE, priority=3)
    ranked.engine.add(patient)
    clock[0] = 60.0
    (early,) = ranked.make_requests([2], ONE, priority=0)
    ranked.engine.add(early)
    assert order(ranked.engine, patient, early) == [1, 0]


@pytest.mark.usefixtures("annotations_unchecked")
def test_priorities_are_refused_where_they_mean_nothing(ranked: LLM):
    wrong: list[tuple[LLM, Any, str]] = [
        (LLM(tiny("llama"), **SIZES), 1, "priority=1 means nothing with scheduling_policy='fcfs'"),
        (ranked, [1], "there are 2 prompts and 1 priorities"),
        (ranked, 1.5, "priority=1.5 must be an integer, or a list of such"),
        (ranked, "12", "priority='12' must be an integer"),
        (ranked, [1, 10**400], "must be from -2147483648 to 2147483647"),
    ]
    for llm, given, said in wrong:
        with pytest.raises(ValueError, match=said):
            llm.generate([[1], [2]], ONE, priority=given)
    timeouts: list[Any] = [0, -1, float("nan"), "soon"]
    for timeout in timeouts:
        with pytest.raises(ValueError, match="timeout="):
            ranked.generate([1], ONE, timeout=timeout)
    for salt in ("", 5):
        with pytest.raises(ValueError, match="cache_salt"):
            ranked.generate({"prompt_token_ids": [1], "cache_salt": salt}, ONE)


def test_who_is_out_of_time_ends_wherever_it_stands(ranked: LLM, clock: list[float]):
    running, waiting, later = ranked.make_requests([[1], [2], [3]], GREEDY, timeout=5.0)
    ranked.engine.add(running, waiting)
    clock[0] = 4.0
    ranked.engine.add(later)
    while len(running.samples[0].token_ids) < 3:
        ranked.engine.step()
    clock[0] = 5.0
    assert {sample.request for sample in ranked.engine.step()} >= {running, waiting}
    assert running.samples[0].finish_reason == waiting.samples[0].finish_reason == "timeout"
    assert 3 <= len(running.samples[0].token_ids) < 32 and waiting.samples[0].token_ids == []
    order(ranked.engine, later)
    assert later.samples[0].finish_reason == "length" and ranked.engine.scheduler.is_idle


def test_requests_say_when_what_happened_to_them(ranked: LLM, clock: list[float]):
    ranked.engine.stats.reset()
    first, second = ranked.make_requests([[1], [2]], dataclasses.replace(ONE, max_tokens=3))
    clock[0] = 1.0
    ranked.engine.add(first, second)
    while ranked.engine.has_work:
        clock[0] += 1.0
        ranked.engine.step()
    one, other = first.metrics, second.metrics
    assert one is not None and other is not None
    assert one.arrived == 1.0 and one.queue_seconds == 1.0 and one.first_token_seconds is not None
    assert other.queue_seconds is not None and other.queue_seconds > 1.0
    assert (one.tokens, one.preemptions, one.num_cached_tokens) == (3, 0, 0)
    stats = ranked.engine.stats
    assert stats.queue.count == stats.first_token.count == stats.inter_token.count == 2
    assert stats.queue.total == 1.0 + other.queue_seconds
    assert stats.last is not None and (stats.last.running, stats.last.waiting) == (0, 0)
