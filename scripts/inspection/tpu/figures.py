"""Figures of a case on a chip, from its schedule and the chip's public bandwidth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from inspection import described
from inspection.tpu import compiler, schedules
from jpaged import tpu_attention
from pallas_kernels.cases import CASES
from pallas_kernels.options import MOST_QUERIES
from pallas_kernels.tpu import attention
from pallas_kernels.tpu.chips import CHIPS
from pallas_kernels.tpu.decode import softmaxes_at_once
from pallas_kernels.tpu.prefill import groups_at_once
from pallas_kernels.tpu.rule import Shape
from pallas_kernels.tpu.tiling import Tiling

CHIP_NAMES = tuple(CHIPS)


def of(chip: str, names: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    """Compiles cases one after another and says what each takes, or why it cannot be.

    Returns:
      For each: chip, case, compile_s; cycles_per_token: bundles of the loop over KV, for each token that one trip
      handles, of all heads; cycles_per_sequence: for all of a sequence's trips; busy: the share of the matrix unit's
      slots in use; spills, vmem_bytes, smem_bytes, dmas, temp_bytes; bandwidth_bound: cycles that HBM takes for a
      token; share_of_bandwidth: what the schedule leaves of HBM's bandwidth; padding: of a token's bytes; libtpu.

    Raises:
      ValueError: libtpu is not installed, or the compiler has died.
    """
    large = [name for name in names if CASES[name].queries > MOST_QUERIES]
    plain = (
        zip(large, schedules.compile_plainly(chip, [{"case": name} for name in large]), strict=True) if large else ()
    )
    seconds = {name: one["compile_s"] for name, one in plain if "error" not in one}
    made = schedules.compile_cases(chip, [{"case": name} for name in names])
    for name, one in zip(names, made, strict=True):
        if isinstance(one, str):
            yield one
        else:
            yield _figures(chip, name, dataclasses.replace(one, compile_s=seconds.get(name, one.compile_s)), None)


def trials(chip: str, name: str, tilings: Sequence[Tiling]) -> Iterator[dict[str, Any] | str]:
    """As `of`, of one case with each of several tilings."""
    made = schedules.compile_cases(chip, [{"case": name, "tiling": dataclasses.asdict(one)} for one in tilings])
    for tiling, one in zip(tilings, made, strict=True):
        yield one if isinstance(one, str) else _figures(chip, name, one, tiling)


def shape(chip: str, name: str) -> Shape:
    """What the tiling of a case depends on."""
    case = CASES[name]
    memory = tpu_attention.memory(described.layout(case, "tpu"))
    return attention.shape(memory, CHIPS[chip], case.num_heads, described.columns(case), case.queries)


def _figures(chip: str, name: str, compiled: schedules.Made, tiling: Tiling | None) -> dict[str, Any]:
    case = CASES[name]
    layout, made, queries = described.layout(case, "tpu"), CHIPS[chip], case.queries
    prefill = case.queries > MOST_QUERIES
    kernel = compiled.kernel("paged_prefill" if prefill else "paged_decode")
    plan = attention.plan(tpu_attention.memory(layout), described.purpose(case), chip=made)
    tiling = tiling or (plan.prefill_tiling if prefill else plan.decode_tiling)
    work = kernel.inner if prefill else kernel.whole
    if prefill:  # a loop over groups, each of which does its part of the KV
        turns = plan.prefill_heads.count // groups_at_once(plan.prefill_heads.count)
        bundles, dmas = work.bundles * turns, kernel.around(work).dmas
    else:
        turns = tiling.turns(plan.decode_heads.count)
        trip = work if turns == 1 else kernel.around(work)
        bundles = trip.bundles + (turns - 1) * work.bundles
        dmas = trip.dmas if turns == 1 else trip.dmas + (turns - 1) * work.dmas
        if queries > 1:  # and in each turn a loop over softmaxes
            pairs = tiling.items * plan.decode_heads.count // turns
            again = (pairs // softmaxes_at_once(pairs) - 1) * turns
            bundles += again * max((loop.bundles for loop in kernel.within(work)), default=0)
    cycles = bundles / (tiling.chunk * tiling.items)
    stored = layout.bytes_per_block / case.block_size / described.LAYERS
    bound = stored / (made.bytes_per_second / made.hertz)
    return {
        "chip": chip,
        "case": name,
        "compile_s": compiled.compile_s,
        "cycles_per_token": round(cycles, 3),
        "cycles_per_sequence": round(cycles * tiling.chunk * -(-case.context // tiling.chunk)),
        "busy": round(work.busy * work.bundles * turns / bundles, 3),
        "spills": kernel.spills,
        "vmem_bytes": kernel.vmem_bytes,
        "smem_bytes": kernel.smem_bytes,
        "dmas": dmas,
        "temp_bytes": compiled.temp_bytes,
        "cache_bytes": compiled.cache_bytes,
        "bandwidth_bound": round(bound, 3),
        "share_of_bandwidth": round(min(1.0, bound / cycles), 3),
        "padding": round(stored / case.token_bytes - 1, 3),
        "libtpu": compiler.version(),
    }
