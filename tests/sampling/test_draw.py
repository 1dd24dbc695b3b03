"""Drawing: the seeds, the arithmetic of a draw, and its distribution."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged import sampling
from jpaged.config import SamplingParams
from jpaged.sampling import sampler, weights
from tests.sampling import reference
from tests.sampling.support import ROWS, draws, rows, sample

MOST_BITS = 2**32 - 1


@given(st.integers(0, MOST_BITS), st.integers(1, 2**31 - 1))
def test_scaled_is_the_high_word_of_the_product(bits: int, total: int):
    found = weights.scaled(jnp.array([bits], jnp.uint32), jnp.array([total], jnp.int32))
    assert found.tolist() == [bits * total >> 32]


def drawn(weights_V: list[int], bits: int, target: int | None = None) -> int:
    """The token for the same bits in every round. Tokens rank by their weights."""
    found = weights.draw(
        jnp.array([weights_V], jnp.int32),
        jnp.array([weights_V], jnp.float32),
        jnp.array([sum(weights_V) if target is None else target], jnp.int32),
        jnp.ones(1, jnp.bool_),
        lambda _: jnp.array([bits], jnp.uint32),
    )
    return int(found[0])


@pytest.mark.parametrize("bits", [0, 1, 2**31, MOST_BITS - 1, MOST_BITS])
def test_no_bits_draw_a_token_without_weight(bits: int):
    assert drawn([0, 0, 2**30, 0], bits) == 2
    assert drawn([0, 1, 0], bits) == 1
    assert drawn([7], bits) == 0


def test_a_draw_by_hand():
    """bits / 2**32 of a total of 8, over the sums 1, 1, 6, 8: token 0 below 1/8, 2 below 6/8, then 3."""
    eighth = 2**29
    assert [drawn([1, 0, 5, 2], bits) for bits in (0, eighth - 1, eighth, 6 * eighth - 1, 6 * eighth, MOST_BITS)] == [
        0,
        0,
        2,
        2,
        3,
        3,
    ]


def test_a_rejected_token_bounds_the_next_draw():
    """Target 5 accepts tokens 2 (nothing before it) and no other. Bits of 0 draw token 0 first, behind 7, then token 2,
    which alone with 3 ranks before it."""
    assert drawn([1, 0, 5, 2], 0, target=5) == 2
    assert drawn([1, 0, 5, 2], MOST_BITS, target=5) == 2
    assert drawn([1, 0, 5, 2], MOST_BITS, target=6) == 3


def test_rows_that_are_not_active_do_not_hold_up_the_others():
    found = weights.draw(
        jnp.array([[0, 0], [0, 3]], jnp.int32),
        jnp.zeros((2, 2), jnp.float32),
        jnp.array([0, 3], jnp.int32),
        jnp.array([False, True]),
        lambda round_: jnp.zeros(2, jnp.uint32),
    )
    assert found[1] == 1


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_seed_of_32_bits_makes_the_key_that_jax_makes(seed: int):
    assert sampling.seed_words(seed).tolist() == jax.random.key_data(jax.random.key(seed)).tolist()


def test_the_high_word_of_a_seed_counts():
    assert sampling.seed_words(2**40 + 3).tolist() == [256, 3]
    assert sampling.seed_words(-2).tolist() == [MOST_BITS, MOST_BITS - 1]
    assert sampling.seed_words(-(2**63)).tolist() == [2**31, 0]


def test_bits_come_from_seed_stream_position_and_round():
    settings = rows(sampling, [SamplingParams()] * 2, seed=[7, 2**33 + 7], index=[0, 3])
    position_R = jnp.array([5, 6], jnp.int32)
    for round_ in (0, 1):
        found = sampler._random_bits(settings, position_R)(jnp.int32(round_))
        for r, key in enumerate([jax.random.key(7), jax.random.wrap_key_data(jnp.array([2, 7], jnp.uint32))]):
            for number in ([0, 3][r], [5, 6][r], round_):
                key = jax.random.fold_in(key, number)
            assert found[r] == jax.random.bits(key, (), jnp.uint32)


def changed(change: Callable[[dict], None]) -> list[int]:
    """40 tokens of one row, sampled in a row of 40 equal ones but for `change`."""
    settings = {"seed": [11] * 40, "index": [0] * 40, "lengths": list(range(2, 10)) * 5}
    change(settings)
    lengths = settings.pop("lengths")
    x = np.tile(reference.logits(range(1, 41)), (40, 1))
    result = sample(sampling, x, rows(sampling, [SamplingParams()] * 40, **settings), [[0] * n for n in lengths])
    return result.token_R.tolist()


def test_seed_stream_and_position_each_change_the_draw():
    plain = changed(lambda _: None)
    assert plain == changed(lambda _: None)
    assert plain[:8] == plain[8:16]  # the same positions
    assert len(set(plain[:8])) > 4  # different ones
    assert plain != changed(lambda settings: settings.update(seed=[12] * 40))
    assert plain != changed(lambda settings: settings.update(seed=[11 + 2**32] * 40))
    assert plain != changed(lambda settings: settings.update(index=[1] * 40))


def test_the_distribution_of_a_plain_draw():
    """Chi-square over some 20,000 seeds, at the 1e-4 quantile of 9 degrees of freedom."""
    share, count = np.array([1, 9, 2, 8, 3, 7, 4, 6, 5, 5]), 80 * ROWS
    found = np.bincount(draws(sampling, reference.logits(share), SamplingParams(), count), minlength=10)
    expected = share / share.sum() * count
    assert np.sum((found - expected) ** 2 / expected) < 33.7


def test_neighbouring_seeds_are_independent():
    """Pairs of draws by seeds s and s + 1 over 4 equal tokens: 15 degrees of freedom, 1e-4 quantile."""
    tokens = draws(sampling, np.zeros(4, np.float32), SamplingParams(), 20 * ROWS)
    pairs = np.bincount(tokens[0::2] * 4 + tokens[1::2], minlength=16)
    expected = len(tokens) / 2 / 16
    assert np.sum((pairs - expected) ** 2 / expected) < 44.3
