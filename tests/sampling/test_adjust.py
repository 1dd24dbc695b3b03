"""What a request changes in its logits, against loops over its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import sampling
from jpaged.config import SamplingParams
from jpaged.sampling.adjust import adjust
from tests.sampling import reference
from tests.sampling.support import POSITIONS, rows

VOCAB = 9
jitted = jax.jit(adjust, static_argnames="vocab_limit")


def adjusted(
    x_RV: np.ndarray, settings: sampling.SamplerRows, histories: list[list[int]], vocab_limit: int = VOCAB
) -> np.ndarray:
    history_RP = np.full((len(histories), POSITIONS), VOCAB - 1, np.int32)
    for r, history in enumerate(histories):
        history_RP[r, : len(history)] = history
    lengths_R = jnp.array(list(map(len, histories)), jnp.int32)
    return np.asarray(jitted(x_RV, settings, jnp.asarray(history_RP), lengths_R, vocab_limit=vocab_limit))


tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
quarters = st.integers(-8, 8).map(lambda n: n / 4)


@settings(max_examples=100)
@given(
    st.lists(quarters, min_size=VOCAB, max_size=VOCAB), tokens, tokens, quarters, quarters, st.sampled_from([0.5, 1, 2])
)
def test_penalties(
    x: list[float], prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
):
    """Quarters and powers of two are exact in any order of operations."""
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    found = adjusted(np.array([x], np.float32), rows(sampling, [params], prompt_len=[len(prompt)]), [prompt + output])
    expected = reference.penalised(x, prompt, output, presence=presence, frequency=frequency, repetition=repetition)
    assert found[0].tolist() == expected.tolist()


def test_rows_differ_in_what_they_ask():
    """One batch: nothing; a bias; a penalty; a bad word; a minimum length. None touches another row."""
    plain = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    params = [
        SamplingParams(),
        SamplingParams(logit_bias={0: 2.5, 8: -100.0}),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(),
        SamplingParams(min_tokens=3),
    ]
    settings = rows(
        sampling,
        params,
        bad_words=[(), (), (), ([2], [4, 5]), ()],
        stop_ids=[(8,), (8,), (8,), (8,), (8, 1)],
    )
    found = adjusted(np.array([plain] * 5, np.float32), settings, [[0, 1, 4]] * 5)
    expected = np.array([plain] * 5, np.float32)
    expected[1, [0, 8]] = [3.5, -91.0]
    expected[2, 4] = 4.0
    expected[3, [2, 5]] = -np.inf
    expected[4, [8, 1]] = -np.inf
    assert found.tolist() == expected.tolist()


def test_a_biased_or_penalised_ban_stays_a_ban():
    params = SamplingParams(logit_bias={3: 100.0}, repetition_penalty=0.5, presence_penalty=-2.0, min_tokens=4)
    settings = rows(sampling, [params], stop_ids=[(3,)], bad_words=[([4],)])
    found = adjusted(np.zeros((1, VOCAB), np.float32), settings, [[0, 0, 3, 4]], vocab_limit=7)
    assert np.flatnonzero(found[0] == -np.inf).tolist() == [3, 4, 7, 8]
    assert not np.isnan(found).any()


@pytest.mark.parametrize("repetition", [2.0**-126, 3e38])
def test_no_penalty_makes_a_logit_infinite(repetition: float):
    x = np.array([[40.0, -40.0, 0.0, -np.inf, np.inf, np.nan, 1.0, 1.0, 1.0]], np.float32)
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=2.0)
    found = adjusted(x, rows(sampling, [params], prompt_len=[7]), [list(range(7))])
    assert np.isfinite(found[0, [0, 1, 2]]).all() and found[0, 0] >= found[0, 2] > found[0, 1]
    assert found[0, 3:6].tolist()[:2] == [-np.inf, np.inf] and np.isnan(found[0, 5])  # what the model gave so stays


def test_ids_past_the_limit_are_forbidden_even_where_they_are_nan():
    x = np.zeros((1, VOCAB), np.float32)
    x[0, 7:] = [np.nan, np.inf]
    found = adjusted(x, rows(sampling, [SamplingParams()]), [[0]], vocab_limit=7)
    assert found[0].tolist() == [0.0] * 7 + [-np.inf] * 2


def test_lists_of_no_width():
    """An engine that allows no bias, stop id or bad word."""
    layout = sampling.RowLayout(max_logprobs=0, stop_ids=0, biases=0, bad_words=0, bad_word_tokens=1)
    params = SamplingParams(min_tokens=5, repetition_penalty=2.0)
    packed = sampling.pack_row(layout, params, index=0, seed=0, prompt_len=1, max_tokens=9, stop_ids=[], bad_words=[])
    found = adjusted(np.ones((1, VOCAB), np.float32), layout.unpack(packed[None]), [[2]])
    assert found[0].tolist() == [1, 1, 0.5, 1, 1, 1, 1, 1, 1]
