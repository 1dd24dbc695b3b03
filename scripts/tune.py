"""Looks for a better way to cut the kernels' work, and writes what it finds to pallas_kernels/tuned/.

    python scripts/tune.py --chip=v6e --case=decode_bf16_b64
    python scripts/tune.py --chip=all --case=all --only_spills

TPUs: each case is compiled for the chip, which need not be there, with the tiling that is in force and others near it.
The best is the one whose static schedule spills the fewest registers, of those that take no more cycles than HBM does,
or at most half as many again as the fastest; of equals, the fastest. It is written to tuned/<chip>.json under the
case's shape, in this checkout, unless what is in force is as good. Kernels of the same shape then use it on their next
start. The tests hold docs/kernels.md to what is in force: its figure of the case wants changing, too.

Where JAX finds a TPU, the few that look best for that chip are timed on it, and the fastest is written.

GPUs (A100, L40S, H100, H200, B200) have no schedule to read. Where JAX finds one, tilings are timed on it, and the
fastest is written; elsewhere only a tiling that spills registers is replaced, by one that does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

from absl import flags

from common import at_once, command, whole_file
from common.progress import Progress

_CHIP = flags.DEFINE_list("chip", ["v6e"], "Chips: v4, v5e, v5p, v6e, tpu7x, A100, L40S, H100, H200, B200, or all.")
_CASE = flags.DEFINE_list("case", ["decode_bf16_b16"], "Named cases of decode, or all; a wrong name lists them.")
_ONLY_SPILLS = flags.DEFINE_boolean("only_spills", False, "Leave alone what spills no register as it is.")
_JOBS = flags.DEFINE_integer("jobs", 2, "Compilations at once.", lower_bound=1)

GROUPS = {"What to tune": ("chip", "case", "only_spills", "jobs"), "Output": ("verbose",)}


def main() -> int:
    with command.interrupt.leaving_at_once():
        from inspection import chips
        from pallas_kernels import tuning
        from pallas_kernels.cases import CASES

    decode = tuple(name for name in CASES if name.startswith("decode"))
    wanted = [(chip, name) for chip in command.chosen("chip", chips.NAMES) for name in command.chosen("case", decode)]
    for chip in {chip for chip, _ in wanted}:
        tuning.findings(chip)  # what is there must be sound, and what is found be kept
        whole_file.check(tuning.file(chip))
    here = _here()
    # Of cases of the same shape the first, which is the plainest, speaks for all.
    if _CASE.value == ["all"]:
        wanted = [(chip, name) for chip, name in wanted if not chips.faults(chip, CASES[name])]
    keys = {(chip, name): chips.figures(chip).shape(chip, name).key for chip, name in wanted}
    wanted = list({(pair[0], keys[pair]): pair for pair in reversed(wanted)}.values())
    better = 0

    def look(chip: str, name: str) -> Iterator[tuple[str, str, Any]]:
        yield chip, name, chips.search(chip).best(chip, name, here=here, only_spills=_ONLY_SPILLS.value)

    with Progress("tuning", len(wanted), "cases") as progress:
        for chip, name, found in at_once.merged([functools.partial(look, *pair) for pair in wanted], _JOBS.value):
            progress.done += 1
            if found is None:
                continue
            better += 1
            with progress.aside():
                print(f"{chip}  {name}  {found}", flush=True)
            held = {**tuning.findings(chip), keys[chip, name]: found}
            text = json.dumps(dict(sorted(held.items())), indent=2) + "\n"
            whole_file.write(tuning.file(chip), text.encode())
    command.say(f"{better} of {len(wanted)} shapes have a better tiling than before")
    return command.OK


def _here() -> str | None:
    """The chip at hand."""
    command.start_jax()
    from pallas_kernels.gpu import chips as gpus
    from pallas_kernels.tpu import chips as tpus

    for known in (tpus, gpus):
        with contextlib.suppress(ValueError):  # it is none that these kernels know
            return known.current().name
    return None


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
