"""What ptxas makes of the GPU kernels, compiled for chips that are not here, each case in a process of its own."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from pallas_kernels import tuning
from pallas_kernels.cases import CASES
from pallas_kernels.gpu import attention
from pallas_kernels.gpu.chips import GPUS
from pallas_kernels.gpu.tiling import Rows, Shape, fits, rule, smem_bytes
from pallas_kernels.options import Purpose
from scripts.inspection import chips
from scripts.inspection.gpu import figures, programs, toolkit
from scripts.inspection.gpu.search import near
from tests.house.tree import ROOT
from tests.marks import needs_mosaic
from tests.scripts.running import Script

SCRIPT = Script("inspect_kernels.py", {})

MOST_COMPILE_SECONDS = 45  # on a machine that tests at the same time; alone none takes 15
ALL = [(chip, case) for chip in GPUS for case in CASES if not chips.faults(chip, CASES[case])]


def decodes(names):
    return {f"decode_{name}" for name in names.split()}


# What CI compiles of it: each generation's way to copy and to multiply, with each size of numbers. `make test`: all.
FIRST = {
    "A100": decodes("bf16_b16 e4m3_b64 bf16_b16_tree") | {"prefill_bf16_b16"},
    "L40S": decodes("e4m3_b64"),
    "H200": decodes("bf16_b16 bf16_b16_d80 bf16_b16_rows1_ctx32k int8_b32") | {"prefill_e4m3_b64_softcap_sinks"},
    "B200": decodes("bf16_b64") | {"prefill_bf16_b16"},
}
KEYS = {"chip", "case", "registers", "spills", "smem_bytes", "ctas_per_sm", "launches", "instructions"}
KEYS |= {"bytes_moved", "bytes_minimum"}


def of_the_docs(chip, case):
    """Registers, CTAs and splits as docs/gpu.md has them; None if it does not."""
    lines = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    (head,) = (line for line in lines if line.startswith("| case |"))
    cells = next(
        ([cell.strip() for cell in line.split("|")] for line in lines if line.startswith(f"| `{case}` |")), None
    )
    chips = [cell.strip() for cell in head.split("|")]
    return list(map(int, cells[chips.index(chip)].split(","))) if cells and chip in chips else None


def test_the_docs_are_read():
    """Or the figures there are compared with nothing."""
    assert of_the_docs("H200", "prefill_bf16_b16") is not None and of_the_docs("A100", "decode_bf16_b16") is not None
    assert of_the_docs("H100", "decode_bf16_b16") is None and of_the_docs("H200", "decode_bf16_b8") is None


@needs_mosaic
@pytest.mark.one_python
@pytest.mark.parametrize(
    ("chip", "case"),
    [
        pair if pair[1] in FIRST.get(pair[0], ()) else pytest.param(*pair, marks=pytest.mark.every_setting)
        for pair in ALL
    ],
)
def test_compiles(chip, case):
    (one,) = figures.of(chip, [case])
    assert not isinstance(one, str), one
    assert one["spills"] == one["local"] == 0, one
    assert one["compile_s"] <= MOST_COMPILE_SECONDS, one
    assert one["command_buffer"], one  # all of it is one CUDA graph
    if (documented := of_the_docs(chip, case)) is not None:
        registers, *rest = documented
        assert abs(one["registers"] - registers) <= 0.1 * registers, one
        assert [one["ctas_per_sm"], one["splits"]] == rest, one
    if case.startswith("prefill"):
        does, has = one["instructions"], GPUS[chip].has_wgmma
        assert ("HGMMA" in does, "HMMA" in does) == (has, not has), one
        if has:  # before a slot is filled again, and before each product of what the program itself has written
            assert does["FENCE"] == (5 if CASES[case].scales else 2), one
        return
    assert one["temp_bytes"] <= 0.05 * one["cache_bytes"], one  # no copy of a cache is hidden
    assert one["partials"] <= 0.01, one
    assert one["bytes_moved"] <= (1.06 if CASES[case].context >= 2048 else 1.26) * one["bytes_minimum"], one
    assert one["launches"] <= (6 if CASES[case].queries == 1 else 12), one
    assert one["launches_attending"] <= (2 if CASES[case].queries == 1 else 3), one
    sixteen = CASES[case].head_dim == 128 and CASES[case].block_size in (16, 64)
    if sixteen and chip in ("A100", "H100", "H200", "B200"):
        assert one["ctas_per_sm"] >= 2, one


@needs_mosaic
@pytest.mark.one_python
def test_the_script_prints_what_it_found():
    done = SCRIPT.run("--chip=H200,A100", "--case=decode_bf16_b16_rows8,decode_bf16_b16_d80", "--json")
    found = list(map(json.loads, done.out.splitlines()))
    pairs = [("A100", "decode_bf16_b16_rows8"), ("H200", "decode_bf16_b16_d80"), ("H200", "decode_bf16_b16_rows8")]
    assert sorted((one["chip"], one["case"]) for one in found) == pairs
    assert all(one.keys() >= KEYS for one in found)
    assert done.status != 0 and "decode_bf16_b16_d80 does not compile for A100" in done.err
    assert "try block_size=32" in done.err


def test_cases_of_other_chips_are_left_out():
    assert chips.faults("H200", CASES["decode_f32_b16"]) and not chips.faults("v6e", CASES["decode_f32_b16"])
    assert chips.faults("v6e", CASES["decode_f16_b16"]) and not chips.faults("H200", CASES["decode_f16_b16"])
    assert chips.faults("A100", CASES["decode_bf16_b16_d80"]) and not chips.faults("H200", CASES["decode_bf16_b16_d80"])


SHAPE = Shape(Rows(1, 4, 128), 64, 8, 16, "bfloat16", 2, 2048, False)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_rule_fits_shared_memory(gpu, head_dim, dtype):
    memory = attention.Memory(1, 2, head_dim, 64, dtype)
    batches = [(1, 1, 1, 512), (1, 512, 512, 4), (4, 8, 30, 512), (8, 64, 400, 32), (300, 64, 2000, 32)]
    for (most, rows, tokens, columns), group in itertools.product(batches, (1, 3, 4, 5, 7, 8, 12, 16, 20, 33, 64, 71)):
        shapes = attention.shapes(gpu, memory, Purpose(rows, columns, tokens, 2 * group, most))
        if not all(fits(gpu, shape) for shape in shapes):
            assert group * head_dim > 64 * 128, shapes
            continue
        for shape in shapes:
            tiling = rule(gpu, shape)
            assert smem_bytes(shape, tiling) <= gpu.smem_of_block, shape
            assert tiling in near(tiling, shape, gpu.smem_of_block)
            partial = 4 * tiling.splits * (shape.rows.stored * head_dim + 2 * shape.rows.places)
            assert tiling.splits == 1 or partial <= 0.02 * shape.context * shape.token_bytes


def test_more_heads_than_shared_memory_holds_are_refused():
    memory = attention.Memory(9, 1, 256, 16, "bfloat16")
    with pytest.raises(ValueError, match=r"128 query heads of 256 to a KV head have no room.*L40S; try backend='xla'"):
        attention.plan(memory, Purpose(4, 4, 4, 128, 1), chip=GPUS["L40S"])


def test_splits_by_hand():
    h200 = GPUS["H200"]
    assert rule(h200, SHAPE).splits == 1  # 64 · 8 programs: more than run at once
    assert rule(h200, dataclasses.replace(SHAPE, num_items=1, context=128)).splits == 1  # nothing to split
    # 8 programs without splits, 264 at once: 29 splits are the first that keep 85 % of what 33 do busy.
    assert rule(h200, dataclasses.replace(SHAPE, num_items=1, context=1 << 15)).splits == 29


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"chunk": 48}, "chunk=48 must be one of 32, 64, 128"), ({"stages": 1}, "stages=1"), ({"splits": 0}, "splits=0")],
)
@pytest.mark.usefixtures("annotations_unchecked")
def test_a_tiling_that_no_kernel_can_have(change, reason, monkeypatch):
    monkeypatch.setattr(tuning, "_findings", lambda chip: {SHAPE.key: change})
    with pytest.raises(ValueError, match=rf"H200\.json, .*{reason}"):
        tuning.choose("H200", SHAPE.key, rule(GPUS["H200"], SHAPE))


def test_what_ptxas_says_is_read(tmp_path):
    (tmp_path / "paged_attention_0.ptxas").write_text(
        "ptxas info    : Compiling entry function 'paged_attention_mosaic_gpu_kernel' for 'sm_90a'\n"
        "    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 112 registers, used 2 barriers, 1 bytes smem\n"
    )
    (tmp_path / "paged_attention_3.resources.txt").write_text("Resources(smem_scratch_bytes=81920, tmem)")
    (tmp_path / "paged_attention_0.sass_ctrl").write_text(
        "   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28] \n"
        "   -:-:0:Y:07        /*0010*/              @!P0 STL.64 [R1], R15 \n"
        "   -:-:0:Y:07        /*10020*/              @P0 LDL R15, [R1] \n"
        ".L_x_92:\n"
    )
    (one,) = programs._programs(tmp_path)
    assert (one.name, one.registers, one.spills, one.smem_bytes, one.local) == ("paged_attention", 112, 20, 81920, 2)
    assert one.instructions == {"LDC": 1, "STL": 1, "LDL": 1}
    assert [one.blocks_per_core(GPUS[chip]) for chip in ("A100", "L40S", "H200")] == [2, 1, 2]
    thin = dataclasses.replace(one, registers=168, smem_bytes=1024)
    assert thin.blocks_per_core(GPUS["H200"]) == 3  # 65,536 registers, 168 for each of 128 threads
    (tmp_path / "paged_attention_0.sass_ctrl").unlink()
    with pytest.raises(ValueError, match=r"nvdisasm, which reads paged_attention, is not installed; try pip install"):
        programs._programs(tmp_path)


def test_findings_are_of_shapes_that_there_are():
    names = [figures.shape(chip, case).key for chip, case in ALL]
    for chip in GPUS:
        for key in [*names, *tuning.findings(chip)]:
            assert re.fullmatch(r"(decode q[1-8]|prefill) kv\d+ group\d+ d\d+ \w+ block\d+ items\d+ context\d+", key)


def compiled(script, *arguments):
    """What a script beside this one prints of what it compiles."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), str(toolkit.folder())])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "attention" / script), *arguments],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_mosaic
@pytest.mark.one_python
def test_heads_split_over_two_gpus_need_no_traffic():
    found = compiled("split_gpu.py")
    assert found["traffic"] == [] and found["temp_bytes"] <= 0.05 * found["cache_bytes"], found


@needs_mosaic
@pytest.mark.one_python
@pytest.mark.every_setting
def test_a_step_of_llama_3_8b_is_one_command_buffer(tmp_path):
    """All of a decode step, allocator and sampler in it, compiled from shapes for an H200."""
    found = compiled("llama_step.py", "H200", str(tmp_path))
    assert found["temp_bytes"] < 2 * 2 * 14336 * 4096, found  # that no layer's largest matrix is copied
    assert found["compile_s"] <= 150, found  # 40 on a machine that does little else
    (passes,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    # Of the loop over steps the first that stands under "body:", and what is in that, further in.
    first, inside = re.search(r"^  body:\n    \d+: (k\w+).*\n((?:     +.*\n)+)", passes.read_text(), re.M).groups()
    launches = re.findall(r"^        \d+: (k\w+)", inside, re.M)
    assert first == "kCommandBuffer" and "kWhile" not in launches
    assert launches.count("kCustomCall") == 32  # attention; with 64 rows there are no splits to be put together
    assert len(launches) <= 32 * 15 + 40, len(launches)
