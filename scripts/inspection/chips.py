"""The chips that are compiled for, and who knows what of each."""

from __future__ import annotations

from typing import Any

from inspection import described
from inspection.gpu import figures as of_gpus
from inspection.gpu import search as search_of_gpus
from inspection.tpu import figures as of_tpus
from inspection.tpu import search as search_of_tpus
from jpaged import gpu_attention, tpu_attention
from pallas_kernels.cases import Case
from pallas_kernels.gpu.chips import GPUS

NAMES = of_tpus.CHIP_NAMES + of_gpus.CHIP_NAMES


def figures(chip: str) -> Any:
    """The module whose `of` compiles for it, and whose `shape` is what the tiling of a case depends on."""
    return of_gpus if chip in of_gpus.CHIP_NAMES else of_tpus


def search(chip: str) -> Any:
    """The module whose `best` looks for a better tiling."""
    return search_of_gpus if chip in of_gpus.CHIP_NAMES else search_of_tpus


def faults(chip: str, case: Case) -> list[str]:
    """Why its kernels cannot serve a case."""
    if chip in of_tpus.CHIP_NAMES:
        return tpu_attention.faults(described.layout(case, "tpu"))
    memory = gpu_attention.memory(described.layout(case, "gpu"))
    return memory.faults() or memory.uncopied(GPUS[chip])
