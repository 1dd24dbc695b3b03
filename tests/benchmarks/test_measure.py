"""Figures from times that were written down by hand."""

import pytest

from scripts.benchmarks import measure
from scripts.benchmarks.measure import Run, Served, Spread


def served(arrival: float, *deltas: tuple[float, int]) -> Served:
    one = Served(arrival)
    for now, count in deltas:
        one.receive(now, [7] * count)
    return one


RUN = Run(
    [served(0.0, (1.0, 1), (3.0, 4)), served(0.5, (2.0, 1), (2.5, 1), (3.5, 2))],
    seconds=4.5,
    prefill_rate=None,
    decode_rate=None,
)


def test_rates_count_output_tokens():
    assert RUN.output_tokens == 9
    assert RUN.tokens_per_s == 2.0


def test_the_first_token_is_timed_from_the_arrival():
    assert RUN.ttft == [1.0, 1.5]


def test_a_gap_is_shared_by_the_tokens_that_end_it():
    assert RUN.gaps == [2.0, 0.5, 1.0]
    assert RUN.itl == [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_end_to_end():
    assert RUN.end_to_end == [3.0, 3.0]


def test_nothing_received_is_no_delta():
    one = served(0.0, (1.0, 0))
    assert (one.tokens, one.deltas) == ([], [])


def test_percentiles():
    assert measure.percentiles_ms(range(101)) == {"p50": 50_000.0, "p90": 90_000.0, "p99": 99_000.0}
    assert measure.percentiles_ms([]) is None


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_ratios_are_within_repeats():
    # The machine was half as fast in the second repeat; the ratio was the same.
    assert measure.ratio([30.0, 15.0, 45.0], [20.0, 10.0, 30.0]) == Spread(1.5, 1.5, 1.5)


def test_same_outputs():
    assert measure.same_outputs([[1, 2], [3], [4], [5]], [(1, 2), (4,), (4,), (5,)]) == pytest.approx(0.75)
