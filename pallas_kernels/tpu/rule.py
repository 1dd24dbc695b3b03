"""Which tiling suits a shape on a chip. The rule comes from libtpu's static schedules (docs/kernels.md), and knows
nothing of a chip's memory system but its size.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels import tuning
from pallas_kernels.tpu.chips import Chip
from pallas_kernels.tpu.tiling import Tiling
from pallas_kernels.tpu.words import LANES

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
    def group_lanes(self) -> int:
        """Lanes of a head group's keys."""
        return -(-self.num_kv_heads // self.head_groups * self.head_dim // LANES) * LANES

    @property
    def key(self) -> str:
        """Its name among findings; contexts that fill the longest chunk are alike."""
        longest = min(1 << (self.context - 1).bit_length(), LONGEST)
        kind = f"decode q{self.queries}" if self.queries else "prefill"
        heads = f"kv{self.num_kv_heads} group{self.group} d{self.head_dim}"
        return f"{kind} {heads} {self.dtype} block{self.block_size} context{longest}"


def choose(chip: Chip, shape: Shape) -> Tiling:
    """The tiling of a shape on a chip: the rule's, as findings change it."""
    return tuning.choose(chip.name, shape.key, rule(chip, shape))


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
    # Products of many lanes are summed better by the compiler than here; a float32's parts would fill the registers.
    together = shape.head_dim % LANES and shape.dtype != "float32"
    lanes = shape.group_lanes if together else chip.depth
    return Tiling(chunk, items, buffers=2, lanes=lanes, groups=groups, early=0.5 if items > 1 else 1.0, vmem=vmem)


def _chunk(chip: Chip, shape: Shape, *, items: int) -> int:
    room = min(_ITEM_BYTES, chip.vmem // _SHARE // 2 // items)
    most = max(min(room // shape.token_bytes, LONGEST), SHORTEST)
    if not chip.converts and shape.dtype in ("float8_e4m3fn", "float8_e5m2", "int8") and shape.block_size < 32:
        most = max(most // 2, SHORTEST)  # unpacking blocks that fill no register spills as much again as the KV takes
    chunk = 1 << (most.bit_length() - 1)
    while chunk > SHORTEST and chunk // 2 >= shape.context:
        chunk //= 2
    return max(chunk, shape.block_size)
