"""One step of sampling as a whole: whose token it is, what ends a sequence, and what is compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import sampling
from jpaged.config import NO_TOKEN, EngineConfig, SamplingParams
from tests.sampling import reference
from tests.sampling.support import VOCAB, layout, rows, sample, support

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=10),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0, logit_bias={3: 4.0}),
    SamplingParams(min_tokens=8),
]


def batch(count: int) -> tuple[np.ndarray, list[SamplingParams], list[list[int]]]:
    generator = np.random.default_rng(0)
    x = (generator.normal(size=(count, VOCAB)) * 3).astype(np.float32)
    histories = [generator.integers(0, VOCAB, 2 + r % 9).tolist() for r in range(count)]
    return x, [KINDS[r % len(KINDS)] for r in range(count)], histories


def test_a_row_does_not_depend_on_its_batch():
    """Each row alone, in the batch, and in the batch in another order."""
    count = 3 * len(KINDS)
    x, params, histories = batch(count)
    settings = {"stop_ids": [(1, 2)] * count, "bad_words": [([5], [6, 7])] * count}
    whole = sample(sampling, x, rows(sampling, params, **settings), histories)
    order = np.random.default_rng(1).permutation(count)
    permuted = sample(
        sampling,
        x[order],
        rows(sampling, [params[r] for r in order], seed=order.tolist(), **settings),
        [histories[r] for r in order],
    )
    assert permuted.token_R.tolist() == whole.token_R[order].tolist()
    one = {"stop_ids": [(1, 2)], "bad_words": [([5], [6, 7])]}
    for r in range(count):
        alone = sample(sampling, x[[r]], rows(sampling, [params[r]], seed=[r], **one), [histories[r]])
        assert alone.token_R[0] == whole.token_R[r]
        if params[r].logprobs is not None:
            assert alone.logprob_R[0] == whole.logprob_R[r]
            assert alone.top_ids_RJ[0].tolist() == whole.top_ids_RJ[r].tolist()


def test_a_row_does_not_depend_on_the_size_of_its_batch():
    """The same rows in batches of other shapes, which compile to other code."""
    x, params, histories = batch(len(KINDS))
    settings = rows(sampling, params)
    whole = sample(sampling, x, settings, histories)
    history_RP = jnp.asarray([history + [0] * (20 - len(history)) for history in histories], jnp.int32)
    lengths_R = jnp.asarray([len(history) for history in histories], jnp.int32)
    step = jax.jit(functools.partial(sampling.sample, vocab_limit=VOCAB))
    for some in (slice(0, 1), slice(1, 4), slice(0, 8)):
        part = jax.tree.map(lambda field, some=some: field[some], settings)
        found = step(jnp.asarray(x[some]), part, history_RP[some], lengths_R[some])
        assert found.token_R.tolist() == whole.token_R[some].tolist()


@pytest.mark.parametrize("params", KINDS)
def test_rows_that_cannot_be_sampled_are_reported_and_hurt_nobody(params: SamplingParams):
    x = np.tile(reference.logits(range(1, 21)), (6, 1))
    good = sample(sampling, x, rows(sampling, [params] * 6)).token_R
    x[0, 3] = np.nan
    x[1] = np.nan
    x[2] = -np.inf
    x[3, 19] = np.inf
    found = sample(sampling, x, rows(sampling, [params] * 6))
    assert found.bad_R.tolist() == [True, True, True, True, False, False]
    assert found.token_R.tolist() == [0, 0, 0, 0, *good[4:].tolist()]


def test_a_request_that_forbids_everything_is_reported():
    params = SamplingParams(min_tokens=1)
    found = sample(sampling, np.zeros((2, 3)), rows(sampling, [params] * 2, stop_ids=[(0, 1, 2), (0, 1)]))
    assert found.bad_R.tolist() == [True, False]
    assert found.token_R[1] == 2


def test_ids_past_the_limit_are_never_sampled():
    x = np.zeros((4, VOCAB), np.float32)
    x[:, 100:] = 50.0
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5, top_p=0.9)):
        found = sample(sampling, x, rows(sampling, [params] * 4), vocab_limit=100)
        assert max(found.token_R) < 100


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3, top_p=0.9, min_p=0.2, temperature=1e30)])
def test_one_token_is_left(params: SamplingParams):
    x = np.full(VOCAB, -np.inf, np.float32)
    x[150] = -7.0
    assert support(sampling, x, params) == {150}


def test_a_high_temperature_makes_all_equal_and_a_low_one_is_greedy():
    x = reference.logits([1, 2, 3, 4])
    assert support(sampling, x, SamplingParams(temperature=1e30)) == {0, 1, 2, 3}
    assert support(sampling, x, SamplingParams(temperature=0.01)) == {3}
    assert support(sampling, x, SamplingParams(temperature=1e-7)) == {3}


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129])
def test_small_vocabularies(size: int):
    """Of every size around a block, with more tokens asked for than there are."""
    params = [
        SamplingParams(temperature=0, logprobs=5),
        SamplingParams(top_k=1000, top_p=0.999),
        SamplingParams(top_k=1),
    ]
    x = np.tile(np.arange(size, dtype=np.float32), (3, 1))
    found = sampling.sample(
        jnp.asarray(x),
        rows(sampling, params),
        jnp.zeros((3, 4), jnp.int32),
        jnp.full(3, 2, jnp.int32),
        vocab_limit=size,
    )
    assert found.token_R[0] == found.token_R[2] == size - 1
    assert 0 <= found.token_R[1] < size
    assert found.top_ids_RJ[0].tolist() == [size - 1 - j if j < size else NO_TOKEN for j in range(5)]


def test_what_ends_a_sequence():
    """Prompts of 2 tokens and at most 3 more; stop ids 7 and 8, allowed from the second output token on."""
    settings = rows(sampling, [SamplingParams(min_tokens=2)] * 6, stop_ids=[(7, 8)] * 6, max_tokens=[3] * 6)
    token_R, lengths = [5, 7, 7, 8, 5, 5], [2, 2, 3, 3, 3, 4]
    sampled = sampling.blank(layout(sampling), (6,)).replace(token_R=jnp.array(token_R, jnp.int32))
    over_R = sampling.is_over(sampled, settings, jnp.array(lengths, jnp.int32))
    assert over_R.tolist() == [False, False, True, True, False, True]
    bad_R = jnp.array([True, False, False, False, False, False])
    assert sampling.is_over(sampled.replace(bad_R=bad_R), settings, jnp.array(lengths, jnp.int32))[0]


def test_blank_has_the_form_of_a_result():
    result = sample(sampling, np.zeros((2, 4)), rows(sampling, [SamplingParams()] * 2))
    blank = sampling.blank(layout(sampling), (3, 2))
    for name in ("token_R", "bad_R", "logprob_R", "rank_R", "top_ids_RJ", "top_logprobs_RJ"):
        field, zeros = getattr(result, name), getattr(blank, name)
        assert zeros.shape == (3, *field.shape) and zeros.dtype == field.dtype


@pytest.mark.usefixtures("no_executable_cache")
def test_nothing_is_sorted():
    """Neither in the program as written nor in the one that XLA makes of it."""
    layout_ = sampling.RowLayout.of(EngineConfig(), 1000)
    lowered = jax.jit(functools.partial(sampling.sample, vocab_limit=990)).lower(
        jnp.zeros((2, 1000)), sampling.create(layout_, 2), jnp.zeros((2, 8), jnp.int32), jnp.zeros(2, jnp.int32)
    )
    for text in (lowered.as_text(), str(lowered.compile().as_text())):
        assert re.search(r"\bwhile\b", text)  # it is a program
        assert not re.search(r"\bsort\b *[(]|[.]sort\b|TopK|[.]top_k\b|\btopk *[(]", text)


def test_it_runs_inside_a_loop_on_the_device():
    """A decode of several steps: sampled tokens become history, and history penalises them."""
    settings = rows(sampling, [SamplingParams(temperature=0, presence_penalty=2.0)])
    logits_RV = jnp.asarray(reference.logits([8, 7, 6, 5])[None])

    @jax.jit
    def decode(history_RP: jax.Array) -> jax.Array:
        def step(k: jax.Array, history_RP: jax.Array) -> jax.Array:
            found = sampling.sample(logits_RV, settings, history_RP, 2 + jnp.full(1, k, jnp.int32), vocab_limit=4)
            return history_RP.at[:, 2 + k].set(found.token_R)

        return jax.lax.fori_loop(0, 5, step, history_RP)

    assert decode(jnp.zeros((1, 8), jnp.int32)).tolist() == [[0, 0, 0, 1, 2, 3, 0, 0]]
