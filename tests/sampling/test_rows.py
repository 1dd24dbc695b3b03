"""Rows of settings: packed on the host, unpacked, set and gathered on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import sampling
from jpaged.config import NO_TOKEN, EngineConfig, SamplingParams
from tests.sampling.support import CONFIG, layout, rows

PARAMS = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.25,
    min_tokens=3,
    logprobs=2,
    prompt_logprobs=1,
    logit_bias={9: -1.5, 5: 150.0},
)
EXPECTED = {
    "temperature_R": 0.7,
    "top_p_R": 0.9,
    "min_p_R": 0.05,
    "presence_R": 0.5,
    "frequency_R": -0.25,
    "repetition_R": 1.25,
    "top_k_R": 40,
    "logprobs_R": 2,
    "prompt_logprobs_R": 1,
    "prompt_len_R": 10,
    "min_len_R": 13,
    "limit_R": 17,
    "stream_R": 2,
    "seed_R2": [1, 3],
    "stop_ids_RE": [4, 2, NO_TOKEN, NO_TOKEN],
    "bias_ids_RJ": [9, 5, NO_TOKEN, NO_TOKEN],
    "bias_RJ": [-1.5, 100.0, 0.0, 0.0],
    "bad_words_RWL": [[NO_TOKEN, NO_TOKEN, 6], [7, 8, 9], [NO_TOKEN] * 3],
}


def one_row() -> sampling.SamplerRows:
    settings = {"index": [2], "seed": [2**32 + 3], "prompt_len": [10], "max_tokens": [7]}
    return rows(sampling, [PARAMS], stop_ids=[(4, 2)], bad_words=[([6], [7, 8, 9])], **settings)


def test_every_field_survives_packing():
    found = one_row()
    assert found.max_logprobs == 5
    for name, value in EXPECTED.items():
        field = np.asarray(getattr(found, name))
        assert field[0].tolist() == np.asarray(value, field.dtype).tolist(), name


def test_width_is_the_sum_of_the_fields():
    assert layout(sampling).width == 13 + 2 + 4 + 4 + 4 + 3 * 3
    assert sampling.RowLayout.of(EngineConfig(), 50_000).width == 13 + 2 + 16 + 64 + 64 + 32 * 8


def test_no_more_alternatives_than_the_vocabulary_has():
    assert sampling.RowLayout.of(CONFIG, 3).max_logprobs == 3


def test_greedy_is_temperature_zero():
    found = rows(sampling, [SamplingParams(temperature=9e-6), SamplingParams(temperature=1.1e-5)])
    assert found.temperature_R[0] == 0
    assert found.temperature_R[1] > 0


def test_set_and_gather():
    """Row 0 goes to slot 2, row 1 is padding. Slot 3 of 3 is no slot: it answers with a neutral row."""
    slots = sampling.create(layout(sampling), 3)
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), one_row())
    slots = jax.jit(sampling.set_rows)(slots, two, jnp.array([2, 3], jnp.int32))
    found = jax.jit(sampling.gather)(slots, jnp.array([3, 2, 0, 2], jnp.int32))
    neutral = sampling.create(layout(sampling), 1)
    for name in EXPECTED:
        field, set_, blank = (np.asarray(getattr(rows, name)) for rows in (found, one_row(), neutral))
        assert field.tolist() == np.concatenate([blank, set_, blank, set_]).tolist(), name


def test_a_neutral_row_asks_for_nothing():
    neutral = sampling.create(layout(sampling), 1)
    packed = layout(sampling).pack({})
    for name in EXPECTED:
        assert (
            np.asarray(getattr(layout(sampling).unpack(packed[None]), name)).tolist()
            == np.asarray(getattr(neutral, name)).tolist()
        )
    assert (neutral.temperature_R[0], neutral.top_p_R[0], neutral.repetition_R[0]) == (0, 1, 1)
    assert sampling.wants_prompt_logprobs(neutral).tolist() == [False]
    assert sampling.wants_prompt_logprobs(one_row()).tolist() == [True]


def test_a_limit_past_int32_is_none():
    assert rows(sampling, [SamplingParams()], max_tokens=[2**31 - 1]).limit_R.tolist() == [2**31 - 1]


def test_what_does_not_fit_is_refused_together():
    params = SamplingParams(logit_bias={i: 1.0 for i in range(5)})
    with pytest.raises(ValueError) as error:
        rows(sampling, [params], stop_ids=[range(6)], bad_words=[[[1], [2], [3], [4, 5, 6, 7]]])
    for said in (
        "6 stop ids exceed the 4 ",
        "5 biased ids exceed the 4 ",
        "4 bad words exceed the 3 ",
        "4 tokens of a bad word exceed the 3 ",
        "max_stop_token_ids",
    ):
        assert said in str(error.value)
    with pytest.raises(ValueError, match="without tokens"):
        rows(sampling, [SamplingParams()], bad_words=[[[]]])
