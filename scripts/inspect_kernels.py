"""Compiles the attention kernels for a chip that need not be there, and says what they cost.

    python scripts/inspect_kernels.py --chip=v6e --case=decode_bf16_b16
    python scripts/inspect_kernels.py --chip=v5e,v6e,tpu7x --case=decode_bf16_b16,decode_e4m3_b64 --json
    python scripts/inspect_kernels.py --chip=A100,H200 --case=decode_bf16_b16
    python scripts/inspect_kernels.py --chip=v6e --case=decode_bf16_b16 --plot=v6e.png

All figures are static, and the same every time for a version of the compiler. How long a kernel really takes, only a
chip can tell.

TPUs (v4, v5e, v5p, v6e, tpu7x), by libtpu's own schedule, one bundle of instructions a cycle: cycles/token is the loop
over KV for each token of context, all KV heads together; HBM is how many cycles the chip's memory takes for that token;
where the schedule takes fewer, memory decides, as it should. --json: an object a line with chip, case, compile_s,
cycles_per_token, cycles_per_sequence, busy (the share of the matrix unit's slots in use), spills, vmem_bytes,
smem_bytes, dmas (that a trip of the loop orders), temp_bytes and cache_bytes (of HBM), bandwidth_bound,
share_of_bandwidth, padding (of a token's bytes) and libtpu.

GPUs (A100, L40S, H100, H200, B200), by what ptxas makes of the kernels: CTAs/SM is how many programs a core holds at
once; launches is how many kernels XLA starts for one layer, those from ours on behind the slash; moved is what is
copied over what must be. --json: chip, case, compile_s, registers, spills (bytes), local (instructions on local
memory), smem_bytes, ctas_per_sm, splits (of a row's tokens), partials (bytes of what these leave, over those of KV),
launches, launches_attending, command_buffer (whether they are one CUDA graph), instructions (by kind, as often as they
stand in the kernel), bytes_moved, bytes_minimum, temp_bytes, cache_bytes and plugin (JAX's, its version).

The compilers are needed, and no TPU or GPU: libtpu, or JAX's CUDA plugin and jax 0.12 or newer. `make venv-dev` has
both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from common import at_once, command
from common.progress import Progress

_CHIP = flags.DEFINE_list("chip", ["v6e"], "Chips: v4, v5e, v5p, v6e, tpu7x, A100, L40S, H100, H200, B200, or all.")
_CASE = flags.DEFINE_list(
    "case", ["decode_bf16_b16"], "Named cases, or all that a chip serves; a wrong name lists them."
)
_JOBS = flags.DEFINE_integer("jobs", 2, "Compilations at once.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw cost against bandwidth over context length into this file.")
_JSON = flags.DEFINE_boolean("json", False, "Print JSON, an object a line.")

GROUPS: dict[str, Sequence[str]] = {"What to compile": ("chip", "case", "jobs"), "Output": ("json", "plot", "verbose")}

_OF_TPUS = {
    "chip": "chip",
    "case": "case",
    "cycles_per_token": "cycles/token",
    "bandwidth_bound": "HBM",
    "cycles_per_sequence": "cycles/sequence",
    "busy": "MXU busy",
    "spills": "spills",
    "compile_s": "compile s",
}
_OF_GPUS = {
    "chip": "chip",
    "case": "case",
    "registers": "registers",
    "spills": "spills",
    "smem_bytes": "smem bytes",
    "ctas_per_sm": "CTAs/SM",
    "splits": "splits",
    "launches": "launches",
    "moved": "moved",
    "compile_s": "compile s",
}


def main() -> int:
    with command.interrupt.leaving_at_once():
        from benchmarks import plot
        from inspection import chips, drawing
        from pallas_kernels.cases import CASES

    wanted, names = command.chosen("chip", chips.NAMES), command.chosen("case", tuple(CASES))
    if _PLOT.value:
        plot.check(_PLOT.value)
    served = {chip: names for chip in wanted}
    if _CASE.value == ["all"]:
        served = {chip: tuple(name for name in names if not chips.faults(chip, CASES[name])) for chip in wanted}
    found: list[dict[str, Any]] = []
    faults = 0
    with Progress("compiling", sum(map(len, served.values())), "kernels") as progress:
        for one in _each(served, chips):
            with progress.aside():
                if isinstance(one, str):
                    faults += 1
                    command.complain(one)
                else:
                    found.append(one)
                    if _JSON.value:
                        print(json.dumps(one), flush=True)
            progress.done += 1
    found.sort(key=lambda one: (wanted.index(one["chip"]), names.index(one["case"])))
    if found and not _JSON.value:
        _tables(found)
    if _PLOT.value and found:
        drawing.draw(found, _PLOT.value)
    return command.FAULT if faults else command.OK


def _each(served: dict[str, tuple[str, ...]], chips: Any) -> Iterator[dict[str, Any] | str]:
    """The figures of all cases on all chips, as they come; parts are compiled at once, each by its own process."""

    def run(chip: str, part: tuple[str, ...]) -> Iterator[dict[str, Any] | str]:
        for name, one in zip(part, chips.figures(chip).of(chip, part), strict=True):
            yield f"{name} does not compile for {chip}: {one}" if isinstance(one, str) else one

    parts = []
    for chip, names in served.items():
        share = max(1, -(-len(names) * len(served) // _JOBS.value) if len(served) < _JOBS.value else len(names))
        parts += [(chip, names[k : k + share]) for k in range(0, len(names), share)]
    yield from at_once.merged([functools.partial(run, *part) for part in parts], _JOBS.value)


def _tables(found: list[dict[str, Any]]) -> None:
    gpus = [
        {
            **one,
            "launches": f"{one['launches']}/{one['launches_attending']}",
            "moved": f"{one['bytes_moved'] / one['bytes_minimum']:.2f}",
        }
        for one in found
        if "registers" in one
    ]
    tables = ((_OF_TPUS, [one for one in found if "registers" not in one]), (_OF_GPUS, gpus))
    print("\n\n".join(_table(columns, rows) for columns, rows in tables if rows))


def _table(columns: dict[str, str], found: list[dict[str, Any]]) -> str:
    rows = [list(columns.values()), *([str(one[key]) for key in columns] for one in found)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(columns))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
