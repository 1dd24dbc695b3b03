"""A search for better tilings of a case on a GPU.

Without the GPU it can only leave out what spills registers, for there is no schedule to count; with it the clock
decides.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from inspection import clock
from inspection.gpu import figures, programs, toolkit
from pallas_kernels import tuning
from pallas_kernels.cases import CASES
from pallas_kernels.gpu.chips import GPUS
from pallas_kernels.gpu.tiling import CHUNKS, MOST_SPLITS, Shape, Tiling, rule, smem_bytes

_STAGES = (2, 3, 4)


def best(chip: str, name: str, *, here: str | None, only_spills: bool) -> dict[str, Any] | None:
    """What to write down for a case, or None if what is in force stays.

    Args:
      chip, name: Of the case.
      here: The chip at hand, which times; None only compiles.
      only_spills: Leave alone what spills nothing.

    Raises:
      ValueError: no tiling compiles.
    """
    gpu, shape = GPUS[chip], figures.shape(chip, name)
    now = tuning.choose(chip, shape.key, rule(gpu, shape))
    others = [tiling for tiling in near(now, shape, gpu.smem_of_block) if tiling != now]
    if chip == here and not only_spills:
        found = clock.fastest(chip, name, [now, *others], "gpu")
        return found and {**_changed(chip, shape, found[0]), **found[1]}
    held = _spills(chip, name, now)
    if held == 0:
        return None
    compiles = isinstance(held, int)
    for tiling in others:  # of what spills, or does not compile at all
        spills = _spills(chip, name, tiling)
        if spills == 0:
            return {**_changed(chip, shape, tiling), "spills": 0, "from": f"compiled, jax {toolkit.version()}"}
        compiles |= isinstance(spills, int)
    if not compiles:
        raise ValueError(f"no tiling of {name} compiles for {chip}: {held}")
    return None


def near(now: Tiling, shape: Shape, room: int) -> list[Tiling]:
    """Other chunks, stages and splits, those that fit shared memory."""
    splits = {max(1, now.splits // 2), now.splits, min(now.splits * 2, MOST_SPLITS)} if not shape.prefill else {1}
    choices = itertools.product(CHUNKS, _STAGES, sorted(splits))
    tilings = [Tiling(chunk, stages, count) for chunk, stages, count in choices]
    return [tiling for tiling in tilings if smem_bytes(shape, tiling) <= room]


def _spills(chip: str, name: str, tiling: Tiling) -> int | str:
    """Bytes, or why it does not compile."""
    made = programs.compile_case(chip, {"case": name, "tiling": dataclasses.asdict(tiling)})
    return made if isinstance(made, str) else figures.figures(GPUS[chip], name, CASES[name], made, tiling)["spills"]


def _changed(chip: str, shape: Shape, tiling: Tiling) -> dict[str, Any]:
    """What the rule would have otherwise."""
    ruled = dataclasses.asdict(rule(GPUS[chip], shape))
    return {key: value for key, value in dataclasses.asdict(tiling).items() if value != ruled[key]}
