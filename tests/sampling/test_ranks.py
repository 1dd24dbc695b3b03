"""Finding entries by rank, against sorted lists."""

from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.sampling import ranks
from tests.sampling import reference

SIZE = 300  # two blocks and a part of one

# Few values, so that most are tied; both zeros, which are equal; values whose bits are far apart and close together.
AWKWARD = [-np.inf, -3e38, -2.5, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, np.nextafter(np.float32(1), 2), 7.25, 3e38]

best = jax.jit(ranks.best)
best_few = jax.jit(ranks.best_few, static_argnames="count")
first_reaching = jax.jit(ranks.first_reaching)
kth_by_steps = jax.jit(ranks._kth_by_steps)
kth_by_halving = jax.jit(ranks._kth_by_halving)
weight_before = jax.jit(lambda x, w, index: ranks.weight_before(x, w, ranks.at(x, index)))

rows_of_values = st.lists(st.sampled_from(AWKWARD), min_size=SIZE, max_size=SIZE).map(
    lambda x: np.array([x], np.float32)
)


@settings(max_examples=50)
@given(rows_of_values)
def test_best_and_best_few_are_the_head_of_the_ranking(x: np.ndarray):
    order = reference.ranking(x[0].tolist())
    place = best(x)
    assert place.index_R.tolist() == order[:1]
    assert place.value_R.tolist() == [x[0, order[0]]]
    above = int(np.sum(x > -np.inf))
    indices, values = best_few(x, count=20)
    assert indices[0].tolist() == [*order[: min(20, above)], *[SIZE] * (20 - above)]
    assert values[0].tolist() == [x[0, i] if x[0, i] > -np.inf else -np.inf for i in order[:20]]


@settings(max_examples=50)
@given(rows_of_values, st.integers(1, SIZE))
def test_kth_is_the_same_by_steps_and_by_halving(x: np.ndarray, k: int):
    above = int(np.sum(x > -np.inf))
    if above == 0:
        return
    k = min(k, above)
    expected = reference.ranking(x[0].tolist())[k - 1]
    for find in (kth_by_steps, kth_by_halving):
        place = find(x, jnp.array([k], jnp.int32))
        assert place.index_R.tolist() == [expected]
        assert place.value_R.tolist() == [x[0, expected]]


@pytest.mark.parametrize("largest", [3, ranks.MOST_STEPS, ranks.MOST_STEPS + 1])
def test_kth_of_several_rows_at_once(largest: int):
    x = np.random.default_rng(largest).integers(-40, 40, (3, 700)).astype(np.float32)
    k = [1, 2, largest]
    place = jax.jit(ranks.kth)(x, jnp.array(k, jnp.int32))
    assert place.index_R.tolist() == [reference.ranking(x[r].tolist())[k[r] - 1] for r in range(3)]


@settings(max_examples=50)
@given(rows_of_values, st.lists(st.integers(0, 5), min_size=SIZE, max_size=SIZE), st.integers(0, SIZE - 1))
def test_weight_before(x: np.ndarray, weights: list[int], index: int):
    order = reference.ranking(x[0].tolist())
    expected = sum(weights[i] for i in order[: order.index(index)])
    found = weight_before(x, jnp.array([weights], jnp.int32), jnp.array([index], jnp.int32))
    assert found.tolist() == [expected]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE), st.floats(0, 1))
def test_first_reaching(weights: list[int], share: float):
    total = sum(weights)
    if total == 0:
        return
    need = 1 + round(share * (total - 1))
    expected = next(i for i, end in enumerate(accumulate(weights)) if end >= need)
    found = first_reaching(jnp.array([weights], jnp.int32), jnp.array([need], jnp.int32))
    assert found.tolist() == [expected]


def test_first_reaching_with_all_weight_in_one_entry():
    weights = np.zeros((3, SIZE), np.int32)
    weights[[0, 1, 2], [0, 130, SIZE - 1]] = 2**30
    for need in (1, 2**30):
        assert first_reaching(weights, jnp.full(3, need, jnp.int32)).tolist() == [0, 130, SIZE - 1]


@pytest.mark.parametrize("at", [0, 127, 128, SIZE - 1])
def test_best_reports_a_nan_wherever_it_is(at: int):
    x = np.zeros((2, SIZE), np.float32)
    x[0, at] = np.nan
    assert best(x).value_R.tolist() == [np.inf, 0.0]
