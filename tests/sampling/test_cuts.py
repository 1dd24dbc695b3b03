"""Which tokens the cuts keep, against exact arithmetic, and how the weights come out."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.sampling import ranks, weights
from tests.sampling import reference


@jax.jit
def kept_R(x_RV: jax.Array, temperature_R: jax.Array, min_p_R: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array):
    """The weights after min-p and top-k, and which tokens of weight top-p then accepts."""
    rows, size = x_RV.shape
    active_R = jnp.ones(rows, jnp.bool_)
    weights_RV = weights.weigh(x_RV, jnp.max(x_RV, axis=1), temperature_R, min_p_R)
    weights_RV = weights.keep_top_k(weights_RV, x_RV, top_k_R, active_R)
    target_R = weights.top_p_target(weights_RV, top_p_R)

    def accepted(index: jax.Array) -> jax.Array:
        place = ranks.at(x_RV, jnp.full(rows, index, jnp.int32))
        return ranks.weight_before(x_RV, weights_RV, place) < target_R

    return weights_RV, (weights_RV > 0) & jax.vmap(accepted, out_axes=1)(jnp.arange(size, dtype=jnp.int32))


def kept(x: np.ndarray, *, temperature: float = 1, min_p: float = 0, top_k: int = 0, top_p: float = 1) -> set[int]:
    floats = (jnp.array([value], jnp.float32) for value in (temperature, min_p))
    _, marks_RV = kept_R(x[None], *floats, jnp.array([top_k], jnp.int32), jnp.array([top_p], jnp.float32))
    return set(np.flatnonzero(marks_RV[0]).tolist())


def weigh(x: np.ndarray, temperature: float = 1) -> jax.Array:
    x_1V = jnp.asarray(x[None])
    return weights.weigh(x_1V, jnp.max(x_1V, axis=1), jnp.array([temperature], jnp.float32), jnp.zeros(1))


shares = st.integers(1, 20).flatmap(lambda whole: st.integers(1, whole).map(lambda part: Fraction(part, whole)))


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 6), min_size=12, max_size=12).filter(any),
    st.integers(0, 13),
    shares,
    st.one_of(st.just(Fraction(0)), shares),
    st.sampled_from([1.0, 0.5, 3.0]),
)
def test_kept_tokens(share: list[int], top_k: int, top_p: Fraction, min_p: Fraction, temperature: float):
    """Small whole weights tie and add up to the limits again and again."""
    found = kept(
        reference.logits(share, temperature),
        temperature=temperature,
        min_p=float(min_p),
        top_k=top_k,
        top_p=float(top_p),
    )
    assert found == reference.kept(share, top_k=top_k, top_p=top_p, min_p=min_p)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=12, max_size=12), st.integers(1, 12))
def test_kept_tokens_at_any_limit(share: list[int], count: int):
    """top_p exactly at a cumulative sum keeps as many as make the sum."""
    order = reference.ranking(share)
    top_p = Fraction(sum(share[i] for i in order[:count]), sum(share))
    assert kept(reference.logits(share), top_p=float(top_p)) == set(order[:count])


@pytest.mark.parametrize("size", [1, 127, 128, 129, 50_257])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.999])
def test_a_large_vocabulary_is_cut_where_float64_cuts_it(size: int, top_p: float):
    x = (np.random.default_rng(size).normal(size=size) * 3).astype(np.float32)
    p = np.exp(reference.log_softmax(x / np.float32(0.8)))
    order = np.lexsort((np.arange(size), -x))
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    expected = int(np.sum((before < top_p) | (np.arange(size) == 0)))
    weights_RV = weigh(x, 0.8)
    target_R = weights.top_p_target(weights_RV, jnp.array([top_p], jnp.float32))
    sums = np.concatenate([[0], np.cumsum(np.asarray(weights_RV)[0, order], dtype=np.int64)[:-1]])
    found = int(np.sum(sums < int(target_R[0])))
    doubtful = np.sum(np.abs(before - top_p) < 4e-6)  # SLACK, and what rounding to integers adds
    assert abs(found - expected) <= doubtful


def test_weights_by_hand():
    """1 + 1/2 + 1/4 + 1/4 is 2, and 2**28 brings it into [2**29, 2**30)."""
    x = reference.logits([4, 2, 1, 1, 0])
    weights_RV = weigh(x)
    np.testing.assert_allclose(weights_RV[0], np.array([4, 2, 1, 1, 0]) * 2.0**26, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e6, 3e38])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e38])
def test_weights_of_extreme_settings_stay_in_range(temperature: float, scale: float):
    x = np.array([3.0, 2.0, 2.0, -3.0, -np.inf], np.float32) * np.float32(scale)
    found = np.asarray(weigh(x, temperature))[0].astype(np.int64)
    assert found.min() >= 0
    assert 2**28 < found.sum() <= 2**30
    assert found[4] == 0
    assert found[0] >= found[1] == found[2] >= found[3]


def test_a_flat_vocabulary_of_a_quarter_million_fits_an_int32():
    found = np.asarray(weigh(np.zeros(262_144, np.float32))).astype(np.int64)
    assert found.sum() == 2**29
    assert set(found[0].tolist()) == {2**11}


@pytest.mark.parametrize("top_k", [1, 5, 300, 400, 1000, 2000])
def test_top_k_of_a_thousand_with_ties(top_k: int):
    x = np.random.default_rng(0).integers(0, 9, 1000).astype(np.float32) / 4
    assert kept(x, top_k=top_k) == set(reference.ranking(x.tolist())[:top_k])


def test_tokens_that_the_temperature_made_equal_are_no_ties():
    x = np.array([1.0, 1.5, 2.0, 0.5], np.float32)
    assert kept(x, temperature=1e30, top_k=1) == {2}
    assert kept(x, temperature=1e30, top_k=2) == {2, 1}
    assert kept(x, temperature=1e30, top_p=0.5) == {2, 1}
