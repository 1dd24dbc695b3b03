"""Where libtpu, the TPU's compiler, is. It is kept apart from the other packages: JAX loads it wherever it finds it,
and complains on machines without a TPU.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

VERSION = "0.0.52"  # whose schedules our figures are


def folder() -> Path:
    """The folder that a compiling process must have on its path.

    Raises:
      ValueError: it is not installed.
    """
    beside = Path(sys.prefix) / "libtpu"
    if beside.is_dir():
        return beside
    found = importlib.util.find_spec("libtpu")
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    raise ValueError(f"libtpu is not installed; try `pip install --no-deps --target {beside} libtpu=={VERSION}`")


def version() -> str:
    """Of what `folder` finds: "0.0.52"."""
    for info in folder().glob("libtpu-*.dist-info"):
        return info.name.removeprefix("libtpu-").removesuffix(".dist-info")
    return "unknown"
