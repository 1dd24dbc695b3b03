"""What a kernel may choose: how it cuts its work. `pallas_kernels.tuning` chooses."""

from __future__ import annotations

import dataclasses

_MOST = 1 << 14  # of any number of a tiling: far beyond what fits a chip


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a kernel may choose.

    Raises:
      ValueError: a choice that no kernel can have.

    Attributes:
      chunk: Tokens of KV that are one item of work.
      items: Items of a trip.
      buffers: Trips whose KV has room in VMEM; a power of two.
      lanes: Lanes that a product takes at once.
      groups: Head groups of an item whose arithmetic is one basic block, in a loop over them; a divisor of their
        number. 0: those of all items of a trip, without a loop.
      early: The share of a trip's orders that stands between the products with the keys.
      staged: Whether scores wait in VMEM rather than in registers.
      part: Tokens of float32 KV that are made bfloat16 at once; 0: as many as lanes.
      rows: Rows of queries that a prefill's product takes at once.
      vmem: Bytes of VMEM that the kernel may take; None is the compiler's own limit.
    """

    chunk: int
    items: int
    buffers: int
    lanes: int
    groups: int = 0
    early: float = 1.0
    staged: bool = True
    part: int = 0
    rows: int = 256
    vmem: int | None = None

    def __post_init__(self):
        least = {"chunk": 1, "items": 1, "buffers": 2, "lanes": 128, "groups": 0, "part": 0, "rows": 1}
        faults = []
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MOST:
                faults.append(f"{name}={value!r} must be a whole number from {low} to {_MOST}")
        for name in ("chunk", "buffers"):
            value = getattr(self, name)
            if isinstance(value, int) and value & (value - 1):
                faults.append(f"{name}={value} must be a power of two")
        if not isinstance(self.early, int | float) or not 0 <= self.early <= 1:
            faults.append(f"early={self.early!r} must be from 0 to 1")
        if not isinstance(self.staged, bool):
            faults.append(f"staged={self.staged!r} must be true or false")
        if self.vmem is not None and (not isinstance(self.vmem, int) or self.vmem < 1):
            faults.append(f"vmem={self.vmem!r} must be a number of bytes")
        if faults:
            raise ValueError(f"{'; '.join(faults)}; try the rule of pallas_kernels.tuning")

    def turns(self, count: int) -> int:
        """Of the loop over the ``count`` head groups of each item; 1 is none.

        Raises:
          ValueError: some groups would be left out.
        """
        if not self.groups:
            return 1
        if count % self.groups:
            raise ValueError(f"groups={self.groups} must divide the {count} head groups; try 1, or 0 for all at once")
        return self.items * count // self.groups
