"""Several users of one engine, and what is left of it after an interrupt or a failure."""

import concurrent.futures
import dataclasses
import gc
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine import Telling
from jpaged.reading import Reader
from jpaged.request import Sample
from jpaged.scheduler import Scheduler
from tests.models_tiny import SMALL, golden, is_whole, tiny

pytestmark = [pytest.mark.xdist_group("sharing_an_engine"), pytest.mark.one_python]

CASES = golden("llama", "golden_float32")[:2]
PROMPTS = [case["prompt"] for case in CASES]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def warm() -> LLM:
    return LLM(tiny("llama"), **SMALL)


@pytest.fixture
def llm(warm: LLM) -> LLM:
    assert not warm.engine.has_work
    return warm


def test_two_streams_taking_turns_get_each_its_own(llm: LLM):
    streams, found = [llm.stream(prompt, GREEDY) for prompt in PROMPTS], [[], []]
    going = [0, 1]
    while going:
        for which in list(going):
            delta = next(streams[which], None)
            if delta is None:
                going.remove(which)
            else:
                found[which] += delta.token_ids
    assert found == [case["greedy"] for case in CASES]
    assert is_whole(llm)


def test_a_call_in_the_middle_of_a_stream_takes_nothing_from_it(llm: LLM):
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    (other,) = llm.generate(PROMPTS[1], GREEDY)
    deltas = [first, *stream]
    assert other.outputs[0].token_ids == CASES[1]["greedy"]
    assert [token for delta in deltas for token in delta.token_ids] == CASES[0]["greedy"]
    assert deltas[-1].finish_reason == "length"
    assert is_whole(llm)


def test_threads_get_each_its_own(llm: LLM):
    """All of them at once, over and over: a step that two of them read would give tokens twice, or to nobody."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [(which % 2, pool.submit(llm.generate, PROMPTS[which % 2], GREEDY)) for which in range(24)]
        for which, job in jobs:
            (output,) = job.result(timeout=300)
            assert output.outputs[0].token_ids == CASES[which]["greedy"]
    assert is_whole(llm)


def test_streams_of_threads_tell_each_token_and_each_end_once(llm: LLM):
    """Two samples that end together, so that the last step has more than one thing to tell."""
    params = dataclasses.replace(GREEDY, n=2)

    def told(which: int) -> tuple[dict[int, list[int]], list[int]]:
        tokens: dict[int, list[int]] = {0: [], 1: []}
        ends = []
        for delta in llm.stream(PROMPTS[which], params):
            tokens[delta.index] += delta.token_ids
            ends += [delta.index] if delta.finish_reason is not None else []
        return tokens, sorted(ends)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [(which % 2, pool.submit(told, which % 2)) for which in range(12)]
        for which, job in jobs:
            tokens, ends = job.result(timeout=300)
            assert list(tokens.values()) == [CASES[which]["greedy"]] * 2 and ends == [0, 1]
    assert is_whole(llm)


def test_closing_one_stream_leaves_the_other_running(llm: LLM):
    kept, closed = (llm.stream(prompt, GREEDY) for prompt in PROMPTS)
    begun = next(kept)
    next(closed)
    closed.close()
    assert [token for delta in [begun, *kept] for token in delta.token_ids] == CASES[0]["greedy"]
    assert is_whole(llm)


@pytest.mark.parametrize("where", [(Reader, "read"), (Scheduler, "schedule")])
def test_a_stream_that_is_collected_in_the_middle_of_a_step_harms_nobody(
    llm: LLM, where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
):
    """As happens to one that is part of a cycle, in whatever line the garbage collector runs."""
    dropped = llm.stream(PROMPTS[1], GREEDY)
    next(dropped)
    abandoned = [dropped]  # by nothing else, from now on
    del dropped
    real, collected = getattr(*where), []

    def collecting(*args: Any, **options: Any) -> Any:
        abandoned.clear()  # closes the stream, here and now
        collected.append(1)
        return real(*args, **options)

    monkeypatch.setattr(*where, collecting)
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    assert output.outputs[0].token_ids == CASES[0]["greedy"]
    assert collected and is_whole(llm)


def test_a_stream_that_is_collected_while_nobody_else_runs_anything_is_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    abandoned = [llm.stream(PROMPTS[1], GREEDY)]
    next(abandoned[0])

    def collecting(*args: Any, **options: Any) -> int:
        abandoned.clear()
        return 0

    monkeypatch.setattr(llm.engine, "warmup", collecting)
    llm.warmup()
    assert is_whole(llm)


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_request_that_was_added_is_not_added_again(llm: LLM):
    one, other, over = llm.make_requests([PROMPTS[0]] * 3, GREEDY)
    llm.engine.abort(over)
    llm.engine.add(one)
    again: Any
    for again in ((one,), (other, other), (over,), (other, None)):
        with pytest.raises(ValueError, match=r"was added before, or is over|must be what LLM.make_requests"):
            llm.engine.add(*again)
    while llm.engine.has_work:
        llm.engine.step()
    assert one.samples[0].token_ids == CASES[0]["greedy"] and other.metrics is None
    assert is_whole(llm)


def test_an_interrupt_that_comes_before_a_block_begins_is_no_failure(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def interrupted(self: Telling) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Telling, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.add(*llm.make_requests(PROMPTS, GREEDY))
    monkeypatch.undo()
    gc.collect()
    assert llm.engine.failure is None
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [case["greedy"] for case in CASES]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_interrupt_before_a_step_is_dispatched_loses_nothing(llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch):
    real, calls = getattr(llm.engine.steps, kind), []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(llm.engine.steps, kind, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[0] * 2] * 4, GREEDY)
    assert is_whole(llm)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [case["greedy"] for case in CASES]


def test_an_interrupted_warm_up_that_loses_the_state_is_told(monkeypatch: pytest.MonkeyPatch):
    broken = LLM(tiny("llama"), **SMALL)
    real = broken.engine.steps.prefill

    def interrupted(*args, **options):
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(broken.engine.steps, "prefill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        broken.warmup()
    monkeypatch.undo()
    for again in (broken.warmup, lambda: broken.generate(PROMPTS, GREEDY)):
        with pytest.raises(RuntimeError, match=r"a step of this engine failed \(KeyboardInterrupt\); make a new one"):
            again()


@pytest.mark.parametrize("where", ["sent", "read"])
def test_an_interrupt_that_loses_a_step_ends_the_engine_and_hangs_nobody(where: str, monkeypatch: pytest.MonkeyPatch):
    broken = LLM(tiny("llama"), **SMALL)
    real, accept = broken.engine.steps.decode, Sample.accept

    def interrupted(*args, **options):
        real(*args, **options)  # the state is donated to it and its results never arrive
        raise KeyboardInterrupt

    def interrupted_reading(self, *args, **options):
        accept(self, *args, **options)
        if self.finish_reason is not None:
            raise KeyboardInterrupt

    if where == "sent":
        monkeypatch.setattr(broken.engine.steps, "decode", interrupted)
    else:
        monkeypatch.setattr(Sample, "accept", interrupted_reading)
    with pytest.raises(KeyboardInterrupt):
        broken.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"a step of this engine failed \(KeyboardInterrupt\); make a new one"):
        broken.generate(PROMPTS, GREEDY)


def test_a_failed_step_is_told_as_it_was_and_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    broken = LLM(tiny("llama"), **SMALL)

    def fails(*args, **options):
        raise RuntimeError("the device is on fire")

    going = broken.stream(PROMPTS[0], GREEDY)
    next(going)
    monkeypatch.setattr(broken.engine.steps, "prefill", fails)
    with pytest.raises(RuntimeError, match=r"^the device is on fire$"):
        broken.generate(PROMPTS, GREEDY)
    told = r"a step of this engine failed \(the device is on fire\); make a new one"
    with pytest.raises(RuntimeError, match=told):
        broken.generate(PROMPTS, GREEDY)
    with pytest.raises(RuntimeError, match=told):  # whoever waits for another request is told the same
        list(going)
    assert str(broken.engine.failure) == "the device is on fire"
