"""Pallas' Mosaic GPU, loaded when it is first used: it takes a third of a second, and most machines have no GPU.

Older JAX has part of it only, so it has no types here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

OLDEST_JAX = (0, 12)  # 0.11 has no `plgpu.store`


class _Mosaic:
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), name)


plgpu: Any = _Mosaic()


def lacks() -> str | None:
    """What the JAX at hand lacks to run the kernels, and the way out; None if nothing."""
    if jax.__version_info__[:2] >= OLDEST_JAX:
        return None
    oldest = ".".join(map(str, OLDEST_JAX))
    return f"jax {jax.__version__} has too little of Mosaic GPU; try jax {oldest} or newer, for Python 3.12 or newer"


@contextlib.contextmanager
def described(kind: str) -> Iterator[None]:
    """In this context kernels are for a GPU that JAX calls so, which need not be here: the interpreter asks for one."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "gpu"))):
        yield
