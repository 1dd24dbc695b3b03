"""Compiles the attention kernels for a chip that need not be there, and says what their schedule costs.

    python scripts/inspect_kernels.py --chip=v6e --case=decode_bf16_b16
    python scripts/inspect_kernels.py --chip=v5e,v6e,tpu7x --case=decode_bf16_b16,decode_e4m3_b64 --json
    python scripts/inspect_kernels.py --chip=v6e --case=decode_bf16_b16 --plot=v6e.png

The figures are static: libtpu's own schedule, one bundle of instructions a cycle, and the same every time for a version
of libtpu. cycles/token is the loop over KV for each token of context, all KV heads together; HBM is how many cycles the
chip's memory takes for that token; where the schedule takes fewer, memory decides, as it should. How long copies really
take, only a chip can tell.

--json prints an object a line: chip, case, compile_s, cycles_per_token, cycles_per_sequence, busy (the share of the
matrix unit's slots in use), spills, vmem_bytes, smem_bytes, dmas (that a trip of the loop orders), temp_bytes and
cache_bytes (of HBM), bandwidth_bound, share_of_bandwidth, padding (of a token's bytes) and libtpu. libtpu is needed,
and no TPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from common import at_once, command
from common.progress import Progress

_CHIP = flags.DEFINE_list("chip", ["v6e"], "Chips: v4, v5e, v5p, v6e, tpu7x, or all.")
_CASE = flags.DEFINE_list("case", ["decode_bf16_b16"], "Named cases, or all; a wrong name lists them.")
_JOBS = flags.DEFINE_integer("jobs", 2, "Compilations at once.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw schedule against bandwidth over context length into this file.")
_JSON = flags.DEFINE_boolean("json", False, "Print JSON, an object a line.")

GROUPS: dict[str, Sequence[str]] = {"What to compile": ("chip", "case", "jobs"), "Output": ("json", "plot", "verbose")}

_COLUMNS = {
    "chip": "chip",
    "case": "case",
    "cycles_per_token": "cycles/token",
    "bandwidth_bound": "HBM",
    "cycles_per_sequence": "cycles/sequence",
    "busy": "MXU busy",
    "spills": "spills",
    "compile_s": "compile s",
}


def main() -> int:
    with command.interrupt.leaving_at_once():
        from benchmarks import plot
        from inspection import drawing, figures
        from pallas_kernels.cases import CASES

    chips, names = command.chosen("chip", figures.CHIP_NAMES), command.chosen("case", tuple(CASES))
    if _PLOT.value:
        plot.check(_PLOT.value)
    found: list[dict[str, Any]] = []
    faults = 0
    with Progress("compiling", len(chips) * len(names), "kernels") as progress:
        for one in _each(chips, names, figures):
            with progress.aside():
                if isinstance(one, str):
                    faults += 1
                    command.complain(one)
                else:
                    found.append(one)
                    if _JSON.value:
                        print(json.dumps(one), flush=True)
            progress.done += 1
    found.sort(key=lambda one: (chips.index(one["chip"]), names.index(one["case"])))
    if not _JSON.value and found:
        print(_table(found))
    if _PLOT.value and found:
        drawing.draw(found, _PLOT.value)
    return command.FAULT if faults else command.OK


def _each(chips: tuple[str, ...], names: tuple[str, ...], figures: Any) -> Iterator[dict[str, Any] | str]:
    """The figures of all cases on all chips, as they come; parts are compiled at once, each by its own process."""

    def run(chip: str, part: tuple[str, ...]) -> Iterator[dict[str, Any] | str]:
        for name, one in zip(part, figures.of(chip, part), strict=True):
            yield f"{name} does not compile for {chip}: {one}" if isinstance(one, str) else one

    share = max(1, -(-len(names) * len(chips) // _JOBS.value) if len(chips) < _JOBS.value else len(names))
    parts = [(chip, names[k : k + share]) for chip in chips for k in range(0, len(names), share)]
    yield from at_once.merged([functools.partial(run, *part) for part in parts], _JOBS.value)


def _table(found: list[dict[str, Any]]) -> str:
    rows = [list(_COLUMNS.values()), *([str(one[key]) for key in _COLUMNS] for one in found)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
