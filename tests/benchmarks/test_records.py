"""What programs read follows from the runs, and every case has the same keys."""

import json
from typing import Any

import pytest

from scripts.benchmarks import records
from tests.benchmarks import made_up

# What scripts of other people may rely on.
PROMISED = {
    "case",
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
    "output_tokens_per_s",
    "total_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "blocks_peak",
    "kv_share",
    "baseline",
    "peer",
    "peer_tokens_per_s",
    "ratio",
    "runs",
}

# A record of each kind, and the keys that only this kind has.
KINDS = [
    (records.throughput(made_up.results(), 1.2), set()),
    (records.sampling(made_up.results(), made_up.sampled()), {"sampled"}),
    (records.context(made_up.SETTING, 16, (16, 1024), made_up.STEPS), {"step_ms"}),
    (records.latency(made_up.results(), 2.0), {"rate", "end_to_end_ms"}),
]


@pytest.mark.parametrize(("record", "own"), KINDS, ids=["throughput", "sampling", "context", "latency"])
def test_every_record_has_the_same_keys_and_its_own(record: dict[str, Any], own: set[str]):
    assert set(records.KEYS) >= PROMISED
    assert set(json.loads(json.dumps(record))) == set(records.KEYS) | own


def test_figures_are_of_the_median_run():
    record = records.throughput(made_up.results(), 1.2)
    assert (record["seconds"], record["output_tokens_per_s"], record["total_tokens_per_s"]) == (2.0, 5.0, 7.0)
    assert (record["prompt_tokens"], record["output_tokens"], record["requests"]) == (4, 10, 2)
    assert record["ttft_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert record["itl_ms"] == {"p50": 250.0, "p90": 250.0, "p99": 250.0}
    assert (record["blocks_peak"], record["kv_share"]) == (9, 0.75)


def test_engines_are_compared():
    record = records.throughput(made_up.results(), 1.2)
    assert (record["ratio"], record["ratio_range"], record["target"]) == (1.5, [1.5, 1.5], 1.2)
    assert record["peer_tokens_per_s"] == pytest.approx(10 / 3, abs=1e-4)
    assert record["peer_same_outputs"] == 0.5
    assert (record["baseline"]["ratio"], record["baseline"]["same_outputs"]) == (2.0, 0.0)
    assert record["runs"][1] == {"seconds": 1.0, "baseline_seconds": 2.0, "peer_seconds": 1.5}


def test_without_a_peer():
    results = made_up.results()
    results.peer, results.peer_seconds, results.peer_outputs = None, [], None
    record = records.throughput(results)
    assert (record["peer"], record["ratio"], record["peer_tokens_per_s"]) == (None, None, None)
    assert record["runs"][0] == {"seconds": 2.0, "baseline_seconds": 4.0}


def test_sampling():
    record = records.sampling(made_up.results(), made_up.sampled())
    assert record["sampled"] == {"output_tokens_per_s": 2.5, "ratio": 0.5, "ratio_range": [0.5, 0.5], "target": 0.7}


def test_context():
    record = records.context(made_up.SETTING, 16, (16, 1024), made_up.STEPS)
    assert (record["step_ms"], record["ratio"]) == ({"16": 150.0, "1024": 375.0}, 2.5)
    assert record["runs"][0] == {"short_ms": 100.0, "long_ms": 250.0}
    assert (record["requests"], record["seconds"], record["ttft_ms"]) == (16, None, None)


def test_latency():
    record = records.latency(made_up.results(), 2.0)
    assert record["rate"] == 2.0
    assert record["ttft_ms"]["p50"] == 1000.0  # of 0.5, 1 and 2 s, twice each
    assert record["end_to_end_ms"]["p90"] == 3000.0  # of 0.5, 1, 1, 2, 2 and 4 s
    assert record["baseline"]["ttft_ms"]["p50"] == 2000.0
