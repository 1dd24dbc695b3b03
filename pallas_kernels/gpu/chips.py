"""What the kernels need to know of a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as its kernels see it.

    Attributes:
      name: "H200".
      kind: What JAX calls it.
      capability: Compute capability, (9, 0).
      cores: Streaming multiprocessors.
      smem, smem_of_block: Bytes of shared memory, of a core and the most of one block of threads.
      threads, blocks, registers: The most that a core holds at once.
      bytes_per_second: Of its memory; published.
    """

    name: str
    kind: str
    capability: tuple[int, int]
    cores: int
    smem: int
    smem_of_block: int
    threads: int
    blocks: int
    registers: int
    bytes_per_second: float

    @property
    def has_tma(self) -> bool:
        """Whether copies into shared memory are the tensor memory accelerator's (Hopper and later), or cp.async's."""
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether a warpgroup multiplies as one what lies in shared memory: Hopper alone."""
        return self.capability[0] == 9

    @property
    def converts_float8(self) -> bool:
        """Whether it has instructions that turn eight-bit floats into others."""
        return self.capability >= (8, 9)

    @property
    def subtracts_bfloat16(self) -> bool:
        """Whether it has the instruction that Mosaic turns int8 into bfloat16 with."""
        return self.capability >= (9, 0)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 166912, 2048, 32, 65536, 2.039e12),
        Gpu("L40S", "NVIDIA L40S", (8, 9), 142, 102400, 101376, 1536, 24, 65536, 8.64e11),
        Gpu("H100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 232448, 2048, 32, 65536, 3.352e12),
        Gpu("H200", "NVIDIA H200", (9, 0), 132, 233472, 232448, 2048, 32, 65536, 4.8e12),
        Gpu("B200", "NVIDIA B200", (10, 0), 148, 233472, 232448, 2048, 32, 65536, 7.672e12),
    )
}
INTERPRETED = GPUS["H100"]  # whose kernels GPU interpret mode runs, on any machine


def current() -> Gpu:
    """The GPU that is compiled for: of the abstract mesh in use if it names a device, else the first device.

    One that is here may have another name and another number of cores, if it has the compute capability of one that the
    kernels know: an L4 is an L40S with fewer of them, a part of an H100 an H100.

    Raises:
      ValueError: it is none that the kernels know.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    device: Any = jax.devices()[0] if described is None else described
    return of(device.device_kind, getattr(device, "compute_capability", None), getattr(device, "core_count", None))


def of(kind: str, capability: str | None, cores: int | None) -> Gpu:
    """The GPU that JAX calls so, as far as it tells: "NVIDIA L4", "8.9" and 58.

    Raises:
      ValueError: the kernels know neither such a name nor such a capability.
    """
    words = kind.replace("-", " ").split()
    for name, gpu in GPUS.items():
        if name in words or capability == ".".join(map(str, gpu.capability)):
            return dataclasses.replace(gpu, kind=kind, cores=cores or gpu.cores)
    raise ValueError(f"device_kind={kind!r} must be one of {', '.join(GPUS)}, or alike; try backend='xla'")
