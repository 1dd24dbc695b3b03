"""Log-probabilities, of sampled tokens and of prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import sampling
from jpaged.config import NO_TOKEN, SamplingParams
from tests.sampling import reference
from tests.sampling.support import layout, rows, sample


def test_by_hand():
    """Probabilities 4, 1, 2, 2, 1 of 10: token 2 is third, for 2 and 3 are tied and 0 is first."""
    found = sampling.token_logprobs(
        jnp.asarray(np.tile(reference.logits([4, 1, 2, 2, 1]), (2, 1))), jnp.array([2, 4], jnp.int32), 3
    )
    np.testing.assert_allclose(found.logprob_T, np.log([0.2, 0.1]), atol=1e-6)
    assert found.rank_T.tolist() == [2, 5]
    assert found.top_ids_TJ.tolist() == [[0, 2, 3]] * 2
    np.testing.assert_allclose(found.top_logprobs_TJ, [np.log([0.4, 0.2, 0.2])] * 2, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 128, 1000])
def test_against_float64(size: int):
    generator = np.random.default_rng(size)
    x = (generator.normal(size=(4, size)) * 20).astype(np.float32)
    tokens = generator.integers(0, size, 4).astype(np.int32)
    found = sampling.token_logprobs(jnp.asarray(x), jnp.asarray(tokens), 5)
    for t in range(4):
        expected, order = reference.log_softmax(x[t]), reference.ranking(x[t].tolist())
        np.testing.assert_allclose(found.logprob_T[t], expected[tokens[t]], atol=1e-5)
        assert found.rank_T[t] == order.index(tokens[t]) + 1
        listed = min(5, size)
        assert found.top_ids_TJ[t].tolist() == order[:listed] + [NO_TOKEN] * (5 - listed)
        np.testing.assert_allclose(found.top_logprobs_TJ[t, :listed], expected[order[:listed]], atol=1e-5)
        assert found.top_logprobs_TJ[t, listed:].tolist() == [-np.inf] * (5 - listed)


def test_sampled_tokens_have_the_models_logprobs():
    """No temperature, cut, penalty, bias or ban has a part in them, and one row's wish serves that row."""
    x = (np.random.default_rng(3).normal(size=(3, 20)) * 3).astype(np.float32)
    params = SamplingParams(
        temperature=0.3, top_k=2, top_p=0.5, min_p=0.1, logit_bias={4: 9.0}, repetition_penalty=2.0, logprobs=5
    )
    result = sample(sampling, x, rows(sampling, [params, SamplingParams(), params]), [[4, 4, 4]] * 3)
    for r in range(3):
        expected = reference.log_softmax(x[r])
        np.testing.assert_allclose(result.logprob_R[r], expected[result.token_R[r]], atol=1e-5)
        assert result.top_ids_RJ[r].tolist() == reference.ranking(x[r].tolist())[:5]
        np.testing.assert_allclose(result.top_logprobs_RJ[r], np.sort(expected)[::-1][:5], atol=1e-5)
        assert result.rank_R[r] == reference.ranking(x[r].tolist()).index(result.token_R[r]) + 1


def test_nobody_asks():
    result = sample(sampling, np.zeros((1, 4)), rows(sampling, [SamplingParams()]))
    assert not result.logprob_R.any() and not result.rank_R.any() and not result.top_logprobs_RJ.any()


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 70, 130])
def test_prompt_logprobs_in_chunks(num_tokens: int):
    generator = np.random.default_rng(num_tokens)
    hidden_TE = jnp.asarray(generator.normal(size=(num_tokens, 3)), jnp.float32)
    head_EV = jnp.asarray(generator.normal(size=(3, 50)), jnp.float32)
    next_T = jnp.asarray(generator.integers(0, 50, num_tokens), jnp.int32)

    @jax.jit
    def run(wanted: jax.Array) -> sampling.TokenLogprobs:
        return sampling.prompt_logprobs(lambda hidden: hidden @ head_EV, hidden_TE, next_T, wanted, layout(sampling))

    found = run(jnp.array(True))
    at_once = sampling.token_logprobs(hidden_TE @ head_EV, next_T, 5)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, at_once)
    np.testing.assert_allclose(found.logprob_T, at_once.logprob_T, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs_TJ, at_once.top_logprobs_TJ, atol=1e-5)
    assert found.rank_T.tolist() == at_once.rank_T.tolist()
    assert found.top_ids_TJ.tolist() == at_once.top_ids_TJ.tolist()
    assert all(not np.asarray(field).any() for field in jax.tree.leaves(run(jnp.array(False))))
