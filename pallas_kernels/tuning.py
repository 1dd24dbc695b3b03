"""How a kernel cuts its work: what was found for a chip and a shape (`tuned/<chip>.json`), and otherwise a rule.

Rules and findings come from libtpu's static schedules (`scripts/tune.py`, docs/kernels.md), unless a finding says that
it was timed. They know nothing of a chip's memory system but its size.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pallas_kernels.tpu.chips import Chip
from pallas_kernels.tpu.tiling import Tiling
from pallas_kernels.tpu.words import LANES

TUNED = Path(__file__).parent / "tuned"
LONGEST, SHORTEST = 2048, LANES  # tokens of a chunk

_ITEM_BYTES = 4 << 20  # KV of an item: enough for the fixed cost of a trip to vanish
_TALL_CHUNK = 1024  # the same for rows of several queries, whose scores take much room
_SHARE = 2  # of VMEM, one part in so many, for KV


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a tiling depends on.

    Attributes:
      num_kv_heads, group, head_dim, block_size, dtype: Of attention and its cache.
      queries: The most query tokens of a row; 0 for prefill, whose tiles are always as high.
      context: The most tokens of a row: a table's columns times the block size.
      token_bytes: KV of a token, with padding.
      head_groups: How many head groups a product takes each by itself.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: str
    queries: int
    context: int
    token_bytes: int
    head_groups: int

    @property
    def key(self) -> str:
        """Its name among findings; contexts that fill the longest chunk are alike."""
        longest = min(1 << (self.context - 1).bit_length(), LONGEST)
        kind = f"decode q{self.queries}" if self.queries else "prefill"
        heads = f"kv{self.num_kv_heads} group{self.group} d{self.head_dim}"
        return f"{kind} {heads} {self.dtype} block{self.block_size} context{longest}"


def choose(chip: Chip, shape: Shape) -> Tiling:
    """The tiling of a shape on a chip."""
    tried = _TRIED.get()
    if tried is not None:
        return tried
    ruled = rule(chip, shape)
    found = {name: value for name, value in _findings(chip.name).get(shape.key, {}).items() if name in _CHOICES}
    try:
        return dataclasses.replace(ruled, **found)
    except ValueError as error:
        raise ValueError(f"{file(chip.name)}, {shape.key!r}: {error}") from error


def rule(chip: Chip, shape: Shape) -> Tiling:
    """What suits most shapes."""
    if not shape.queries:
        chunk = _chunk(chip, shape, items=4)  # queries and results need room, too
        return Tiling(chunk=chunk, items=1, buffers=2, lanes=LANES, rows=256, vmem=chip.vmem * 7 // 8)
    chunk = _chunk(chip, shape, items=1)
    if shape.queries > 1:
        chunk = min(chunk, max(_TALL_CHUNK, shape.block_size))
    items = {128: 3, 256: 2}.get(chunk, 1) if shape.queries == 1 and chunk >= shape.context else 1
    groups = 0 if shape.dtype != "float32" else 2 if shape.head_groups % 2 == 0 else 1
    vmem = chip.vmem * 7 // 8 if chunk * items * shape.token_bytes > _ITEM_BYTES else None  # a block is so large
    return Tiling(chunk, items, buffers=2, lanes=chip.depth, groups=groups, early=0.5 if items > 1 else 1.0, vmem=vmem)


def _chunk(chip: Chip, shape: Shape, *, items: int) -> int:
    room = min(_ITEM_BYTES, chip.vmem // _SHARE // 2 // items)
    most = max(min(room // shape.token_bytes, LONGEST), SHORTEST)
    chunk = 1 << (most.bit_length() - 1)
    while chunk > SHORTEST and chunk // 2 >= shape.context:
        chunk //= 2
    return max(chunk, shape.block_size)


@contextlib.contextmanager
def trying(tiling: Tiling) -> Iterator[None]:
    """In this context every kernel gets this tiling, for whoever looks for a better one."""
    token = _TRIED.set(tiling)
    try:
        yield
    finally:
        _TRIED.reset(token)


_TRIED: contextvars.ContextVar[Tiling | None] = contextvars.ContextVar("tiling", default=None)
_CHOICES = {field.name for field in dataclasses.fields(Tiling)}


def file(chip: str) -> Path:
    """Where a chip's findings are."""
    return TUNED / f"{chip}.json"


def findings(chip: str) -> dict[str, dict[str, Any]]:
    """What was found for a chip, by `Shape.key`.

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
