"""What people read follows from the runs."""

import pytest

from scripts.benchmarks import host_report, report
from tests.benchmarks import made_up


def test_throughput():
    text = report.throughput(made_up.results(), "mixed", 1.2)
    assert "1.50 times as fast as transformers 5 (1.50 - 1.50, target ≥ 1.2: reached)" in text
    assert "2.00 times as fast as static batches (2.00 - 2.00)" in text
    assert "9 KV blocks at peak, 75.0% of their places held tokens" in text
    assert "2 requests, prompts 1-3, outputs 5 tokens, 2 at once; medians of 3 runs" in text


def test_a_missed_target_says_so():
    assert "target ≥ 1.8: missed" in report.throughput(made_up.results(), "mixed", 1.8)


def test_sampling():
    text = report.sampling(made_up.results(), made_up.sampled(), "sampling")
    assert "0.50 of the greedy rate (0.50 - 0.50, target ≥ 0.7: missed)" in text


def test_context():
    text = report.context(made_up.SETTING, 16, (16, 1024), made_up.STEPS, "context")
    assert "2.50 times as long (2.50 - 2.50, target ≤ 3: reached)" in text


def test_latency():
    text = report.latency(made_up.results(), "mixed", 2.0)
    assert "2 requests/s" in text
    assert [text.count(label) for label in report.WAITS.values()] == [2, 2, 2, 2]


@pytest.mark.parametrize(("append", "said"), [(1.5, "reached"), (2.5, "missed")])
def test_host_has_a_verdict_for_each_number_of_decode_steps(append: float, said: str):
    host = {
        "1": {"dispatch": 400.0, "step": 400.0, "admitting": 900.0, "text": 50.0},
        "8": {"dispatch": 800.0, "step": 100.0, "admitting": 900.0, "text": 50.0},
    }
    lines = host_report.text(
        {
            "slots": 256,
            "host": host,
            "waiting": 1000,
            "scheduler_us": 180.0,
            "lookup_len": 32768,
            "lookup_ms": 6.0,
            "num_blocks": 65536,
            "allocator_slots": 512,
            "allocator_ms": {"append": append},
            "targets": {"step_us": 300.0, "append_ms": 2.0, "scheduler_us": 1000.0, "lookup_ms": 5.0},
        }
    ).splitlines()
    assert "1 decode step a dispatch: 400 µs a step, target ≤ 300: missed" in lines
    assert "8 decode steps a dispatch: 100 µs a step, target ≤ 300: reached" in lines
    assert "scheduler with 1,000 more waiting: 180 µs a step, target ≤ 1000: reached" in lines
    assert "prefix of 32,768 tokens looked up in 6.0 ms, target ≤ 5: missed" in lines
    assert lines[-1] == f"append {append:.2f} ms, target ≤ 2: {said}"


def test_tables_are_aligned():
    assert report.table([("a", "10"), ("bcd", "9")]) == "a    10\nbcd   9"
