"""Looks for a better way to cut the kernels' work, and writes what it finds to pallas_kernels/tuned/.

    python scripts/tune.py --chip=v6e --case=decode_bf16_b64
    python scripts/tune.py --chip=all --case=all --only_spills

Each case is compiled for the chip, which need not be there, with the tiling that is in force and with others near it.
The best is the one whose static schedule spills the fewest registers, of those that take at most half as many cycles
again as the fastest; of equals, the fastest. It is written to tuned/<chip>.json under the case's shape, unless what is
in force is as good. Kernels of the same shape then use it on their next start. Nothing is timed yet.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from absl import flags

from common import command
from common.progress import Progress

if TYPE_CHECKING:
    from pallas_kernels.tpu.trips import Tiling

_CHIP = flags.DEFINE_list("chip", ["v6e"], "Chips: v4, v5e, v5p, v6e, tpu7x, or all.")
_CASE = flags.DEFINE_list("case", ["decode_bf16_b16"], "Named cases of decode, or all.")
_ONLY_SPILLS = flags.DEFINE_boolean("only_spills", False, "Leave alone what spills no register as it is.")
_JOBS = flags.DEFINE_integer("jobs", 2, "Compilations at once.", lower_bound=1)

GROUPS = {"What to tune": ("chip", "case", "only_spills", "jobs"), "Output": ("verbose",)}

GAIN = 0.02  # of cycles, from which on a finding is worth writing down
MOST_LOSS = 1.5  # times the cycles of the fastest, which not to spill may cost


def main() -> int:
    with command.interrupt.leaving_at_once():
        from inspection import figures
        from pallas_kernels import tuning
        from pallas_kernels.cases import CASES

    decode = tuple(name for name in CASES if name.startswith("decode"))
    wanted = [
        (chip, name) for chip in command.chosen("chip", figures.CHIP_NAMES) for name in command.chosen("case", decode)
    ]
    # Of cases of the same shape the first, which is the plainest, speaks for all.
    wanted = list({(chip, figures.shape(chip, name).key): (chip, name) for chip, name in reversed(wanted)}.values())
    with Progress("tuning", len(wanted), "cases") as progress, ThreadPoolExecutor(_JOBS.value) as pool:
        for chip, name, found in pool.map(lambda pair: (*pair, _best(*pair)), wanted):
            progress.done += 1
            if found is None:
                continue
            file = tuning.TUNED / f"{chip}.json"
            held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            shape = figures.shape(chip, name)
            held[shape.key] = found
            file.write_text(json.dumps(dict(sorted(held.items())), indent=2) + "\n", encoding="utf-8")
            with progress.aside():
                print(f"{chip}  {name}  {found}", flush=True)
    return command.OK


def _best(chip: str, name: str) -> dict[str, Any] | None:
    """What to write down for a case, or None if what is in force stays."""
    from inspection import compiler, figures
    from pallas_kernels import tuning
    from pallas_kernels.tpu.chips import CHIPS

    shape = figures.shape(chip, name)
    now = tuning.choose(CHIPS[chip], shape)
    (held,) = figures.of(chip, [name])
    if not isinstance(held, str) and held["spills"] == 0 and _ONLY_SPILLS.value:
        return None
    tried = [tiling for tiling in _near(now, shape.context, CHIPS[chip].depth) if tiling != now]
    pairs = [
        (now, held),
        *((tiling, one) for tiling, one in zip(tried, figures.trials(chip, name, tried), strict=True)),
    ]
    good = [(tiling, one) for tiling, one in pairs if not isinstance(one, str)]
    if not good:
        return None
    fast = MOST_LOSS * min(one["cycles_per_token"] for _, one in good)
    good = [(tiling, one) for tiling, one in good if one["cycles_per_token"] <= fast]
    tiling, one = min(good, key=lambda pair: (pair[1]["spills"], pair[1]["cycles_per_token"]))
    if not isinstance(held, str) and (one["spills"], one["cycles_per_token"]) >= (held["spills"], _less(held)):
        return None
    ruled, chosen = dataclasses.asdict(tuning.rule(CHIPS[chip], shape)), dataclasses.asdict(tiling)
    return {
        **{key: value for key, value in chosen.items() if value != ruled[key]},
        "cycles_per_token": one["cycles_per_token"],
        "spills": one["spills"],
        "from": f"static schedule, libtpu {compiler.version()}",
    }


def _less(held: dict[str, Any]) -> float:
    return held["cycles_per_token"] * (1 - GAIN)


def _near(now: Tiling, context: int, depth: int) -> list[Tiling]:
    """Tilings to try: shorter chunks, too, and as many items as fit a short context."""
    chunks = [(chunk, now.items) for chunk in (now.chunk, now.chunk // 2, now.chunk // 4) if chunk >= 128]
    if now.chunk >= context:
        chunks += [(now.chunk, items) for items in (1, 2, 3, 4) if items != now.items and items * now.chunk <= 1024]
    return [
        dataclasses.replace(now, chunk=chunk, items=items, early=early, staged=staged, lanes=lanes)
        for (chunk, items), early, staged, lanes in itertools.product(
            chunks, (1.0, 0.7, 0.5, 0.3), (True, False), sorted({depth, 128}, reverse=True)
        )
    ]


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
