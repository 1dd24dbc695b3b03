"""Beam search, by itself and among all else, against one that is written hypothesis by hypothesis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.outputs import BeamSearchOutput
from scripts.common import usage
from tests.engine import beam_reference as reference
from tests.engine.beam_reference import Found
from tests.models_tiny import SMALL, few_shapes, golden, tiny

pytestmark = [pytest.mark.xdist_group("beams"), pytest.mark.one_python]  # two engines for all

SIZES: dict[str, Any] = {"dtype": "float32", "block_size": 2, "max_model_len": 24, "max_num_batched_tokens": 16}


def assert_found(output: BeamSearchOutput, wanted: Found, *, atol: float = 1e-4) -> None:
    assert [each.token_ids for each in output.sequences] == [tokens for tokens, _, _ in wanted]
    np.testing.assert_allclose([each.cum_logprob for each in output.sequences], [w[1] for w in wanted], atol=atol)
    np.testing.assert_allclose([each.score for each in output.sequences], [w[2] for w in wanted], atol=atol)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return few_shapes(LLM(reference.toy(8, 0), max_num_seqs=8, decode_steps=4, **SIZES))


def with_tables(llm: LLM, seed: int) -> reference.Logprobs:
    """Gives the engine other scores, of the same shapes."""
    made = reference.tables(8, seed)
    llm.engine.loaded = llm.engine.loaded._replace(weights=jax.tree.map(jnp.asarray, made))
    return reference.toy_logprobs(made)


@pytest.mark.parametrize("stops", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("width", range(1, 9))
def test_every_width_finds_what_the_reference_finds(llm: LLM, width: int, stops: tuple[int, ...]):
    for seed, (penalty, early) in enumerate([(1.0, False), (0.0, True), (2.0, False), (-0.5, False), (1.0, True)]):
        logprobs = with_tables(llm, 100 * width + seed)
        prompt = [(seed + i * i) % 8 for i in range(1 + seed)]
        params = BeamSearchParams(
            beam_width=width, max_tokens=6, stop_token_ids=stops, length_penalty=penalty, early_stopping=early
        )
        (output,) = llm.beam_search({"prompt_token_ids": prompt, "cache_salt": f"{width} {seed} {stops}"}, params)
        wanted = reference.search(logprobs, prompt, width=width, most=6, stops=stops, penalty=penalty, early=early)
        assert_found(output, wanted)
        assert output.finish_reason == ("stop" if all(w[0][-1] in stops for w in wanted) else "length")
        assert [each.tokens for each in output.sequences] == [[*prompt, *w[0]] for w in wanted]
    assert not llm.engine.has_work


@pytest.mark.parametrize("stops", [(), (1,)], ids=str)
def test_beams_for_every_live_prefix_find_the_best_of_all(stops: tuple[int, ...]):
    made = reference.tables(3, 5)
    llm = few_shapes(
        LLM(reference.toy(3, 5), max_num_seqs=27, max_beam_width=27, **SIZES | {"max_num_batched_tokens": 27})
    )
    every = reference.every_continuation(reference.toy_logprobs(made), [0, 2], 3, 4, stops, 1.0)
    (output,) = llm.beam_search([0, 2], BeamSearchParams(beam_width=27, max_tokens=4, stop_token_ids=stops))
    assert_found(output, every[:27])


@pytest.fixture(scope="module")
def real() -> LLM:
    return few_shapes(LLM(tiny("llama"), **{**SMALL, "max_num_seqs": 6}))


def searched(llm: LLM, prompt: list[int], params: BeamSearchParams, stops: tuple[int, ...] = ()) -> Found:
    def logprobs(text):
        return np.asarray(jax.nn.log_softmax(llm.compute_logits(text)[-1]), np.float64)

    return reference.search(
        logprobs,
        prompt,
        width=params.beam_width,
        most=params.max_tokens,
        stops=stops,
        penalty=params.length_penalty,
        early=params.early_stopping,
    )


CASES = golden("llama", "golden_float32")


def test_a_real_model_scores_as_a_search_over_its_logits(real: LLM):
    stops = [CASES[0]["greedy"][3]]
    for params in (
        BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True, stop_token_ids=stops, length_penalty=0.6),
    ):
        (output,) = real.beam_search(CASES[0]["prompt"], params)
        assert_found(output, searched(real, CASES[0]["prompt"], params, params.stop_token_ids), atol=1e-3)


def test_one_beam_is_greedy(real: LLM):
    (output,) = real.beam_search(CASES[1]["prompt"], BeamSearchParams(beam_width=1, max_tokens=9, ignore_eos=True))
    assert output.sequences[0].token_ids == CASES[1]["greedy"][:9]


WIDE = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def test_searches_and_others_in_one_batch_do_not_notice_each_other(real: LLM):
    alone = [real.beam_search(case["prompt"], WIDE)[0].sequences for case in CASES[:2]]
    engine, made = real.engine, real.make_requests([case["prompt"] for case in CASES], GREEDY)
    searches = real.make_searches([case["prompt"] for case in CASES[:2]], WIDE)
    engine.add(made[0], searches[0], made[1], searches[1], made[2])
    while engine.has_work:
        engine.step()
    assert [search.output().sequences for search in searches] == alone
    assert [request.samples[0].token_ids for request in made] == [case["greedy"] for case in CASES]


@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.every_setting), "swap"])
def test_a_search_that_has_to_pause_finds_the_same(real: LLM, mode: str):
    sizes = {**SMALL, "max_num_seqs": 8, "num_blocks": 28, "decode_steps": 2}
    tight = few_shapes(LLM(tiny("llama"), **sizes, preemption_mode=mode))
    long = dataclasses.replace(WIDE, max_tokens=30)
    wanted = [real.beam_search(case["prompt"], long)[0] for case in CASES[:2]]
    engine, made = tight.engine, tight.make_requests([case["prompt"] for case in CASES[:2]], GREEDY)
    searches = tight.make_searches([case["prompt"] for case in CASES[:2]], long)
    engine.add(*made, *searches)
    while engine.has_work:
        engine.step()
    metrics = [search.metrics for search in searches]
    assert sum(each.preemptions for each in metrics if each is not None) >= 1
    for search, one in zip(searches, wanted, strict=True):
        assert [each.token_ids for each in search.output().sequences] == [each.token_ids for each in one.sequences]
    assert [request.samples[0].token_ids for request in made] == [case["greedy"] for case in CASES[:2]]


def test_every_beam_may_stop_at_once():
    made = {"last": np.zeros((4, 4), np.float32), "mean": np.zeros((4, 4), np.float32)}
    made["last"][:, 3] = 9.0  # whatever came before, the stop token is by far the likeliest
    loaded = reference.toy(4, 0)._replace(weights=jax.tree.map(jnp.asarray, made))
    llm = few_shapes(LLM(loaded, max_num_seqs=4, **SIZES))
    for early in (False, True):
        params = BeamSearchParams(beam_width=3, max_tokens=5, stop_token_ids=[3], early_stopping=early)
        (output,) = llm.beam_search([0, 1, 2], params)
        wanted = reference.search(
            reference.toy_logprobs(made), [0, 1, 2], width=3, most=5, stops=[3], penalty=1.0, early=early
        )
        assert_found(output, wanted)
        assert output.finish_reason == "stop" and all(each.stop_reason == 3 for each in output.sequences)


def test_nothing_compiles_after_warming_up(real: LLM):
    real.warmup(beams=True)
    with usage.compiled() as names:
        real.beam_search([case["prompt"] for case in CASES[:2]], WIDE)
        real.generate([case["prompt"] for case in CASES], GREEDY)
    assert not names


def test_beams_share_what_they_have_in_common(real: LLM):
    """Three beams of 12 tokens in blocks of 4, behind a prompt of which all is shared: never three times as much."""
    real.engine.stats.reset()
    real.beam_search([5] * 40, WIDE)
    assert 10 + 4 <= real.engine.stats.blocks_peak < 10 + 3 * 3


def test_a_search_may_be_aborted_and_may_run_out_of_time(real: LLM):
    (search,) = real.make_searches(CASES[0]["prompt"], WIDE)
    real.engine.add(search)
    for _ in range(2):
        real.engine.step()
    real.engine.abort(search)
    while real.engine.has_work:
        real.engine.step()
    assert search.output().finish_reason == "abort" and search.output().sequences == []
    (late,) = real.beam_search(CASES[0]["prompt"], WIDE, timeout=1e-6)
    assert late.finish_reason == "timeout" and not real.engine.has_work


def test_scores_that_are_no_numbers_fail_one_search_alone(real: LLM):
    loaded = tiny("llama")
    bad = loaded.weights["embed"]["weight"].at[13].set(jnp.nan)
    sick = few_shapes(
        LLM(loaded._replace(weights={**loaded.weights, "embed": {"weight": bad}}), **{**SMALL, "max_num_seqs": 6})
    )
    first, second = sick.beam_search([[1, 13], CASES[0]["prompt"]], WIDE)
    assert first.finish_reason == "error" and "no beam could be selected" in (first.error or "")
    assert second.sequences == real.beam_search(CASES[0]["prompt"], WIDE)[0].sequences


@pytest.mark.usefixtures("annotations_unchecked")
def test_what_cannot_be_searched_is_refused_with_the_numbers(real: LLM):
    wrong: list[tuple[Any, str]] = [
        (BeamSearchParams(beam_width=0, max_tokens=4), "beam_width=0 must be from 1 to 6"),
        (BeamSearchParams(beam_width=7, max_tokens=4), "beam_width=7 must be from 1 to 6"),
        (BeamSearchParams(beam_width=2, max_tokens=0), "max_tokens=0 must be from 1"),
        (BeamSearchParams(beam_width=2, max_tokens=126), "3 prompt tokens and max_tokens=126 exceed"),
        (BeamSearchParams(beam_width=2, max_tokens=4, temperature=1.0), "temperature=1.0 must be finite, at least 0"),
        (BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=float("nan")), "length_penalty=nan must be"),
        (BeamSearchParams(beam_width=2, max_tokens=99, length_penalty=-16.0), "try from -15 to 15"),
        (BeamSearchParams(beam_width=2, max_tokens=4, stop_token_ids=[999]), "stop_token_ids has 999"),
        (SamplingParams(), "must be BeamSearchParams or several of them"),
    ]
    for params, said in wrong:
        with pytest.raises(ValueError, match=said):
            real.beam_search([1, 2, 3], params)
    small = LLM(tiny("llama"), **SMALL, num_blocks=5)
    with pytest.raises(ValueError, match="may need 6 blocks of 4 tokens and the pool has 5"):
        small.beam_search([1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=10))
