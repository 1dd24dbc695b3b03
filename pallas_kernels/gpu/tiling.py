"""How a kernel cuts its work: what it may choose, and a rule that chooses. `pallas_kernels.tuning` may overrule it."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.gpu.chips import Gpu

ROWS = 16  # of the smallest product: m16n8k16
WARPS = 4  # of a warpgroup, which is what a program is
THREADS = 32 * WARPS
CHUNKS = (32, 64, 128)
MOST_SPLITS = 256
_BUSY = 0.85  # of the best share of cores that are busy, from which on no more splits are made
_FULL = 0.8  # of the programs that run at once: with so many there is nothing to split for
_PARTIALS = 0.02  # of the bytes of KV, that partial results may take
_SPARED = 0.75  # of the rows that products have, above which all are written, for that wants no shared memory
RESERVED = 1024  # bytes of shared memory that each program takes besides its own
_LARGE = 64 * 128
_BARRIERS = 1024  # bytes for barriers, and for aligning what stands between them


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a kernel may choose.

    Raises:
      ValueError: a choice that no kernel can have.

    Attributes:
      chunk: Tokens that a product takes at once.
      stages: Chunks in shared memory, all but one of them on their way.
      splits: Programs that share an item's tokens.
    """

    chunk: int
    stages: int
    splits: int = 1

    def __post_init__(self):
        faults = []
        if self.chunk not in CHUNKS:
            faults.append(f"chunk={self.chunk!r} must be one of {', '.join(map(str, CHUNKS))}")
        for name, least, most in (("stages", 2, 8), ("splits", 1, MOST_SPLITS)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                faults.append(f"{name}={value!r} must be a whole number from {least} to {most}")
        if faults:
            raise ValueError(f"{'; '.join(faults)}; try the rule of pallas_kernels.gpu.tiling")


_LEAST = Tiling(min(CHUNKS), 2)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of an item's products.

    Attributes:
      height: Queries.
      group: Query heads for each.
      head_dim: Of each.
      every: Whether all rows of the products are written, for want of the shared memory that choosing takes.
    """

    height: int
    group: int
    head_dim: int
    every: bool = False

    @property
    def count(self) -> int:
        """Rows that queries have."""
        return self.height * self.group

    @property
    def warps(self) -> int:
        """Warps that rows are spread over; the others share the columns, of which each wants eight at a time."""
        fit = [warps for warps in (4, 2, 1) if self.head_dim % (8 * (WARPS // warps)) == 0]
        return next((warps for warps in fit if warps == 1 or self.count > ROWS * warps // 2), fit[-1])

    @property
    def places(self) -> int:
        """Rows with those that fill up the products."""
        step = ROWS * self.warps
        return -(-self.count // step) * step

    @property
    def stored(self) -> int:
        """Rows that are written: as few as the threads of a program can share out evenly, or all if few are spared."""
        step = THREADS // math.gcd(self.head_dim, THREADS)
        fewest = -(-self.count // step) * step
        return self.places if self.every or fewest > _SPARED * self.places else fewest


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a tiling depends on.

    Attributes:
      rows: Of an item.
      num_items: Items of a batch, as many as there can be.
      num_kv_heads, block_size, dtype: Of the cache.
      size: Bytes of its numbers.
      context: The most tokens of a row.
      prefill: Whether these are the items of longer rows.
    """

    rows: Rows
    num_items: int
    num_kv_heads: int
    block_size: int
    dtype: str
    size: int
    context: int
    prefill: bool

    @property
    def key(self) -> str:
        """Its name among findings; numbers of items and contexts are alike up to the next power of two."""
        items, context = (1 << (n - 1).bit_length() for n in (self.num_items, self.context))
        kind = "prefill" if self.prefill else f"decode q{self.rows.height}"
        heads = f"kv{self.num_kv_heads} group{self.rows.group} d{self.rows.head_dim}"
        return f"{kind} {heads} {self.dtype} block{self.block_size} items{items} context{context}"

    @property
    def token_bytes(self) -> int:
        """KV of a token of one head."""
        return 2 * self.rows.head_dim * self.size


def rule(gpu: Gpu, shape: Shape) -> Tiling:
    """What suits most shapes: two programs to a core and as many stages as fit, or one; splits that keep all busy."""
    tiling, programs = _fitting(gpu, shape)
    if shape.prefill:
        return tiling
    return dataclasses.replace(tiling, splits=_splits(gpu, shape, programs))


def _fitting(gpu: Gpu, shape: Shape) -> tuple[Tiling, int]:
    large = shape.rows.places * shape.rows.head_dim >= _LARGE  # sums that leave few registers
    together = gpu.has_wgmma and shape.rows.warps == WARPS  # by wgmma, whose operands need none
    chunks = (64,) if together else (32,) if large else (64, 32)
    for programs in (2, 1):
        room = min(gpu.smem // programs - RESERVED, gpu.smem_of_block)
        for chunk in chunks:
            for stages in (4, 3, 2):
                if smem_bytes(shape, Tiling(chunk, stages)) <= room:
                    return Tiling(chunk, stages), programs
    return _LEAST, 1


def fits(gpu: Gpu, shape: Shape) -> bool:
    """Whether a program has room for the least there is."""
    return smem_bytes(shape, _LEAST) <= gpu.smem_of_block


def smem_bytes(shape: Shape, tiling: Tiling) -> int:
    """Shared memory of a program, or a little more."""
    rows, size = shape.rows, max(shape.size, 2)
    kv = 2 * tiling.stages * tiling.chunk * rows.head_dim * shape.size
    wide = tiling.chunk * rows.head_dim * size if shape.size == 1 else 0
    out = 4 * rows.places * rows.head_dim if rows.stored < rows.places else 0
    return kv + wide + out + size * rows.places * (rows.head_dim + tiling.chunk) + _BARRIERS


def _splits(gpu: Gpu, shape: Shape, at_once: int) -> int:
    """Into how many parts the tokens of each item are split, where a core runs so many programs at once."""
    slots, programs, rows = gpu.cores * at_once, shape.num_items * shape.num_kv_heads, shape.rows
    if programs >= _FULL * slots:
        return 1
    partial = 4 * (rows.stored * rows.head_dim + 2 * rows.places)
    within = int(_PARTIALS * shape.context * shape.token_bytes / partial)
    most = max(1, min(shape.context // 128, within, 64))

    def busy(count: int) -> float:
        waves = math.ceil(programs * count / slots)
        return programs * count / (waves * slots)

    best = max(busy(count) for count in range(1, most + 1))
    return next(count for count in range(1, most + 1) if busy(count) >= _BUSY * best)
