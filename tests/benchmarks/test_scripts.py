"""The benchmark scripts, run as people run them, on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.records import KEYS
from tests.scripts.running import GOLDEN, Script

pytestmark = [pytest.mark.xdist_group("bench_scripts"), pytest.mark.one_python]  # one set of runs for all

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


def test_every_case_has_every_key(measured: dict[str, dict[str, Any]]):
    assert list(measured) == ["mixed", "sampling", "context"]
    assert all(set(record) >= set(KEYS) for record in measured.values())


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
    # Standard input under a name that says JSON, for the tiny model cannot read text. It comes once, for two cases.
    (tmp_path / "prompts.jsonl").symlink_to("/dev/stdin")
    done = script("bench_throughput.py").run(
        *TINY,
        "--case=single,parallel16",
        f"--prompts_file={tmp_path / 'prompts.jsonl'}",
        stdin=b'{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [8]}\n',
    )
    assert (done.status, done.err) == (0, "")
    assert done.out.count("2 requests, prompts 1-3") == 2
    assert done.out.count("times as fast as static batches") == 2


def test_latency(script: Scripts):
    # Fewer tokens a step than there are slots without --slots.
    done = script("bench_latency.py").run(*TINY, "--max_num_batched_tokens=8", "--rate=50", "--json")
    assert (done.status, done.err) == (0, "")
    (record,) = records(done.out)
    assert record["rate"] == 50
    assert set(record) >= set(KEYS)
    for waits in (record, record["baseline"]):
        for name in ("ttft_ms", "itl_ms", "gap_ms", "end_to_end_ms"):
            assert 0 <= waits[name]["p50"] <= waits[name]["p90"] <= waits[name]["p99"]
        assert waits["ttft_ms"]["p50"] <= waits["end_to_end_ms"]["p50"]


def test_host(script: Scripts):
    small = ("--slots=4", "--output_len=9", "--num_blocks=64", "--allocator_slots=4", "--repeats=2", "--waiting=5")
    done = script("bench_host.py").run(*small, "--decode_steps=1,3", "--json")
    assert (done.status, done.err) == (0, "")
    (record,) = records(done.out)
    assert set(record["host"]) == {"1", "3"}
    for found in record["host"].values():
        assert found["dispatch"] > 0 and found["admitting"] > 0
    assert set(record["allocator_ms"]) == {"append", "grow", "apply", "copy_on_write", "free"}
    assert all(ms > 0 for ms in record["allocator_ms"].values())
    assert record["waiting"] == 5 and record["scheduler_us"] > 0 and record["lookup_ms"] > 0


@pytest.mark.every_setting
def test_sharing(script: Scripts):
    small = (
        "--widths=2",
        "--requests=2",
        "--prompt_len=6",
        "--output_len=6",
        "--block_size=4",
        "--repeats=1",
        "--slots=2",
    )
    prefix = ("--prefix_requests=3", "--prefix_len=16", "--suffix_len=3", "--prefix_output_len=2")
    model = [argument for argument in TINY if argument.startswith(("--model", "--dtype"))]
    done = script("bench_sharing.py").run(*model, "--num_blocks=64", "--decode_steps=1", *small, *prefix, "--json")
    assert (done.status, done.err) == (0, "")
    samples, beams, alike = records(done.out)
    assert (samples["case"], beams["case"], alike["case"]) == ("parallel", "beam", "prefix")
    assert all(record["kv_saved"] > 0 and record["ratio"] > 0 for record in (samples, beams, alike))
    assert samples["output_tokens"] == beams["output_tokens"] == 2 * 2 * 6
    assert samples["prefill_tokens"] == beams["prefill_tokens"] == 2 * 6 and samples["prefill_share"] == 1.0
    assert alike["prefill_tokens"] == 16 + 3 * 3
    assert samples["paper_kv_saved"]["alpaca"] == [0.061, 0.098]
    # Two sequences behind a prompt of a block and a half, which is copied: 1 block of 4, then of 6, saved in each step.
    assert samples["unshared_blocks_peak"] == 2 * 2 * 3 and samples["blocks_peak"] == 2 * (1 + 2 * 2)


def test_host_without_a_device(script: Scripts):
    done = script("bench_host.py").run(environment={"JAX_PLATFORMS": "rocm"})
    assert (done.status, done.out) == (2, "")
    (line,) = done.complaints
    assert "JAX has no device to run on" in line


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bench_throughput.py", ["--case=fast"], "case='fast' must be of single"),
        ("bench_throughput.py", ["--prompt_len=9:3"], "'9:3' must be a length or a range of lengths"),
        ("bench_throughput.py", ["--plot=rates.txt"], "--plot"),
        (
            "bench_throughput.py",
            ["--case=context", "--requests=4", "--peer=transformers"],
            "--case=context has no use for --peer, --requests; leave that out, or try --case=context,mixed",
        ),
        ("bench_throughput.py", ["--case=sampling,context", "--peer=llama.cpp"], "has no use for --peer;"),
        ("bench_throughput.py", ["--case=context", "--prompt_len=64"], "try --prompt_len=16:1024"),
        # Of the slots that were asked for, not of a default.
        ("bench_throughput.py", ["--slots=4", "--max_num_batched_tokens=2"], "must be at least max_num_seqs=4"),
        ("bench_throughput.py", ["--prompts_file=/no/such/file"], "/no/such/file"),
        ("bench_latency.py", ["--rate=-1"], "rate=-1 must be"),
        # Before there is a model.
        ("bench_latency.py", ["--model=/no/such/model", "--rate=nan"], "rate=nan must be a finite number"),
        ("bench_latency.py", ["--model=/no/such/model", "--rate=inf"], "try --rate=2, or --rate=0 for all at once"),
        ("bench_latency.py", ["--model=/no/such/model", "--rate=1e-12"], "rate=1e-12 must be"),
        ("bench_latency.py", ["--model=/no/such/model", "--prompts_file=/no/such/file"], "/no/such/file"),
        ("bench_host.py", ["--decode_steps=0"], "decode_steps='0' must be positive numbers"),
        ("bench_host.py", ["--decode_steps=1,5000"], "decode_steps=5000 must be"),
        ("bench_host.py", ["--num_blocks=4"], "num_blocks=4 must be two for each of the 512 slots; try"),
        # 32 steps until the last of 256 has started, and two dispatches, of which the second may be short.
        ("bench_host.py", ["--output_len=16"], "output_len=16 must be from 41 to 65520"),
        ("bench_host.py", ["--output_len=70000"], "try --output_len=65520, or other --slots or --decode_steps"),
        ("bench_host.py", ["--slots=20000"], "try fewer --slots or --decode_steps"),
    ],
)
def test_what_is_wrong_is_one_line(script: Scripts, name: str, arguments: list[str], said: str):
    model = TINY[:1] if name != "bench_host.py" else ()
    done = script(name).run(*model, *arguments)
    assert done.status == 2
    assert done.out == ""
    (line,) = done.complaints
    assert said in line


@pytest.mark.parametrize("name", ["bench_throughput.py", "bench_latency.py"])
def test_requests_that_do_not_fit_are_refused_before_anything_is_compiled(name: str, tmp_path: Path):
    done = Script(name, {"XDG_CACHE_HOME": str(tmp_path)}).run(TINY[0], "--prompt_len=400", "--output_len=200")
    assert done.status == 2
    assert "400 prompt tokens and max_tokens=200 exceed max_model_len=512" in done.complaints[0]
    assert not list(tmp_path.rglob("jit__prefill*"))


@pytest.mark.parametrize("name", ["bench_throughput.py", "bench_latency.py", "bench_host.py"])
def test_help(script: Scripts, name: str):
    done = script(name).run("--help")
    assert (done.status, done.err) == (0, "")
    assert "--json" in done.out
    assert "Default: [" not in done.out  # lists as they would be typed
