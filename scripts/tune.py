"""Looks for a better way to cut the kernels' work, and writes what it finds to pallas_kernels/tuned/.

    python scripts/tune.py --chip=v6e --case=decode_bf16_b64
    python scripts/tune.py --chip=all --case=all --only_spills

Each case is compiled for the chip, which need not be there, with the tiling that is in force and with others near it.
The best is the one whose static schedule spills the fewest registers, of those that take no more cycles than HBM does,
or at most half as many again as the fastest; of equals, the fastest. It is written to tuned/<chip>.json under the
case's shape, unless what is in force is as good. Kernels of the same shape then use it on their next start. Nothing is
timed yet.
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
    from pallas_kernels.tuning import Shape, Tiling

_CHIP = flags.DEFINE_list("chip", ["v6e"], "Chips: v4, v5e, v5p, v6e, tpu7x, or all.")
_CASE = flags.DEFINE_list("case", ["decode_bf16_b16"], "Named cases of decode, or all.")
_ONLY_SPILLS = flags.DEFINE_boolean("only_spills", False, "Leave alone what spills no register as it is.")
_JOBS = flags.DEFINE_integer("jobs", 2, "Compilations at once.", lower_bound=1)

GROUPS = {"What to tune": ("chip", "case", "only_spills", "jobs"), "Output": ("verbose",)}

GAIN = 0.02  # of cycles, from which on a finding is worth writing down
LANES = SHORTEST = 128  # of a register, and the tokens of the shortest chunk
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
    pairs = [(now, held)]
    for near in (_cuts, _orders):  # the second round is about what was best in the first
        begin = _pick(pairs)[0]
        tried = [tiling for tiling in near(begin, shape, CHIPS[chip].depth) if all(tiling != t for t, _ in pairs)]
        pairs += zip(tried, figures.trials(chip, name, tried), strict=True)
    tiling, one = _pick(pairs)
    if isinstance(one, str):
        return None
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


def _pick(pairs: list[tuple[Tiling, Any]]) -> tuple[Tiling, Any]:
    """The best of tilings and their figures; the first, if none compiles."""
    good = [(tiling, one) for tiling, one in pairs if not isinstance(one, str)]
    if not good:
        return pairs[0]
    fast = max(MOST_LOSS * min(one["cycles_per_token"] for _, one in good), good[0][1]["bandwidth_bound"])
    good = [(tiling, one) for tiling, one in good if one["cycles_per_token"] <= fast]
    return min(good, key=lambda pair: (pair[1]["spills"], pair[1]["cycles_per_token"]))


def _cuts(now: Tiling, shape: Shape, depth: int) -> list[Tiling]:
    """Shorter chunks, as many items as fit a short context, and fewer head groups or lanes at a time."""
    chunks = [(chunk, now.items) for chunk in (now.chunk, now.chunk // 2, now.chunk // 4) if chunk >= SHORTEST]
    if now.chunk >= shape.context:
        chunks += [(now.chunk, items) for items in (1, 2, 3, 4) if items != now.items and items * now.chunk <= 1024]
    groups = [groups for groups in (0, 1, 2, 4) if not groups or shape.head_groups % groups == 0]
    return [
        dataclasses.replace(now, chunk=chunk, items=items, lanes=lanes, groups=some)
        for (chunk, items), some, lanes in itertools.product(chunks, groups, sorted({depth, LANES}, reverse=True))
        if chunk >= shape.block_size
    ]


def _orders(now: Tiling, shape: Shape, depth: int) -> list[Tiling]:
    """When copies are ordered, and where scores wait."""
    choices = itertools.product((1.0, 0.7, 0.5, 0.3), (True, False))
    return [dataclasses.replace(now, early=early, staged=staged) for early, staged in choices]


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
