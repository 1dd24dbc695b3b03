"""What the kernels of a batch are compiled for, and what they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.gpu.chips import Gpu
from pallas_kernels.gpu.tiling import WARPS, Rows, Tiling


@dataclasses.dataclass(frozen=True)
class Form:
    """What is compiled in.

    Attributes:
      name: Of the kernel.
      rows, tiling: How the work is cut.
      chip: What it runs on.
      num_kv_heads, block_size, num_blocks: Of the cache.
      soft_cap, tree: Whether those are used; of other features `Inputs` tell.
    """

    name: str
    rows: Rows
    tiling: Tiling
    chip: Gpu
    num_kv_heads: int
    block_size: int
    num_blocks: int
    soft_cap: bool
    tree: bool

    @property
    def by_warpgroup(self) -> bool:
        """Whether products are `products.ByWarpgroup`'s."""
        return self.chip.has_wgmma and self.rows.warps == WARPS and self.tiling.chunk % 64 == 0


class Inputs(NamedTuple):
    """What the kernels read.

    Attributes:
      q_XKPD: Queries by `items.gathered`, in the dtype of the products.
      cache_HBD: The cache, its axes up to the KV head as one: ((layer · N + block) · 2 + keys or values) · K + head.
      tables_RM: Block tables.
      items_5X: Row, end, count, start and length of each item; see `items.Items`.
      layer_1: Which.
      scales: For each KV head what scores are multiplied by, then what results are, then the soft cap.
      window_1: Tokens that a query sees.
      sinks_KP: In units of log2, for each row of the products.
      tree_XP: Which of its row's queries each place sees, as bits.

    What a feature that is not used would read is None.
    """

    q_XKPD: Float[Array, "X K P D"]
    cache_HBD: Any
    tables_RM: Int32[Array, "R M"]
    items_5X: Int32[Array, "5 X"]
    layer_1: Int32[Array, "1"]
    scales: Float32[Array, " F"]
    window_1: Int32[Array, "1"] | None
    sinks_KP: Float32[Array, "K P"] | None
    tree_XP: Int32[Array, "X P"] | None

    @classmethod
    def given(cls, names: Iterable[str], refs: Iterable[Any]) -> Inputs:
        """What a kernel sees that was given those of these names; it asks for no others."""
        refs_by_name: dict[str, Any] = dict(zip(names, refs, strict=True))
        none: Any = None
        return cls(**{name: refs_by_name.get(name, none) for name in cls._fields})
