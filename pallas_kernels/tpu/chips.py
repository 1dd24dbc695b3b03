"""What the kernels need to know of a chip."""

from __future__ import annotations

import dataclasses

import jax
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU core as its kernels see it.

    Attributes:
      name: "v6e".
      depth: Rows and columns of a matrix unit.
      cores: Cores that share a kernel's grid.
      vmem: Bytes.
      converts: Whether its compiler turns eight-bit numbers into bfloat16, and does it well.
      bytes_per_second: Of HBM, this core's share; published.
      hertz: Of the clock; derived from published figures.
    """

    name: str
    depth: int
    cores: int
    vmem: int
    converts: bool
    bytes_per_second: float
    hertz: float


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", depth=128, cores=2, vmem=16 << 20, converts=False, bytes_per_second=614e9, hertz=1.05e9),
        Chip("v5e", depth=128, cores=1, vmem=128 << 20, converts=True, bytes_per_second=819e9, hertz=1.5e9),
        Chip("v5p", depth=128, cores=2, vmem=64 << 20, converts=True, bytes_per_second=1382e9, hertz=1.75e9),
        Chip("v6e", depth=256, cores=1, vmem=128 << 20, converts=True, bytes_per_second=1640e9, hertz=1.75e9),
        Chip("tpu7x", depth=256, cores=1, vmem=64 << 20, converts=True, bytes_per_second=3690e9, hertz=2.2e9),
    )
}
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}


def current() -> Chip:
    """The chip that is compiled for: of the abstract mesh in use if it names a device, else of the first device.

    Raises:
      ValueError: it is no TPU that the kernels know.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    if kind not in KINDS:
        raise ValueError(f"device_kind={kind!r} must be one of {', '.join(KINDS)}; try backend='xla'")
    return CHIPS[KINDS[kind]]


INTERPRETED = CHIPS["v5e"]  # whose kernels TPU interpret mode runs, on any machine


def interpreter() -> pltpu.InterpretParams:
    """TPU interpret mode, as `backend="tpu_interpret"` has it: uninitialised memory is NaN."""
    return pltpu.InterpretParams()
