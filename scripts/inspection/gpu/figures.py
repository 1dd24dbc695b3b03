"""Figures of a case on a GPU, from its programs and from what its kernels copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from inspection import described
from inspection.gpu import programs, toolkit
from jpaged import gpu_attention
from pallas_kernels.cases import CASES, Case
from pallas_kernels.gpu import attention
from pallas_kernels.gpu.chips import GPUS, Gpu
from pallas_kernels.gpu.items import most_tiles
from pallas_kernels.gpu.tiling import Rows, Shape, Tiling
from pallas_kernels.options import MOST_QUERIES

CHIP_NAMES = tuple(GPUS)


def of(chip: str, names: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    """Compiles cases one after another and says what each takes, or why it cannot be.

    Returns:
      For each: chip, case, compile_s; registers, spills (bytes), local (instructions on local memory), smem_bytes and
      ctas_per_sm of the kernel that does its rows; splits of a row's tokens, and the share of the KV's bytes that their
      partial results are; launches of all of `paged_attention`, launches_attending of them from our kernel on, and
      whether all are one command_buffer; instructions of the kernel, by kind; bytes_moved and bytes_minimum, and
      temp_bytes and cache_bytes; plugin: the version of JAX's CUDA plugin.

    Raises:
      ValueError: the CUDA compiler is not installed.
    """
    for name in names:
        made = programs.compile_case(chip, {"case": name})
        yield made if isinstance(made, str) else figures(GPUS[chip], name, CASES[name], made)


def shape(chip: str, name: str) -> Shape:
    """What the tiling of a case depends on; of longer rows, of the kernel that does them."""
    case = CASES[name]
    memory = gpu_attention.memory(described.layout(case, "gpu"))
    few, many = attention.shapes(GPUS[chip], memory, described.purpose(case))
    return many if case.queries > MOST_QUERIES else few


def figures(gpu: Gpu, name: str, case: Case, made: programs.Made, tiling: Tiling | None = None) -> dict[str, Any]:
    """Of a case that was compiled."""
    rows, chosen = _cut(gpu, case)
    tiling = tiling or chosen
    kernel = "paged_prefill" if case.queries > MOST_QUERIES else "paged_decode"
    (program,) = (program for program in made.programs if program.name == kernel)
    partial = _partials(case, rows.stored, rows, tiling)
    return {
        "chip": gpu.name,
        "case": name,
        "compile_s": made.compile_s,
        "registers": program.registers,
        "spills": program.spills,
        "local": program.local,
        "smem_bytes": program.smem_bytes,
        "ctas_per_sm": program.blocks_per_core(gpu),
        "splits": tiling.splits,
        "partials": round(partial / (case.rows * case.context * case.token_bytes), 4),
        "launches": len(made.launches),
        "launches_attending": made.attending,
        "command_buffer": made.at_once,
        "instructions": dict(sorted(program.instructions.items())),
        "bytes_moved": _moved(case, rows, tiling),
        "bytes_minimum": case.least_bytes,
        "temp_bytes": made.temp_bytes,
        "cache_bytes": made.cache_bytes,
        "plugin": toolkit.version(),
    }


def bytes_moved(gpu: Gpu, case: Case) -> int:
    """Bytes that the kernels copy for a case, and what prepares their queries."""
    return _moved(case, *_cut(gpu, case))


def _cut(gpu: Gpu, case: Case) -> tuple[Rows, Tiling]:
    """Of the kernel that does the case's rows."""
    memory = gpu_attention.memory(described.layout(case, "gpu"))
    plan = attention.plan(memory, described.purpose(case), chip=gpu)
    if case.queries > MOST_QUERIES:
        return plan.many, plan.many_tiling
    return plan.few, plan.few_tiling


def _partials(case: Case, count: int, rows: Rows, tiling: Tiling) -> int:
    """Bytes of so many rows of what splits leave to be put together."""
    if tiling.splits == 1:
        return 0
    each = 4 * (count * rows.head_dim + 2 * rows.places)
    return case.rows * case.num_kv_heads * tiling.splits * each


def _moved(case: Case, rows: Rows, tiling: Tiling) -> int:
    """Bytes between the GPU's memory and its cores, all copies counted as if no cache kept any.

    The keys and values of whole chunks, for each item; new tokens; queries, which are read, put in rows, and read
    again; what splits leave; and the results.
    """
    size = 2  # bytes of queries and results
    chunks, items = 0, most_tiles(case.rows, case.rows * case.queries, height=rows.height)
    for first in range(0, case.queries, rows.height):
        last = min(first + rows.height, case.queries)
        end = case.context - case.queries + last
        oldest = max(0, end - (last - first) + 1 - case.sliding_window) if case.sliding_window else 0
        chunks += -(-end // tiling.chunk) - oldest // tiling.chunk
    kv = case.rows * chunks * tiling.chunk * case.token_bytes
    new = case.rows * case.queries * case.token_bytes
    query = size * case.head_dim * case.rows * case.queries * case.num_heads
    placed = size * case.head_dim * items * case.num_kv_heads * rows.places
    stored = size * case.head_dim * items * case.num_kv_heads * rows.stored
    partial = sum(_partials(case, count, rows, tiling) for count in (rows.stored, rows.places))  # written, and read
    # A decode's results are where they belong; others are read again and put there.
    out = stored if case.queries == 1 else 2 * stored + query
    return kv + new + query + 2 * placed + partial + out
