"""What is printed follows from the runs, and both forms say the same."""

import json

import pytest

from scripts.benchmarks import report
from scripts.benchmarks.measure import Run, Served
from scripts.benchmarks.results import Results, Setting
from scripts.benchmarks.workloads import Workload

SETTING = Setting("mixed", "small", "xla", "float32", "0.12", "cpu", 2)
KEYS = [
    "model",
    "backend",
    "dtype",
    "jax",
    "device",
    "requests",
    "prompt_tokens",
    "output_tokens",
    "seconds",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "total_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "blocks_peak",
    "kv_share",
    "peer",
    "peer_tokens_per_s",
    "ratio",
    "runs",
    "baseline",
]


def run(seconds: float, token: int = 7, *, blocks: int | None = None) -> Run:
    served = [Served(0.0), Served(0.0)]
    served[0].receive(seconds / 2, [token])
    served[0].receive(seconds, [token] * 4)
    served[1].receive(seconds / 2, [token] * 5)
    return Run(served, seconds, 100.0, 50.0, blocks, None if blocks is None else 0.75)


@pytest.fixture
def results() -> Results:
    found = Results(SETTING, Workload(((1, 2, 3), (4,)), (5, 5), 2))
    found.paged = [run(2.0, blocks=9), run(1.0, blocks=9), run(4.0, blocks=9)]
    found.baseline = [run(4.0), run(2.0), run(8.0, token=8)]
    found.peer = "transformers 5, torch 2", "AVX"
    found.peer_seconds = [3.0, 1.5, 6.0]
    found.peer_outputs = [[7] * 5, [7] * 4 + [8]]
    return found


def test_json_has_the_promised_keys(results: Results):
    record = json.loads(json.dumps(report.as_json(results, 1.2)))
    assert set(KEYS) <= set(record)


def test_json_is_of_the_median_run(results: Results):
    record = report.as_json(results, 1.2)
    assert (record["seconds"], record["output_tokens_per_s"], record["total_tokens_per_s"]) == (2.0, 5.0, 7.0)
    assert (record["prompt_tokens"], record["output_tokens"], record["requests"]) == (4, 10, 2)
    assert record["ttft_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert record["itl_ms"] == {"p50": 250.0, "p90": 250.0, "p99": 250.0}
    assert (record["blocks_peak"], record["kv_share"]) == (9, 0.75)


def test_json_compares(results: Results):
    record = report.as_json(results, 1.2)
    assert (record["ratio"], record["ratio_range"], record["target"]) == (1.5, [1.5, 1.5], 1.2)
    assert record["peer_tokens_per_s"] == pytest.approx(10 / 3, abs=1e-4)
    assert record["peer_same_outputs"] == 0.5
    assert (record["baseline"]["ratio"], record["baseline"]["same_outputs"]) == (2.0, 0.0)
    assert record["runs"][1] == {"seconds": 1.0, "baseline_seconds": 2.0, "peer_seconds": 1.5}


def test_json_without_a_peer(results: Results):
    results.peer, results.peer_seconds, results.peer_outputs = None, [], None
    record = report.as_json(results)
    assert (record["peer"], record["ratio"], record["peer_tokens_per_s"]) == (None, None, None)
    assert record["runs"][0] == {"seconds": 2.0, "baseline_seconds": 4.0}


def test_text_says_the_same(results: Results):
    text = report.as_text(results, "mixed", 1.2)
    assert "1.50 times as fast as transformers 5 (1.50 - 1.50, target ≥ 1.2: reached)" in text
    assert "2.00 times as fast as static batches (2.00 - 2.00)" in text
    assert "9 KV blocks at peak, 75.0% of their places held tokens" in text
    assert "2 requests, prompts 1-3, outputs 5 tokens, 2 at once; medians of 3 runs" in text


def test_a_missed_target_says_so(results: Results):
    assert "target ≥ 1.8: missed" in report.as_text(results, "mixed", 1.8)


def test_sampling(results: Results):
    text, record = report.sampling(results, [run(4.0), run(2.0), run(8.0)], "sampling")
    assert record["sampled"] == {"output_tokens_per_s": 2.5, "ratio": 0.5, "ratio_range": [0.5, 0.5], "target": 0.7}
    assert "0.50 of the greedy rate (0.50 - 0.50, target ≥ 0.7: missed)" in text


def test_context():
    seconds = ([0.1, 0.2], [0.25, 0.5])
    text, record = report.context(SETTING, 16, (16, 1024), seconds, "context")
    assert (record["step_ms"], record["ratio"]) == ({"16": 150.0, "1024": 375.0}, 2.5)
    assert record["runs"][0] == {"short_ms": 100.0, "long_ms": 250.0}
    assert "2.50 times as long (2.50 - 2.50, target ≤ 3: reached)" in text


def test_latency(results: Results):
    record = report.latency_json(results, 2.0)
    assert record["rate"] == 2.0
    assert record["ttft_ms"]["p50"] == 1000.0  # of 0.5, 1 and 2 s, twice each
    assert record["end_to_end_ms"]["p90"] == 3000.0  # of 0.5, 1, 1, 2, 2 and 4 s
    assert record["baseline"]["ttft_ms"]["p50"] == 2000.0
    assert "2 requests/s" in report.latency_text(results, "mixed", 2.0)


def test_tables_are_aligned():
    assert report.table([("a", "10"), ("bcd", "9")]) == "a    10\nbcd   9"
