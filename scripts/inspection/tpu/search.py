"""A search for better tilings of a case: by its static schedule and, where the chip is at hand, by the clock."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from inspection import clock
from inspection.tpu import compiler, figures
from pallas_kernels.tpu import rule
from pallas_kernels.tpu.chips import CHIPS
from pallas_kernels.tpu.rule import Shape
from pallas_kernels.tpu.tiling import Tiling

LANES = SHORTEST = 128  # of a register, and the tokens of the shortest chunk
TIMED = 8  # tilings that are timed where there is a TPU
MOST_LOSS = 1.5  # times the cycles of the fastest, which not to spill at all may cost; to spill less, what memory hides


def best(chip: str, name: str, *, here: str | None, only_spills: bool) -> dict[str, Any] | None:
    """What to write down for a case, or None if what is in force stays.

    Args:
      chip, name: Of the case.
      here: The chip at hand, which times what looks best; None only compiles.
      only_spills: Leave alone what spills nothing.

    Raises:
      ValueError: no tiling compiles.
    """
    shape = figures.shape(chip, name)
    now = rule.choose(CHIPS[chip], shape)
    (held,) = figures.of(chip, [name])
    if not isinstance(held, str) and held["spills"] == 0 and only_spills:
        return None
    pairs = [(now, held)]
    longest = max(now.chunk, rule.rule(CHIPS[chip], shape).chunk)
    for near in (_cuts, _orders):  # the second round is about what was best in the first
        begin = dataclasses.replace(now, chunk=longest) if near is _cuts else _pick(pairs)[0]
        tried = [tiling for tiling in near(begin, shape, CHIPS[chip].depth) if all(tiling != t for t, _ in pairs)]
        pairs += zip(tried, figures.trials(chip, name, tried), strict=True)
    if chip == here:
        return timed(chip, name, [tiling for tiling, _ in _ranked(pairs)[:TIMED]])
    tiling, one = _pick(pairs)
    if isinstance(one, str):
        raise ValueError(f"no tiling of {name} compiles for {chip}: {one}")
    if not isinstance(held, str) and (one["spills"], one["cycles_per_token"]) >= (held["spills"], _less(held)):
        return None
    return {
        **_changed(chip, name, tiling),
        "cycles_per_token": one["cycles_per_token"],
        "spills": one["spills"],
        "from": f"static schedule, libtpu {compiler.version()}",
    }


def _changed(chip: str, name: str, tiling: Tiling) -> dict[str, Any]:
    """What the rule would have otherwise."""
    ruled = dataclasses.asdict(rule.rule(CHIPS[chip], figures.shape(chip, name)))
    return {key: value for key, value in dataclasses.asdict(tiling).items() if value != ruled[key]}


def timed(chip: str, name: str, tilings: list[Tiling], backend: str = "tpu") -> dict[str, Any] | None:
    """The fastest of these on the device at hand; None if that is the first, which is in force, or as fast."""
    found = clock.fastest(chip, name, tilings, backend)
    return found and {**_changed(chip, name, found[0]), **found[1]}


def _less(held: dict[str, Any]) -> float:
    return held["cycles_per_token"] * (1 - clock.GAIN)


def _pick(pairs: list[tuple[Tiling, Any]]) -> tuple[Tiling, Any]:
    """The best of tilings and their figures; the first, if none compiles."""
    good = [(tiling, one) for tiling, one in pairs if not isinstance(one, str)]
    if not good:
        return pairs[0]
    least = min(one["cycles_per_token"] for _, one in good)

    def enough(one: dict[str, Any]) -> bool:
        return one["cycles_per_token"] <= max(least if one["spills"] else MOST_LOSS * least, one["bandwidth_bound"])

    good = [(tiling, one) for tiling, one in good if enough(one)]
    return min(good, key=lambda pair: (pair[1]["spills"], pair[1]["cycles_per_token"]))


def _ranked(pairs: list[tuple[Tiling, Any]]) -> list[tuple[Tiling, Any]]:
    """The first, which is in force, and then what compiles, by cycles."""
    rest = [pair for pair in pairs[1:] if not isinstance(pair[1], str)]
    return pairs[:1] + sorted(rest, key=lambda pair: pair[1]["cycles_per_token"])


def _cuts(now: Tiling, shape: Shape, depth: int) -> list[Tiling]:
    """Shorter chunks, as many items as fit a short context, and fewer head groups or lanes at a time; of float32, which
    is made of parts, fewer tokens, too."""
    chunks = [(chunk, now.items) for chunk in (now.chunk, now.chunk // 2, now.chunk // 4) if chunk >= SHORTEST]
    if now.chunk >= shape.context:
        chunks += [(now.chunk, items) for items in (1, 2, 3, 4) if items != now.items and items * now.chunk <= 1024]
    groups = [groups for groups in (0, 1, 2, 4) if not groups or shape.head_groups % groups == 0]
    lanes = sorted({shape.group_lanes, min(depth, shape.group_lanes), LANES}, reverse=True)
    parts = (0, 64, 32) if shape.dtype == "float32" else (now.part,)
    return [
        dataclasses.replace(now, chunk=chunk, items=items, lanes=width, groups=some, part=part)
        for (chunk, items), some, width, part in itertools.product(chunks, groups, lanes, parts)
        if chunk >= shape.block_size
    ]


def _orders(now: Tiling, shape: Shape, depth: int) -> list[Tiling]:
    """When copies are ordered, and where scores wait."""
    choices = itertools.product((1.0, 0.7, 0.5, 0.3), (True, False))
    return [dataclasses.replace(now, early=early, staged=staged) for early, staged in choices]
