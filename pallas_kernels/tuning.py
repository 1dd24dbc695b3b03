"""What was found for a chip and a shape: `tuned/<chip>.json`, which overrules the rules of `tpu.rule` and `gpu.tiling`.

Findings come from static schedules (`scripts/tune.py`, docs/kernels.md), unless one says that it was timed.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

TUNED = Path(__file__).parent / "tuned"

Tiling = TypeVar("Tiling")


def choose(chip: str, key: str, ruled: Tiling) -> Tiling:
    """The tiling in force: one that is being tried, or the ruled one as findings for the shape ``key`` change it."""
    tried, given = _TRIED.get(), cast(Any, ruled)
    if type(tried) is type(ruled):
        return tried
    choices = {field.name for field in dataclasses.fields(given)}
    found = {name: value for name, value in _findings(chip).get(key, {}).items() if name in choices}
    try:
        return dataclasses.replace(given, **found)
    except ValueError as error:
        raise ValueError(f"{file(chip)}, {key!r}: {error}") from error


@contextlib.contextmanager
def trying(tiling: Any) -> Iterator[None]:
    """In this context every kernel gets this tiling, for whoever looks for a better one."""
    token = _TRIED.set(tiling)
    try:
        yield
    finally:
        _TRIED.reset(token)


_TRIED: contextvars.ContextVar[Any] = contextvars.ContextVar("tiling", default=None)


def file(chip: str) -> Path:
    """Where a chip's findings are."""
    return TUNED / f"{chip}.json"


def findings(chip: str) -> dict[str, dict[str, Any]]:
    """What was found for a chip, by the `key` of shapes.

    Raises:
      ValueError: the file holds something else.
    """
    path = file(chip)
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); try `git checkout {path}`, or remove it") from error
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise ValueError(f"{path} must be an object of objects; try `git checkout {path}`, or remove it")
    return found


_findings = functools.cache(findings)
