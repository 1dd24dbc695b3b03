"""Host work is timed while all sequences decode together, however many they are and however long."""

import statistics

import pytest

from jpaged.config import EngineConfig
from scripts.benchmarks import host

pytestmark = [
    pytest.mark.usefixtures("annotations_unchecked"),  # the answers stand for arrays, and the model for none
    pytest.mark.one_python,
]


# One slot; a part of those that start in a step, all of them, and one more; more than EngineConfig's tokens of a step.
@pytest.mark.parametrize(("slots", "decode_steps"), [(1, 1), (3, 8), (8, 5), (9, 1), (20, 3), (520, 1)])
def test_the_least_output_len_is_just_enough(slots: int, decode_steps: int):
    least, _ = host.output_lens(slots, decode_steps)
    assert all(seconds > 0 for seconds in host.step_seconds(slots, decode_steps, least, None).values())
    with pytest.raises(statistics.StatisticsError):
        host.step_seconds(slots, decode_steps, least - 1, None)


def test_sequences_may_be_longer_than_any_model_of_ours():
    assert host.step_seconds(2, 512, 10_000, None)["decode"] > 0


def test_the_longest_sequence_is_one_that_an_engine_takes():
    _, most = host.output_lens(1, 1)
    assert EngineConfig(max_model_len=host.PROMPT_LEN + most).max_model_len == host.MOST_TOKENS
