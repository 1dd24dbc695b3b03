"""The check of memory against books finds each fault that it knows, put there on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine import Engine
from jpaged.request import Request
from tests.models_tiny import SMALL, few_shapes, golden, tiny

pytestmark = [pytest.mark.xdist_group("audit"), pytest.mark.one_python]

CASES = golden("llama", "golden_float32")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """In the middle of two requests, with every step read."""
    llm = few_shapes(LLM(tiny("llama"), **SMALL))
    engine = llm.engine
    engine.add(*llm.make_requests([CASES[1]["prompt"], CASES[0]["prompt"]], GREEDY))
    while not engine.stats.decode_tokens >= 4:
        engine.step()
    while engine._in_flight:
        engine._harvest()
    engine._changed.clear()
    assert int((engine.state.paged.lengths_S > 0).sum()) == 2
    return engine


def pool(state: Any, **changes: Any) -> Any:
    return state.replace(paged=state.paged.replace(pool=state.paged.pool.replace(**changes)))


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lost": (lambda s: pool(s, num_free=s.paged.pool.num_free - 1), "are not those without references"),
    "one holder too many": (
        lambda s: pool(s, refs_N=s.paged.pool.refs_N.at[s.paged.tables_SM[0, 0]].add(1)),
        "have other references than holders",
    ),
    "a token without a block": (
        lambda s: s.replace(paged=s.paged.replace(lengths_S=s.paged.lengths_S.at[0].add(8))),
        "tables do not have the blocks that lengths say",
    ),
    "another's block": (
        lambda s: s.replace(
            paged=s.paged.replace(tables_SM=s.paged.tables_SM.at[0, :2].set(s.paged.tables_SM[0, 1::-1]))
        ),
        "slot 0 has other blocks than its sequence holds",
    ),
    "more tokens than booked": (
        lambda s: s.replace(paged=s.paged.replace(lengths_S=s.paged.lengths_S.at[0].set(100))),
        "more than the books allow",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str):
    spoil, said = FAULTS[name]
    engine.check()
    monkeypatch.setattr(engine, "_state", spoil(engine.state))
    with pytest.raises(RuntimeError, match=said):
        engine.check()


def test_books_that_differ_at_idle_are_found(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    while engine.has_work:
        engine.step()
    engine.check()
    monkeypatch.setattr(engine.scheduler.ledger, "saved", 3)
    with pytest.raises(RuntimeError, match="at idle"):
        engine.check()


def test_every_step_is_checked_where_that_was_asked_for(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    while engine.has_work:
        engine.step()
    checks = {}
    for asked in (False, True):
        checked, steps = [], 0
        monkeypatch.setattr(engine, "check", lambda checked=checked: checked.append(1))
        monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, check_every_step=asked))
        engine.add(
            Request(
                id=99,
                prompt=None,
                prompt_token_ids=[1, 2, 3],
                params=GREEDY,
                tokenizer=None,
                stop_ids=frozenset(),
                max_tokens=8,
            )
        )
        while engine.has_work:
            engine.step()
            steps += 1
        checks[asked] = len(checked) - steps  # these are by the fixture of all tests here
    assert checks == {False: 1, True: steps} and steps > 3  # at idle it is checked in any case
