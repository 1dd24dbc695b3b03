"""The engine's promises: stops, limits, batch independence, conservation at every step, no compile after warm-up."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from scripts.common import usage
from tests.models_tiny import SMALL, golden, is_whole, tiny

pytestmark = pytest.mark.xdist_group("engine")  # one engine for most

PROMPT = [311, 303, 192]


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny("llama"), **SMALL)


def greedy(llm, prompt=PROMPT, **more):
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 8, **more}))[0].outputs[0]


def test_limits_and_stop_ids(llm):
    ids = golden("llama", "golden_float32")[0]["greedy"][:8]
    whole = greedy(llm, ignore_eos=True)
    assert (whole.token_ids, whole.finish_reason, whole.stop_reason) == (ids, "length", None)
    stopped = greedy(llm, stop_token_ids=[ids[3]])
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (ids[:4], "stop", ids[3])
    held_off = greedy(llm, stop_token_ids=[ids[3]], min_tokens=5)
    assert ids[3] not in held_off.token_ids[:4] and len(held_off.token_ids) >= 5
    assert greedy(llm, max_tokens=1).token_ids == ids[:1]
    biased = greedy(llm, logit_bias={7: 100.0})
    assert biased.token_ids == [7] * 8


def test_logprobs_are_those_of_the_model(llm):
    out = greedy(llm, logprobs=2, temperature=1.0, top_k=1, logit_bias={5: -3.0})
    scores = jax.nn.log_softmax(llm.compute_logits(PROMPT + out.token_ids), axis=-1)
    for place, (token, found) in enumerate(zip(out.token_ids, out.logprobs, strict=True), len(PROMPT) - 1):
        best = np.argsort(-scores[place], kind="stable")[:2]
        assert set(found) == {*best.tolist(), token}
        for candidate, entry in found.items():
            assert entry.logprob == pytest.approx(float(scores[place][candidate]), abs=1e-4)
            assert entry.rank == 1 + int((scores[place] > scores[place][candidate]).sum())
    assert out.cumulative_logprob == pytest.approx(
        sum(f[t].logprob for f, t in zip(out.logprobs, out.token_ids, strict=True))
    )


def test_a_seeded_request_does_not_depend_on_its_batch(llm):
    wish = SamplingParams(temperature=1.5, seed=7, max_tokens=12, n=2, ignore_eos=True)
    others = [SamplingParams(temperature=1.0, max_tokens=5 + i, presence_penalty=1.0 * (i % 2)) for i in range(5)]
    alone = llm.generate(PROMPT, wish)[0]
    among = llm.generate([[9, 8, 7, 6, 5]] * 3 + [PROMPT] + [[4] * 20] * 2, [*others[:3], wish, *others[3:]])[3]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in among.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


def test_greedy_is_top_k_one(llm):
    assert greedy(llm).token_ids == greedy(llm, temperature=2.0, top_k=1).token_ids


def test_streams_are_the_outputs_in_pieces(llm):
    prompts, params = [PROMPT, [5, 6]], SamplingParams(temperature=0, max_tokens=11, ignore_eos=True, logprobs=1)
    whole = llm.generate(prompts, params)
    first = whole[0].request_id + len(prompts)
    pieces = {first: [], first + 1: []}
    ends = {}
    for delta in llm.stream(prompts, params):
        assert delta.request_id not in ends
        pieces[delta.request_id] += delta.token_ids
        assert len(delta.logprobs) == len(delta.token_ids)
        if delta.finish_reason:
            ends[delta.request_id] = delta.finish_reason
    assert list(pieces.values()) == [output.outputs[0].token_ids for output in whole]
    assert set(ends.values()) == {"length"}


def test_closing_a_stream_gives_everything_back(llm):
    stream = llm.stream([PROMPT] * 9, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    next(stream)
    stream.close()
    assert is_whole(llm)
    assert greedy(llm).token_ids == golden("llama", "golden_float32")[0]["greedy"][:8]


def test_bytes_are_no_ids(llm):
    with pytest.raises(ValueError, match="prompt_token_ids must be a list of ids, not bytes"):
        llm.generate(b"ab")


def test_every_wrong_request_is_named_before_anything_runs(llm):
    steps = llm.engine.stats.steps
    with pytest.raises(ValueError) as caught:
        llm.generate(
            [[], [1] * 500, PROMPT, [320], "text", PROMPT, PROMPT],
            [SamplingParams()] * 3
            + [SamplingParams(temperature=float("nan"))] * 2
            + [SamplingParams(n=99), SamplingParams(max_tokens=126)],
        )
    lines = str(caught.value).split("\n")
    assert [line.split(":")[0] for line in lines] == [f"request {i}" for i in (0, 1, 3, 4, 5, 6)]
    assert llm.engine.stats.steps == steps


def test_what_the_pool_can_never_hold_is_refused_with_the_numbers():
    small = LLM(tiny("llama"), **SMALL, num_blocks=5)
    with pytest.raises(ValueError, match=r"27 tokens, 7 blocks.*5 of 4"):
        small.generate(PROMPT, SamplingParams(max_tokens=25))
    assert len(small.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0].token_ids) == 18


def test_nan_in_unowned_memory_changes_nothing(llm):
    state = llm.engine._state
    llm.engine._state = state.replace(cache=state.cache.replace(data=jnp.full_like(state.cache.data, jnp.nan)))
    cases = golden("llama", "golden_float32")
    out = llm.generate(
        [case["prompt"] for case in cases], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    )
    assert [o.outputs[0].token_ids for o in out] == [case["greedy"] for case in cases]


def test_a_request_whose_scores_are_nan_fails_alone(llm):
    loaded = tiny("llama")
    bad = loaded.weights["embed"]["weight"].at[13].set(jnp.nan)
    sick = LLM(loaded._replace(weights={**loaded.weights, "embed": {"weight": bad}}), **SMALL)
    out = sick.generate([PROMPT, [1, 13], PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [o.outputs[0].finish_reason for o in out] == ["length", "error", "length"]
    assert out[1].error and not out[1].outputs[0].token_ids
    assert out[0].outputs[0].token_ids == out[2].outputs[0].token_ids == greedy(llm, ignore_eos=True).token_ids


def test_nothing_compiles_after_warm_up():
    """Over 200 random requests; a compile is a trace of a step, or anything at all that XLA was asked to build."""
    warm = LLM(tiny("llama"), **SMALL)
    buckets = warm.warmup()
    assert sum(warm.engine.steps.traces.values()) == len(warm.engine.steps.traces) == buckets
    rng = random.Random(0)
    prompts = [[rng.randrange(320) for _ in range(rng.randint(1, 60))] for _ in range(200)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            max_tokens=rng.randint(1, 40),
            seed=i,
            logprobs=rng.choice([None, 3]),
            prompt_logprobs=rng.choice([None, 1]),
            frequency_penalty=rng.choice([0, 0.5]),
        )
        for i in range(200)
    ]
    with usage.compiled() as names:
        warm.generate(prompts, params)
    assert not names
    assert sum(warm.engine.steps.traces.values()) == buckets


def test_settings_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="max_model_len=9999 must be at most 512"):
        Engine(tiny("llama"), EngineConfig(max_model_len=9999))


def test_a_neighbour_that_is_done_does_not_catch_nan(llm):
    """B ends in the dispatch in which A's scores become NaN: what the device computes in its place is not B's."""
    ids = greedy(llm, ignore_eos=True).token_ids
    other = greedy(llm, [9, 8], ignore_eos=True, max_tokens=2).token_ids
    assert ids[1] not in [*PROMPT, 9, 8, ids[0], *other]
    loaded = tiny("llama")
    bad = loaded.weights["embed"]["weight"].at[ids[1]].set(jnp.nan)
    sick = LLM(loaded._replace(weights={**loaded.weights, "embed": {"weight": bad}}), **SMALL)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (8, 2)]
    a, b = sick.generate([PROMPT, [9, 8]], params)
    assert (a.outputs[0].finish_reason, b.outputs[0].finish_reason) == ("error", "length")
    assert b.outputs[0].token_ids == other
    *going, last = sick.stream([PROMPT], params[:1])
    assert all(delta.error is None for delta in going) and "no token could be sampled" in (last.error or "")


def test_streams_carry_prompt_logprobs_and_errors(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    first, *others = llm.stream([PROMPT], params)
    assert first.prompt_logprobs == llm.generate([PROMPT], params)[0].prompt_logprobs
    assert all(delta.prompt_logprobs is None and delta.error is None for delta in others)


def test_a_negative_engine_seed_is_a_seed():
    llm = LLM(tiny("llama"), seed=-1, **SMALL)
    assert len(llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_the_dtype_is_that_of_the_weights():
    assert LLM(tiny("llama"), max_num_seqs=2).config.dtype == "float32"
    with pytest.raises(ValueError, match="dtype='bfloat16' and the weights are float32; try"):
        LLM(tiny("llama"), dtype="bfloat16")


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        (5, None, "prompts=5 must be"),
        ("x", {"temperature": 0}, r"sampling_params=\{'temperature': 0\} must be SamplingParams"),
        ([PROMPT], [None], "request 0: its parameters must be SamplingParams, not NoneType"),
        ([PROMPT], [], "1 prompts and 0 SamplingParams"),
    ],
)
@pytest.mark.usefixtures("annotations_unchecked")
def test_arguments_of_other_types_are_named(llm, prompts, params, said):
    with pytest.raises(ValueError, match=said):
        llm.generate(prompts, params)


def test_arrays_are_prompts(llm):
    assert llm.generate(np.array(PROMPT), SamplingParams(temperature=0, max_tokens=8))[0].prompt_token_ids == PROMPT
    np.testing.assert_array_equal(llm.compute_logits(np.array(PROMPT)), llm.compute_logits(PROMPT))
