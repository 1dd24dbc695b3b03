"""Which backend attends: by name, or the best there is for a platform and a cache.

It knows what each backend serves, and the order of the cache that it reads.
"""

from __future__ import annotations

import functools
import logging

import jax

from jpaged import cache as kv
from jpaged import tpu_attention
from jpaged.cache import WORDS

BACKENDS = ("xla", "tpu", "gpu", "tpu_interpret", "gpu_interpret")
ORDERS = {"xla": "LCKNBD", "tpu": WORDS, "tpu_interpret": WORDS}  # of the cache that each serving backend reads

log = logging.getLogger(__name__)


def resolve_backend(backend: str | None, platform: str | None = None) -> str:
    """Returns the backend that will run: the one named, or for ``None`` the best that this version has.

    A backend asked for by name never falls back.

    Args:
      backend: One of ``BACKENDS``, or None.
      platform: "cpu", "tpu" or "gpu"; None asks JAX.

    Raises:
      ValueError: for an unknown backend, or one that cannot serve here.
    """
    platform = platform or _platform()
    if backend is None:
        known = platform in ORDERS and (platform != "tpu" or tpu_attention.serves_here())
        best = platform if known else "xla"
        _announce(best, platform)
        return best
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of {', '.join(BACKENDS)}; try backend=None, which picks one")
    if backend not in ORDERS:
        raise ValueError(f"{backend=} is not in this version yet; try backend='xla', which runs everywhere")
    if backend in ("tpu", "gpu") and backend != platform:
        raise ValueError(
            f"{backend=} needs a {backend.upper()}, and JAX found only {platform}; "
            "try backend='xla', which runs everywhere"
        )
    return backend


def best_order() -> str:
    """The order that a `KVLayout` should have here, for the best backend to read it."""
    return ORDERS[resolve_backend(None)]


def backend_for(backend: str | None, layout: kv.KVLayout) -> str:
    """As `resolve_backend`, but where nobody names one, a cache in the order of ``xla`` is read by that."""
    if backend is None and layout.order == ORDERS["xla"]:
        return resolve_backend("xla")
    return resolve_backend(backend)


def _platform() -> str:
    """What is compiled for: the device that the mesh in use describes, which need not be here, or JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def faults(layout: kv.KVLayout) -> list[str]:
    """Why the backend whose order a cache has cannot serve it."""
    return tpu_attention.faults(layout) if layout.order == WORDS else []


@functools.cache
def _announce(backend: str, platform: str) -> None:
    why = "it has kernels of ours" if backend == platform else "no kernels of ours are for it"
    log.info("attention backend: %s, because this is a %s and %s", backend, platform, why)
