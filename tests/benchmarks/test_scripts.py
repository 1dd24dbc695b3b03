"""The benchmark scripts, run as people run them, on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.running import GOLDEN, Script

pytestmark = pytest.mark.xdist_group("bench_scripts")  # one set of runs for all

TINY = (
    f"--model={GOLDEN / 'tiny' / 'llama'}",
    "--dtype=float32",
    "--num_blocks=16",
    "--max_num_batched_tokens=64",
    "--decode_steps=4",
    "--requests=3",
    "--prompt_len=3:20",
    "--output_len=2:10",
    "--slots=2",
    "--repeats=2",
)
RATES = ("prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")

Scripts = Callable[[str], Script]


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def measured(script: Scripts) -> dict[str, dict[str, Any]]:
    done = script("bench_throughput.py").run(*TINY, "--case=mixed,sampling,context", "--json")
    assert (done.status, done.err) == (0, "")
    return {record["case"]: record for record in records(done.out)}


def test_throughput_is_consistent(measured: dict[str, dict[str, Any]]):
    record = measured["mixed"]
    assert (record["model"], record["backend"], record["dtype"], record["requests"]) == ("llama", "xla", "float32", 3)
    assert all(record[name] > 0 for name in RATES)
    # The printed seconds are rounded to tenths of a millisecond, of a run of a few milliseconds.
    assert record["output_tokens_per_s"] * record["seconds"] == pytest.approx(record["output_tokens"], rel=0.05)
    tokens = record["prompt_tokens"] + record["output_tokens"]
    assert record["total_tokens_per_s"] * record["seconds"] == pytest.approx(tokens, rel=0.05)
    assert sorted(run["seconds"] for run in record["runs"])[1] == record["seconds"]
    assert record["baseline"]["same_outputs"] == 1.0
    assert 1 <= record["blocks_peak"] <= 16
    assert 0 < record["kv_share"] <= 1
    assert record["ttft_ms"]["p50"] <= record["ttft_ms"]["p99"]


def test_sampling_is_compared_with_greedy(measured: dict[str, dict[str, Any]]):
    assert measured["sampling"]["sampled"]["ratio"] > 0
    assert measured["sampling"]["sampled"]["target"] == 0.7


def test_contexts_are_those_of_the_flags(measured: dict[str, dict[str, Any]]):
    assert set(measured["context"]["step_ms"]) == {"3", "20"}
    assert measured["context"]["target"] == 3.0


def test_people_get_tables(script: Scripts, tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [8]}\n')
    done = script("bench_throughput.py").run(*TINY, "--case=parallel16", f"--prompts_file={tmp_path / 'prompts.jsonl'}")
    assert (done.status, done.err) == (0, "")
    assert "2 requests, prompts 1-3" in done.out
    assert "times as fast as static batches" in done.out


def test_latency(script: Scripts):
    done = script("bench_latency.py").run(*TINY, "--rate=50", "--json")
    assert (done.status, done.err) == (0, "")
    (record,) = records(done.out)
    assert record["rate"] == 50
    for waits in (record, record["baseline"]):
        for name in ("ttft_ms", "itl_ms", "gap_ms", "end_to_end_ms"):
            assert 0 <= waits[name]["p50"] <= waits[name]["p90"] <= waits[name]["p99"]
        assert waits["ttft_ms"]["p50"] <= waits["end_to_end_ms"]["p50"]


def test_host(script: Scripts):
    small = ("--slots=4", "--output_len=9", "--num_blocks=64", "--allocator_slots=4", "--repeats=2")
    done = script("bench_host.py").run(*small, "--decode_steps=1,3", "--json")
    assert (done.status, done.err) == (0, "")
    (record,) = records(done.out)
    assert set(record["host"]) == {"1", "3"}
    for found in record["host"].values():
        assert found["dispatch"] > 0 and found["admitting"] > 0
    assert set(record["allocator_ms"]) == {"append", "grow", "apply", "copy_on_write", "free"}
    assert all(ms > 0 for ms in record["allocator_ms"].values())


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bench_throughput.py", ["--case=fast"], "case='fast' must be of single"),
        ("bench_throughput.py", ["--prompt_len=9:3"], "'9:3' must be a length or a range of lengths"),
        ("bench_throughput.py", ["--plot=rates.txt"], "--plot"),
        ("bench_throughput.py", ["--prompts_file=/no/such/file"], "/no/such/file"),
        ("bench_latency.py", ["--rate=-1"], "rate"),
        ("bench_host.py", ["--decode_steps=0"], "decode_steps='0' must be positive numbers"),
        ("bench_host.py", ["--num_blocks=4"], "num_blocks=4 must be two for each of the 512 slots"),
    ],
)
def test_what_is_wrong_is_one_line(script: Scripts, name: str, arguments: list[str], said: str):
    model = TINY[:1] if name != "bench_host.py" else ()
    done = script(name).run(*model, *arguments)
    assert done.status == 2
    assert done.out == ""
    (line,) = done.complaints
    assert said in line


@pytest.mark.parametrize("name", ["bench_throughput.py", "bench_latency.py", "bench_host.py"])
def test_help(script: Scripts, name: str):
    done = script(name).run("--help")
    assert (done.status, done.err) == (0, "")
    assert "--json" in done.out
