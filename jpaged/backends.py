"""Which backend attends: by name, or the best there is for a platform and a cache.

It knows what each backend serves, and the order of the cache that it reads.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax

from jpaged import cache as kv
from jpaged import gpu_attention, tpu_attention
from jpaged.cache import HEADS, WORDS

ORDERS = {"xla": "LCKNBD", "tpu": WORDS, "gpu": HEADS, "tpu_interpret": WORDS, "gpu_interpret": HEADS}  # of caches
BACKENDS = tuple(ORDERS)

log = logging.getLogger(__name__)


def resolve_backend(backend: str | None, platform: str | None = None) -> str:
    """Returns the backend that will run: the one named, or for ``None`` the best that this version has.

    A backend asked for by name never falls back.

    Args:
      backend: "xla", "tpu" or "gpu"; "tpu_interpret" or "gpu_interpret", which run those kernels on any machine,
        slowly; or None.
      platform: "cpu", "tpu" or "gpu"; None asks JAX.

    Raises:
      ValueError: for an unknown backend, or one that cannot serve here.
    """
    platform = platform or _platform()
    if backend is None:
        lack = _lack(platform)
        best = "xla" if lack else platform
        _announce(best, lack or f"this is a {platform}, which kernels of ours are for")
        return best
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of {', '.join(BACKENDS)}; try backend=None, which picks one")
    if backend.startswith("gpu") and (lack := gpu_attention.lacks()):
        raise ValueError(f"{backend=} does not run here: {lack}; or backend='xla', which runs everywhere")
    if backend in ("tpu", "gpu") and backend != platform:
        raise ValueError(
            f"{backend=} needs a {backend.upper()}, and JAX found only {platform}; "
            "try backend='xla', which runs everywhere"
        )
    return backend


def kernels_of(backend: str) -> Any:
    """The module whose `plan`, `prepare` and `attend` are a backend's that has kernels."""
    return {"tpu": tpu_attention, "gpu": gpu_attention}[backend.removesuffix("_interpret")]


def best_for(backend: str | None, sizes: kv.KVLayout) -> str:
    """As `resolve_backend`; but where nobody names one, ``xla`` for a cache of sizes that the best cannot serve."""
    chosen = resolve_backend(backend)
    if backend is None and chosen != "xla":
        faults = kernels_of(chosen).faults_here(dataclasses.replace(sizes, order=ORDERS[chosen]))
        if faults:
            log.info("attention backend: xla, because %s", "; ".join(faults))
            return "xla"
    return chosen


def best_layout(sizes: kv.KVLayout, backend: str | None = None) -> kv.KVLayout:
    """A layout of the same sizes in the order that the backend named reads, or the best for such a cache here.

    Raises:
      ValueError: see `resolve_backend`.
    """
    return dataclasses.replace(sizes, order=ORDERS[best_for(backend, sizes)])


def backend_for(backend: str | None, layout: kv.KVLayout) -> str:
    """As `resolve_backend`, but where nobody names one, a cache in the order of ``xla`` is read by that."""
    if backend is None and layout.order == ORDERS["xla"]:
        return resolve_backend("xla")
    return resolve_backend(backend)


def _platform() -> str:
    """What is compiled for: the device that the mesh in use describes, which need not be here, or JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform == "cuda" else platform


def faults(layout: kv.KVLayout) -> list[str]:
    """Why the backend whose order a cache has cannot serve it."""
    if layout.order == WORDS:
        return tpu_attention.faults(layout)
    return gpu_attention.faults(layout) if layout.order == HEADS else []


def _lack(platform: str) -> str | None:
    """Why no kernels of ours run on a platform; None if they do."""
    if platform not in ("tpu", "gpu"):
        return f"no kernels of ours are for a {platform}"
    return kernels_of(platform).lacks_here()


@functools.cache
def _announce(backend: str, why: str) -> None:
    log.info("attention backend: %s, because %s", backend, why)
