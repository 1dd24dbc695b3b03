"""Checks that a wrong sampler fails. Each takes the package, so that they also run against its mutants
(test_mutants.py). The expected values are worked out by hand, or exactly in `reference`.
"""

from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jpaged.config import SamplingParams
from tests.sampling import reference
from tests.sampling.support import ROWS, VOCAB, draws, rows, sample, support

GREEDY = SamplingParams(temperature=0)


def top_k_keeps_k_of_the_tied(sampling: ModuleType) -> None:
    tied = reference.logits([1, 4, 4, 4, 1, 4])
    assert support(sampling, tied, SamplingParams(top_k=1)) == {1}
    assert support(sampling, tied, SamplingParams(top_k=2)) == {1, 2}
    assert support(sampling, tied, SamplingParams(top_k=4)) == {1, 2, 3, 5}
    assert support(sampling, tied, SamplingParams(top_k=5)) == {0, 1, 2, 3, 5}
    assert support(sampling, tied, SamplingParams(top_k=7)) == {0, 1, 2, 3, 4, 5}
    assert support(sampling, tied, SamplingParams(top_k=-1)) == {0, 1, 2, 3, 4, 5}


def top_p_keeps_no_token_too_many(sampling: ModuleType) -> None:
    for size, top_p, count in [(4, 0.5, 2), (8, 0.25, 2), (10, 0.3, 3), (10, 0.7, 7), (3, 1 / 3, 1), (10, 0.31, 4)]:
        assert support(sampling, np.zeros(size, np.float32), SamplingParams(top_p=top_p)) == set(range(count))
    assert support(sampling, reference.logits([1, 5, 4]), SamplingParams(top_p=0.5)) == {1}
    assert support(sampling, reference.logits([1, 5, 4]), SamplingParams(top_p=0.9)) == {1, 2}
    assert support(sampling, reference.logits([1, 5, 4]), SamplingParams(top_p=1e-9)) == {1}


def top_p_is_of_what_top_k_left(sampling: ModuleType) -> None:
    # 4 + 3 of 10 is 0.7, but the first alone is 4/7 = 0.57 of what top_k leaves.
    assert support(sampling, reference.logits([4, 3, 2, 1]), SamplingParams(top_k=2, top_p=0.55)) == {0}
    assert support(sampling, reference.logits([4, 3, 2, 1]), SamplingParams(top_p=0.55)) == {0, 1}


def min_p_is_relative_to_the_best_and_comes_first(sampling: ModuleType) -> None:
    assert support(sampling, reference.logits([8, 4, 3, 1]), SamplingParams(min_p=0.5)) == {0, 1}
    assert support(sampling, reference.logits([8, 4, 3, 1]), SamplingParams(min_p=1.0)) == {0}
    # Before min_p 7/16 of the mass stands in front of the third token, behind it 7/14, the limit.
    assert support(sampling, reference.logits([4, 3, 7, 1, 1]), SamplingParams(min_p=0.25, top_p=0.5)) == {2}
    assert support(sampling, reference.logits([4, 3, 7, 1, 1]), SamplingParams(top_p=0.5)) == {2, 0}


def cuts_leave_proportions_as_they_are(sampling: ModuleType) -> None:
    """Chi-square over some 20,000 seeds, at the 1e-4 quantile of 3 degrees of freedom."""
    weights, count = [2, 8, 5, 1, 3, 1], 80 * ROWS
    params = SamplingParams(top_p=0.9, temperature=2.0)  # 8 + 5 + 3 + 2 of 20
    left = reference.kept(weights, top_p=Fraction(9, 10))
    assert left == {0, 1, 2, 4}
    drawn = draws(sampling, reference.logits(weights, 2.0), params, count)
    counts = np.bincount(drawn, minlength=len(weights))
    expected = np.array([w if i in left else 0 for i, w in enumerate(weights)]) * count / 18
    assert counts[[3, 5]].tolist() == [0, 0]
    seen = expected > 0
    assert np.sum((counts[seen] - expected[seen]) ** 2 / expected[seen]) < 21.1


def greedy_takes_the_first_best(sampling: ModuleType) -> None:
    x = np.zeros((3, VOCAB), np.float32)
    x[0, [7, 127, 159]] = 1.0
    x[1, [129, 130]] = 2.0
    x[2] = -5.0
    for params in (GREEDY, SamplingParams(top_k=1, temperature=1e6)):
        assert sample(sampling, x, rows(sampling, [params] * 3)).token_R.tolist() == [7, 129, 0]


def penalties_by_hand(sampling: ModuleType) -> None:
    """What is left of the logits shows in which token is the best, on both sides of each limit.

    The prompt has 0 and 1, the output 1, 2, 2. Token 3 has neither.
    """
    prompt, output = [0, 1], [1, 2, 2]

    def best(x: list[float], params: SamplingParams) -> int:
        return int(sample(sampling, [x], rows(sampling, [params]), [prompt + output]).token_R[0])

    def beats(token: int, value: float, left: float, **penalties: Any) -> None:
        """`token` keeps `left` of its `value`: it beats a little less on token 3, and loses to a little more."""
        x = [-50.0, -50.0, -50.0, -50.0]
        x[token] = value
        assert reference.penalised(
            x, prompt, output, **{name.removesuffix("_penalty"): number for name, number in penalties.items()}
        )[token] == pytest.approx(left)
        params = SamplingParams(temperature=0, **penalties)
        x[3] = left - 0.01
        assert best(x, params) == token
        x[3] = left + 0.01
        assert best(x, params) == 3

    beats(0, 3.0, 3.0, presence_penalty=0.5, frequency_penalty=0.25)  # in the prompt only
    beats(1, 3.0, 2.5, presence_penalty=0.5)
    beats(2, 3.0, 2.5, presence_penalty=0.5)  # twice in the output, once the presence
    beats(1, 3.0, 2.75, frequency_penalty=0.25)
    beats(2, 3.0, 2.5, frequency_penalty=0.25)  # twice
    beats(0, 3.0, 2.0, repetition_penalty=1.5)  # the prompt counts
    beats(2, 3.0, 2.0, repetition_penalty=1.5)  # once, however often
    beats(1, -3.0, -4.5, repetition_penalty=1.5)
    beats(2, 3.0, 3.0 / 1.5 - 2 * 0.25 - 0.5, repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.5)
    beats(2, 3.0, 4.0, presence_penalty=-1.0)


def bias_comes_before_penalties_and_after_logprobs(sampling: ModuleType) -> None:
    x = [[1.0, 2.0, 3.0, 0.0]]
    params = SamplingParams(temperature=0, logit_bias={0: 5.0, 2: -100}, repetition_penalty=2.0, logprobs=2)
    # Token 0: (1 + 5) / 2 = 3 if the bias comes first, 1 / 2 + 5 = 5.5 if it comes last. Token 1 wins at 3 < 3.5.
    x[0][1] = 3.5
    result = sample(sampling, x, rows(sampling, [params]), [[0, 3]])
    assert result.token_R.tolist() == [1]
    assert result.top_ids_RJ[0, :2].tolist() == [1, 2]
    np.testing.assert_allclose(result.logprob_R[0], reference.log_softmax(np.array(x[0]))[1], atol=1e-6)


def bad_words_are_banned_where_they_would_end(sampling: ModuleType) -> None:
    x = np.array([[0.0, 1.0, 2.0, 3.0, 4.0]])

    def best(words: list[list[int]], history: list[int], prompt_len: int) -> int:
        settings = rows(sampling, [GREEDY], bad_words=[words], prompt_len=[prompt_len])
        return int(sample(sampling, x, settings, [history]).token_R[0])

    assert best([[4]], [0, 0], 2) == 3
    assert best([[4], [3], [2]], [0, 0], 2) == 1
    assert best([[1, 4]], [0, 0, 1], 2) == 3
    assert best([[1, 4]], [0, 0, 2], 2) == 4
    assert best([[1, 4]], [0, 1], 2) == 4  # the 1 is in the prompt
    assert best([[1, 4]], [0, 1], 1) == 3
    assert best([[2, 1, 4]], [0, 0, 2, 1], 2) == 3
    assert best([[2, 1, 4]], [0, 2, 1], 2) == 4  # it begins in the prompt
    assert best([[2, 1, 4]], [0, 0, 1, 1], 2) == 4
    assert best([[2, 1, 4], [1, 3]], [0, 0, 2, 1], 2) == 2


def stop_ids_wait_for_the_minimum(sampling: ModuleType) -> None:
    x = [[0.0, 1.0, 2.0, 3.0]] * 3
    params = SamplingParams(temperature=0, min_tokens=2)
    settings = rows(sampling, [params] * 3, stop_ids=[(3, 2)] * 3)
    result = sample(sampling, x, settings, [[0, 0], [0, 0, 1], [0, 0, 1, 1]])
    assert result.token_R.tolist() == [1, 1, 3]


ALL = [
    top_k_keeps_k_of_the_tied,
    top_p_keeps_no_token_too_many,
    top_p_is_of_what_top_k_left,
    min_p_is_relative_to_the_best_and_comes_first,
    cuts_leave_proportions_as_they_are,
    greedy_takes_the_first_best,
    penalties_by_hand,
    bias_comes_before_penalties_and_after_logprobs,
    bad_words_are_banned_where_they_would_end,
    stop_ids_wait_for_the_minimum,
]
