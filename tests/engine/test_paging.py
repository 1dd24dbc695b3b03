"""What paging makes possible changes no token: sharing, the prefix cache, pausing, priorities, deadlines.

One engine with a small pool serves most of it; after every step its memory is compared with its books (conftest).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine import Engine
from jpaged.prefix import Block
from jpaged.swap import Costs, SwapSpace
from tests.models_tiny import SMALL, few_shapes, golden, is_whole, tiny

pytestmark = [pytest.mark.xdist_group("paging"), pytest.mark.one_python]  # three engines for all

CASES = golden("llama", "golden_float32")
PROMPTS = [case["prompt"] for case in CASES]  # of 3, 17 and 70 tokens
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.9, seed=5, n=3, max_tokens=20, ignore_eos=True, frequency_penalty=0.4)
SIZES: dict[str, Any] = {**SMALL, "max_num_seqs": 6, "decode_steps": 2}


@pytest.fixture(scope="module")
def tight() -> LLM:
    """Thirty blocks of four tokens: one of the longest of the three and not much else."""
    return few_shapes(LLM(tiny("llama"), **SIZES, num_blocks=30))


@pytest.fixture(scope="module")
def ample() -> LLM:
    return few_shapes(LLM(tiny("llama"), **SIZES, num_blocks=200, enable_prefix_caching=False))


@pytest.fixture(params=["recompute", "swap"])
def pausing(tight: LLM, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The small pool in either mode, with nothing cached."""
    monkeypatch.setattr(tight.engine, "config", dataclasses.replace(tight.config, preemption_mode=request.param))
    forget(tight)
    tight.engine.stats.reset()
    return tight


def forget(llm: LLM) -> None:
    """Lets every cached block go: a request that needs all of them is served."""
    evicted = llm.engine.stats.evictions + llm.engine.scheduler.idle_blocks
    ids = [319] * (llm.config.num_blocks * llm.config.block_size)
    llm.generate({"prompt_token_ids": ids, "cache_salt": f"forget {next(_salts)}"}, ONE)
    assert llm.engine.stats.evictions == evicted


_salts = itertools.count()
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def assert_golden(outputs: list) -> None:
    assert [output.outputs[0].token_ids for output in outputs] == [case["greedy"] for case in CASES]


def test_cached_or_not_the_tokens_are_the_same(ample: LLM):
    cached = few_shapes(LLM(tiny("llama"), **SIZES, num_blocks=200))
    assert_golden(ample.generate(PROMPTS, GREEDY))
    for repeat in range(3):
        before = cached.engine.stats.prefill_tokens
        outputs = cached.generate(PROMPTS, GREEDY)
        assert_golden(outputs)
        computed = cached.engine.stats.prefill_tokens - before
        assert computed == (90 if repeat == 0 else 3 + 1 + 2)  # what is behind the last full block
        assert [output.metrics.num_cached_tokens for output in outputs] == ([0, 0, 0] if repeat == 0 else [0, 16, 68])
    hits = cached.engine.stats.hit_tokens
    assert_golden(
        cached.generate([{"prompt_token_ids": ids, "cache_salt": "another tenant"} for ids in PROMPTS], GREEDY)
    )
    assert cached.engine.stats.hit_tokens == hits
    longer = [case["prompt"] + case["greedy"][:30] for case in CASES]  # what was generated is found, too
    before = cached.engine.stats.prefill_tokens
    for output, case in zip(cached.generate(longer, dataclasses.replace(GREEDY, max_tokens=2)), CASES, strict=True):
        assert output.outputs[0].token_ids == case["greedy"][30:]
    assert cached.engine.stats.prefill_tokens - before <= 3 * 4
    assert is_whole(cached)


def test_paused_or_not_the_tokens_are_the_same(pausing: LLM):
    assert_golden(pausing.generate(PROMPTS, GREEDY))
    stats = pausing.engine.stats
    assert stats.preemptions >= 1
    assert (stats.swapped_in > 0) == (pausing.engine.config.preemption_mode == "swap")
    assert is_whole(pausing)


def test_samples_that_pause_are_the_same_penalties_and_seeds_included(pausing: LLM, ample: LLM):
    """Three samples of each of two prompts: together they do not fit."""
    wanted = [output.outputs for output in ample.generate(PROMPTS[:2], SAMPLED)]
    outputs = pausing.generate(PROMPTS[:2], SAMPLED)
    assert [output.outputs for output in outputs] == wanted
    assert len({tuple(one.token_ids) for one in wanted[0]}) == 3
    assert pausing.engine.stats.preemptions >= 1 and is_whole(pausing)


@pytest.mark.every_setting
def test_samples_that_never_fit_together_go_on_one_after_another(ample: LLM):
    wanted = ample.generate(PROMPTS[1], SAMPLED)[0].outputs
    small = few_shapes(LLM(tiny("llama"), **SIZES, num_blocks=12))
    assert small.generate(PROMPTS[1], SAMPLED)[0].outputs == wanted
    assert is_whole(small)


@pytest.mark.every_setting
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_samples_beside_others_in_chunks(ample: LLM, chunk: int):
    sizes = {**SIZES, "max_num_seqs": min(chunk, 6), "max_num_batched_tokens": chunk, "decode_steps": 8}
    llm = few_shapes(LLM(tiny("llama"), **sizes, num_blocks=200))
    others = dataclasses.replace(SAMPLED, n=min(3, chunk))
    outputs = llm.generate([PROMPTS[1], *PROMPTS], [others, GREEDY, GREEDY, GREEDY])
    assert_golden(outputs[1:])
    assert [one.token_ids for one in outputs[0].outputs] == [
        one.token_ids for one in ample.generate(PROMPTS[1], SAMPLED)[0].outputs[: others.n]
    ]


def test_three_equal_prompts_of_which_the_second_ends_first(tight: LLM):
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in (20, 2, 30)]
    before = tight.engine.stats.prefill_tokens
    outputs = tight.generate([{"prompt_token_ids": PROMPTS[1], "cache_salt": "three"}] * 3, params)
    assert [o.outputs[0].token_ids for o in outputs] == [CASES[1]["greedy"][:count] for count in (20, 2, 30)]
    assert tight.engine.stats.prefill_tokens - before == 17 + 1 + 1
    assert is_whole(tight)


def test_a_prompt_of_whole_blocks_sent_twice(tight: LLM):
    prompt = {"prompt_token_ids": (PROMPTS[1] + CASES[1]["greedy"])[:20], "cache_salt": "whole blocks"}
    for computed in (20, 4):
        before = tight.engine.stats.prefill_tokens
        (output,) = tight.generate(prompt, dataclasses.replace(GREEDY, max_tokens=5))
        assert output.outputs[0].token_ids == CASES[1]["greedy"][3:8]
        assert tight.engine.stats.prefill_tokens - before == computed


def test_equal_digests_make_no_difference_to_the_tokens(pausing: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pausing.engine, "_hash", lambda data: b"the same")
    for _ in range(2):
        assert_golden(pausing.generate(PROMPTS, GREEDY))
    assert is_whole(pausing)


def test_aborted_while_a_step_is_in_flight(tight: LLM):
    first, second, third = tight.make_requests(PROMPTS, GREEDY)
    tight.engine.add(first, second)
    while not first.samples[0].token_ids:
        tight.engine.step()
    tight.engine.abort(first)
    tight.engine.add(third)
    drain(tight.engine)
    assert first.samples[0].finish_reason == "abort"
    assert [second.samples[0].token_ids, third.samples[0].token_ids] == [case["greedy"] for case in CASES[1:]]
    assert is_whole(tight)


def test_aborted_in_every_state(pausing: LLM):
    """Whenever one of three is withdrawn, the others get their tokens and nothing is lost."""
    rng = random.Random(0)
    for victim in (0, 1, 2) * 3:
        requests = pausing.make_requests(PROMPTS, GREEDY)
        pausing.engine.add(*requests)
        for _ in range(rng.randrange(30)):
            pausing.engine.step()
        pausing.engine.abort(requests[victim])
        drain(pausing.engine)
        for index, request in enumerate(requests):
            if index != victim:
                assert request.samples[0].token_ids == CASES[index]["greedy"]
        assert is_whole(pausing)


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_host_without_memory_makes_paused_requests_compute_again(tight: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tight.engine, "config", dataclasses.replace(tight.config, preemption_mode="swap"))
    forget(tight)
    tight.engine.stats.reset()
    put, lost = SwapSpace.put, []

    def sometimes(self, block, data):
        if self.is_ordered(block) and len(lost) % 2 == 0:
            lost.append(block)
            self.discard(block)
            return False
        lost.append(None)
        return put(self, block, data)

    monkeypatch.setattr(SwapSpace, "put", sometimes)
    assert_golden(tight.generate(PROMPTS, GREEDY))
    assert tight.engine.stats.swapped_out > tight.engine.stats.swapped_in and any(lost) and is_whole(tight)


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_copy_for_which_there_is_no_memory_is_lost():
    class TooMuch:
        def __array__(self, *args: Any, **options: Any) -> np.ndarray:
            raise MemoryError

    too_much: Any = TooMuch()
    space, block, other = SwapSpace(), Block(1, b"", None), Block(2, b"", None)
    space.order(block)
    assert not space.put(block, too_much) and space.get(block) is None and len(space) == 0
    assert space.put(other, too_much)  # nobody has ordered it: nothing is copied
    space.order(other)
    assert space.is_ordered(other) and space.put(other, np.ones(2)) and np.asarray(space.get(other)).sum() == 2
    space.discard(other)
    assert len(space) == 0


def test_no_room_on_the_host_is_no_swap(monkeypatch: pytest.MonkeyPatch, tight: LLM):
    forget(tight)
    monkeypatch.setattr(tight.engine, "config", dataclasses.replace(tight.config, preemption_mode="swap"))
    monkeypatch.setattr(tight.engine.prefix_cache, "_room", 0)
    tight.engine.stats.reset()
    assert_golden(tight.generate(PROMPTS, GREEDY))
    assert tight.engine.stats.preemptions >= 1 and tight.engine.stats.swapped_out == 0


def test_auto_measures_and_takes_what_is_quicker():
    costs = Costs()
    assert not costs.prefer_swap(100, 5)
    costs.computed(tokens=100, seconds=1.0)
    assert not costs.prefer_swap(100, 5)
    costs.move = 0.1
    assert costs.prefer_swap(100, 5) and not costs.prefer_swap(100, 11) and not costs.prefer_swap(100, 0)
    costs.computed(tokens=10, seconds=1.1)
    assert costs.compute == pytest.approx(0.8 * 0.01 + 0.2 * 0.11) and costs.prefer_swap(100, 29)


def test_a_swap_space_that_holds_no_block_is_refused():
    with pytest.raises(ValueError, match=r"swap_space=100 holds no KV block, which takes 3,072 bytes.*try more"):
        LLM(tiny("llama"), **SIZES, preemption_mode="swap", swap_space=100)


def test_a_pool_that_is_one_block_short_refuses_with_the_numbers(tight: LLM):
    whole = tight.config.num_blocks * tight.config.block_size
    with pytest.raises(ValueError, match=r"may need KV for 121 tokens, 31 blocks, and the pool has 30 of 4"):
        tight.generate([1] * (whole - 7), SamplingParams(max_tokens=9))
    assert len(tight.generate([1] * (whole - 7), SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs) == 1


def test_an_exception_of_a_caller_harms_nobody(tight: LLM):
    """In the loop over a stream, in the hash that finds blocks, in what is told of warming up."""

    def boom(*args: Any) -> Any:
        raise KeyError("mine")

    stream = tight.stream(PROMPTS[:2], GREEDY)
    with pytest.raises(KeyError):
        for _ in stream:
            boom()
    stream.close()
    assert is_whole(tight)
    with pytest.raises(KeyError):
        tight.engine.warmup(boom)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tight.engine, "_hash", boom)
        with pytest.raises(KeyError):
            tight.generate(PROMPTS, GREEDY)
    assert_golden(tight.generate(PROMPTS, GREEDY))
    assert is_whole(tight)


def test_many_random_requests_over_a_small_pool(pausing: LLM, ample: LLM):
    """Prompts that share their beginnings, samples, aborts; each gets what it would have got alone."""
    rng, engine = random.Random(1), pausing.engine
    beginnings = [rng.choices(range(320), k=24) for _ in range(3)]
    prompts = [
        rng.choice(beginnings)[: rng.randint(1, 24)] + rng.choices(range(320), k=rng.randint(0, 6)) for _ in range(40)
    ]
    params = [
        SamplingParams(
            n=rng.choice([1, 1, 2, 3]),
            temperature=1.0,
            seed=i,
            max_tokens=rng.randint(1, 24),
            ignore_eos=True,
            logprobs=1,
        )
        for i in range(40)
    ]
    wanted = ample.generate(prompts, params)
    requests = pausing.make_requests(prompts, params)
    waiting = list(requests)
    aborted = set()
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                engine.add(waiting.pop(0))
        if rng.random() < 0.03:
            victim = rng.choice(requests[: len(requests) - len(waiting)] or requests[:1])
            if not victim.finished and victim not in waiting:
                engine.abort(victim)
                aborted.add(victim.id)
        engine.step()
    for request, output in zip(requests, wanted, strict=True):
        for sample, one in zip(request.samples, output.outputs, strict=True):
            if sample.finish_reason == "abort":
                assert request.id in aborted and sample.token_ids == one.token_ids[: len(sample.token_ids)]
            else:
                assert sample.token_ids == one.token_ids
                found = [each[token].logprob for token, each in zip(sample.token_ids, sample.logprobs, strict=True)]
                told = [each[token].logprob for token, each in zip(one.token_ids, one.logprobs or [], strict=True)]
                np.testing.assert_allclose(found, told, atol=1e-4)
    assert engine.stats.preemptions > 0 and engine.stats.hit_tokens > 0 and is_whole(pausing)
