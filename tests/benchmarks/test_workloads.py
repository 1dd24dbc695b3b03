"""What is asked for is what the cases promise, the same each time and everywhere."""

import pytest

from scripts.benchmarks import workloads
from scripts.benchmarks.workloads import CASES, Case, Workload


@pytest.mark.parametrize(
    ("name", "requests", "prompts", "outputs", "slots"),
    [
        ("single", 1, (64, 64), (128, 128), 1),
        ("parallel16", 16, (64, 64), (128, 128), 16),
        ("mixed", 64, (16, 512), (16, 256), 16),
    ],
)
def test_cases(name: str, requests: int, prompts: tuple[int, int], outputs: tuple[int, int], slots: int):
    workload = workloads.synthetic(CASES[name], vocab_size=1000)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert (len(lengths), len(workload.outputs), workload.slots) == (requests, requests, slots)
    assert prompts[0] <= min(lengths) <= max(lengths) <= prompts[1]
    assert outputs[0] <= min(workload.outputs) <= max(workload.outputs) <= outputs[1]
    assert all(0 <= token < 1000 for prompt in workload.prompts for token in prompt)


def test_mixed_lengths_are_mixed():
    workload = workloads.synthetic(CASES["mixed"], vocab_size=1000)
    assert len(set(map(len, workload.prompts))) > 48
    assert len(set(workload.outputs)) > 48


def test_a_seed_means_one_workload():
    case = CASES["mixed"]
    assert workloads.synthetic(case, 1000, seed=3) == workloads.synthetic(case, 1000, seed=3)
    assert workloads.synthetic(case, 1000, seed=3) != workloads.synthetic(case, 1000, seed=4)


def test_a_workload_does_not_change_between_versions():
    workload = workloads.synthetic(Case("", 3, (2, 5), (1, 9), 2), vocab_size=100, seed=0)
    assert workload == Workload(((7, 1, 17, 81, 64), (91, 50, 60, 97), (72, 63, 54, 55)), (3, 3, 1), 2)


def test_sums():
    workload = Workload(((1, 2, 3), (4,)), (5, 9), 2)
    assert (workload.prompt_tokens, workload.output_tokens, workload.longest) == (4, 14, 10)


def test_given_prompts_get_the_outputs_of_the_case():
    workload = workloads.given(Case("", 9, (1, 1), (4, 4), 3), [[7, 8], [9]])
    assert workload == Workload(((7, 8), (9,)), (4, 4), 3)


@pytest.mark.parametrize(("text", "range_"), [("64", (64, 64)), ("16:512", (16, 512)), ("3:3", (3, 3))])
def test_ranges(text: str, range_: tuple[int, int]):
    assert workloads.parse_range(text) == range_


@pytest.mark.parametrize("text", ["", "0", "-1", "9:3", "1:2:3", "a", "1:", "0:4"])
def test_ranges_that_are_none(text: str):
    with pytest.raises(ValueError, match="try 64 or 16:512"):
        workloads.parse_range(text)


def test_arrivals():
    assert workloads.arrivals(3, 0.0) == [0.0, 0.0, 0.0]
    times = workloads.arrivals(2000, 4.0, seed=1)
    assert times == workloads.arrivals(2000, 4.0, seed=1)
    assert list(times) == sorted(times)
    assert times[-1] / 2000 == pytest.approx(1 / 4.0, rel=0.1)
