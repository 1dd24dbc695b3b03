"""bench_attention.py and what tune.py searches with: small batches, whose answers and choices are known."""

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases import CASES
from pallas_kernels.tpu.tiling import Tiling
from scripts.attention import attending, batches, others, timing
from scripts.inspection import clock
from scripts.inspection.gpu import search as gpu_search
from scripts.inspection.tpu import search
from tests.house.tree import ROOT

SMALL = {"rows": 2, "context": 40, "num_heads": 4, "num_kv_heads": 2}


def small(name: str, **changes) -> batches.Batch:
    return batches.make(dataclasses.replace(CASES[name], **{**SMALL, **changes}))


def attend(who: attending.Attends, batch: batches.Batch):
    return who.step(batch.q_THD, batch.k_TKD, batch.v_TKD, who.memory, who.given)


def error_of(who: attending.Attends, batch: batches.Batch) -> float:
    out, memory = attend(who, batch)
    return batches.error(batch, who.cache(memory), out)


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("decode_bf16_b16_window", "xla"),
        ("decode_f32_b16", "xla"),
        ("prefill_bf16_b16", "xla"),
        ("decode_bf16_b16_tree", "tpu_interpret"),
        ("decode_int8_b32", "tpu_interpret"),
    ],
)
def test_answers_are_compared_with_the_oracle(name: str, backend: str):
    changes = {"sliding_window": 7} if "window" in name else {"queries": 20} if "prefill" in name else {}
    batch = small(name, **changes)
    who = attending.ours(backend, batch)
    assert error_of(who, batch) <= (1e-5 if "f32" in name else 6e-3)
    out, memory = attend(who, batch)
    assert batches.error(batch, who.cache(memory), jnp.roll(out, 1, axis=1)) > 0.1


TAKEN_AWAY = pytest.mark.skipif(jax.__version_info__ >= (0, 12, 1), reason="jax 0.12.1 took it away")


@pytest.mark.parametrize("name", ["jax_paged", "jax_ragged", pytest.param("jax_triton", marks=TAKEN_AWAY)])
def test_jaxs_own_kernels_are_handed_what_they_want(name: str, monkeypatch: pytest.MonkeyPatch):
    # The interpreter cannot run the ragged kernel; what it ships as its own reference takes the same arguments.
    ragged = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel")
    package = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    monkeypatch.setattr(package, "ragged_paged_attention", ragged.ref_ragged_paged_attention)
    batch = small("decode_bf16_b16")
    lax = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")  # they are not written strictly
    interpreted = contextlib.nullcontext() if name == "jax_triton" else pltpu.force_tpu_interpret_mode()
    with interpreted, lax[0], lax[1]:
        assert error_of(others.attends(name, batch), batch) <= 1e-2


def test_a_kernel_that_this_jax_lacks_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.gpu.paged_attention", None)
    with pytest.raises(ValueError, match="has it no more, or not yet"):
        others.attends("jax_triton", small("decode_bf16_b16"))


def test_who_cannot_attend_says_why():
    assert list(attending.faults("xla", CASES["decode_bf16_b16_tree"])) == ["no trees"]
    assert not list(attending.faults("xla", CASES["decode_int8_b32"]))
    assert list(attending.faults("jax_paged", CASES["prefill_bf16_b16_d64_window"])) == [
        "one query a row",
        "heads of 128",
        "no window",
    ]
    assert not list(attending.faults("tpu", CASES["decode_int8_b32"]))
    assert list(attending.faults("cudnn", CASES["decode_f32_b16"])) == ["KV in bfloat16 or float16"]
    assert not list(attending.faults("jax_triton", CASES["decode_bf16_b16_d64"]))
    assert not list(attending.faults("cudnn", CASES["decode_f16_b16"]))


def test_the_least_bytes_by_hand():
    batch = small("decode_bf16_b16")
    token = 2 * 2 * 128 * 2
    assert batch.case.least_bytes == 2 * 40 * token + 2 * token + 2 * (2 * 4 * 128 * 2)
    assert small("decode_bf16_b16_window", sliding_window=7).case.least_bytes == batch.case.least_bytes - 2 * 33 * token


@pytest.mark.one_python
def test_the_script_prints_what_it_found(script):
    bench = script("bench_attention.py")
    done = bench.run(
        "--rows=2",
        "--context=40",
        "--case=decode_bf16_b16_sinks,decode_int8_b32,decode_bf16_b16_tree",
        "--repeats=1",
        "--json",
    )
    assert done.status == 0
    found = list(map(json.loads, done.out.splitlines()))
    assert [one["case"] for one in found] == ["decode_bf16_b16_sinks", "decode_int8_b32"]
    for one in found:
        assert (one["backend"], one["rows"], one["context"]) == ("xla", 2, 40)
        assert 0 < one["us_least"] <= one["us"] <= one["us_most"]
        assert one["error"] <= 5e-3 and 0 < one["share_of_copy"] < 2
    assert "decode_bf16_b16_tree: xla is left out: no trees" in done.err
    done = bench.run("--case=decode_bf16_b16_tree", "--rows=2", "--context=40")
    assert done.status == 2 and "is left out" in done.err
    for flags, reason in (
        (["--case=decode_nothing"], "decode_bf16_b16"),
        (["--case=prefill_bf16_b16", "--context=20"], "context=20 must be at least 512"),
        (["--backend=jax_paged"], "must be among xla, tpu_interpret, gpu_interpret"),
    ):
        done = bench.run(*flags)
        assert done.status == 2 and reason in done.err and len(done.complaints) == 1


NOW = Tiling(chunk=1024, items=1, buffers=2, lanes=128)
OTHER = dataclasses.replace(NOW, chunk=512)


def figures(cycles: float, spills: int, bound: float = 2.0) -> dict:
    return {"cycles_per_token": cycles, "spills": spills, "bandwidth_bound": bound}


@pytest.mark.parametrize(
    ("now", "other", "better"),
    [
        (figures(1.0, 5), figures(1.4, 0), True),  # no spills are worth half as many cycles again
        (figures(1.0, 5), figures(1.9, 0), True),  # or whatever memory hides
        (figures(1.0, 5), figures(2.1, 0), False),
        (figures(3.0, 5), figures(4.0, 0), True),
        (figures(3.0, 5), figures(4.0, 1), False),  # fewer spills are worth only what memory hides
        (figures(1.0, 5), figures(1.9, 1), True),
        (figures(1.0, 0), figures(0.9, 0), True),
        (figures(1.0, 0), "does not fit", False),
        ("does not fit", figures(9.0, 9), True),
    ],
)
def test_the_better_schedule_is_picked(now, other, better):
    assert search._pick([(NOW, now), (OTHER, other)])[0] == (OTHER if better else NOW)


def test_what_is_tried_fits_the_shape():
    shape = search.figures.shape("v6e", "decode_bf16_b256")
    cuts = search._cuts(NOW, shape, 256)
    assert NOW in cuts and {one.chunk for one in cuts} == {256, 512, 1024}
    assert all(shape.head_groups % one.groups == 0 for one in cuts if one.groups)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        ([2e-3, 1e-3], True),
        ([1e-3, 0.99e-3], False),
        ([ValueError("no room"), 1e-3], True),
        ([ValueError("no room"), ValueError("no room")], False),
        ([jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem"), 1e-3], True),
    ],
)
def test_the_faster_on_the_clock_is_written(seconds, written, monkeypatch: pytest.MonkeyPatch):
    left = list(seconds)

    def timed(who, batch, repeats):
        assert attend(who, batch)[0].shape == (2, 4, 128)
        if isinstance(left[0], Exception):
            raise left.pop(0)
        return [left.pop(0)] * repeats, None, None

    monkeypatch.setattr(clock.timing, "step_seconds", timed)
    monkeypatch.setattr(clock.attending, "ours", attending.ours)
    monkeypatch.setitem(clock.CASES, "decode_bf16_b16", dataclasses.replace(CASES["decode_bf16_b16"], **SMALL))
    found = search.timed("v6e", "decode_bf16_b16", [NOW, OTHER], backend="tpu_interpret")
    assert not left
    if written:
        assert found is not None and found["chunk"] == 512 and found["us"] == 1000.0
        assert found["from"].startswith("timed")
    else:
        assert found is None


def test_a_kernel_that_fails_ends_the_search(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def timed(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: an illegal address")

    monkeypatch.setattr(clock.timing, "step_seconds", timed)
    monkeypatch.setitem(clock.CASES, "decode_bf16_b16", dataclasses.replace(CASES["decode_bf16_b16"], **SMALL))
    with pytest.raises(jax.errors.JaxRuntimeError, match="illegal address"):
        search.timed("v6e", "decode_bf16_b16", [NOW, OTHER], backend="xla")
    assert f"decode_bf16_b16, {NOW}: failed" in caplog.text


@pytest.mark.parametrize("chip", ["v6e", "H200"])
def test_a_compiler_that_compiles_nothing_is_not_a_search_that_finds_nothing(
    chip: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(search.figures, "of", lambda chip, names: ["no such option" for _ in names])
    monkeypatch.setattr(search.figures, "trials", lambda chip, name, tilings: ["no such option" for _ in tilings])
    monkeypatch.setattr(gpu_search.programs, "compile_case", lambda chip, order: "no such option")
    best = search.best if chip == "v6e" else gpu_search.best
    with pytest.raises(ValueError, match=rf"no tiling of decode_bf16_b16 compiles for {chip}: no such option"):
        best(chip, "decode_bf16_b16", here=None, only_spills=False)


def raised(attend) -> Exception:
    with pytest.raises(Exception) as caught:  # of whatever kind: the callers ask of which
        jax.block_until_ready(attend())
    return caught.value


def test_a_fault_is_no_refusal(capfd: pytest.CaptureFixture[str]):
    """By what the runtime really raises."""

    def fault(x):
        raise KeyError("a fault")

    x = jnp.float32(1)
    assert attending.refuses(raised(lambda: jnp.zeros(1 << 46)))
    assert attending.refuses(raised(lambda: attending.ours("tpu_interpret", small("decode_bf16_b16", block_size=24))))
    assert not attending.refuses(raised(lambda: jax.jit(lambda x: jax.pure_callback(fault, x, x))(x)))
    assert not attending.refuses(TypeError("a bug"))


FAILS = """
import runpy, sys
import jax
from attention import attending

real = attending.ours

def ours(backend, batch):
    if batch.case.soft_cap:
        raise jax.errors.JaxRuntimeError("INTERNAL: an illegal address")
    return real(backend, batch)

attending.ours = ours
script = sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


def test_a_kernel_that_fails_is_said_and_the_others_go_on():
    script = ROOT / "scripts" / "bench_attention.py"
    flags = ["--case=decode_bf16_b16_softcap,decode_bf16_b16", "--rows=2", "--context=40", "--repeats=1", "--json"]
    told = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    done = subprocess.run(
        [sys.executable, "-c", FAILS, str(script), *flags], env=told, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert [json.loads(line)["case"] for line in done.stdout.splitlines()] == ["decode_bf16_b16"]
    assert "decode_bf16_b16_softcap: xla has failed: INTERNAL: an illegal address" in done.stderr


def test_a_step_is_a_loops_time_over_its_turns(monkeypatch: pytest.MonkeyPatch):
    """A clock that goes on by a second for each step that was really made."""
    made = [0]

    def step(q, k, v, memory, given):
        jax.debug.callback(lambda: made.__setitem__(0, made[0] + 1), ordered=True)
        return q + given, memory + 1

    def now():
        jax.effects_barrier()
        return float(made[0])

    monkeypatch.setattr(timing.time, "perf_counter", now)
    monkeypatch.setattr(timing, "_LEAST_SECONDS", 3.5)
    who = attending.Attends(step, jnp.float32(0), jnp.float32(1), lambda _: None)  # pyright: ignore[reportArgumentType] (no cache)
    batch = small("decode_f32_b16")
    seconds, out, memory = timing.step_seconds(who, batch, 2)
    assert seconds == [1.0, 1.0]
    assert made[0] == 1 + 1 + (1 + 3 + 6) + 2 * 6  # the first, one to compile, 1, 3, 6 until it is enough, and twice 6
    np.testing.assert_array_equal(out, batch.q_THD + 1)
    assert float(memory) == 1.0  # of the first step
