"""Where the CUDA compiler is: JAX's CUDA plugin, ptxas and nvdisasm, as wheels. The development environment has them in
a folder of their own, for JAX looks for a GPU wherever its plugin is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PLUGIN = "jax_cuda13_plugin"


def folder() -> Path:
    """The folder that a compiling process must have on its path.

    Raises:
      ValueError: there is none.
    """
    beside = Path(sys.prefix) / "cuda"
    if beside.is_dir():
        return beside
    found = importlib.util.find_spec(PLUGIN)
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    raise ValueError(
        "JAX's CUDA plugin is not installed; with Python 3.12 or newer, try `make venv-dev PYTHON=python3.12`, "
        "or pip install -e '.[gpu,inspect-gpu]'"
    )


def version() -> str:
    """Of the plugin: "0.12.0.1"."""
    for info in folder().glob(f"{PLUGIN}-*.dist-info"):
        return info.name.removeprefix(f"{PLUGIN}-").removesuffix(".dist-info")
    return "unknown"
