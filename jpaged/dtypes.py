"""Which dtype to compute in: what suits the machine, and what the weights have.

It knows CPUs and versions of JAX by what was measured on them (docs/cpu.md). It creates nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import get_args

import jax
import jax.numpy as jnp

from jpaged.config import DType, EngineConfig
from jpaged.model import LoadedModel

log = logging.getLogger(__name__)


def resolve(dtype: DType) -> DType:
    """ "auto" becomes bfloat16 on accelerators, and on CPUs that multiply it in hardware (docs/cpu.md)."""
    if dtype != "auto":
        return dtype
    platform = jax.default_backend()
    if platform != "cpu":
        chosen, why = "bfloat16", f"a {platform} computes in it"
    elif (unit := _bfloat16_unit()) is None:
        chosen, why = "float32", "this CPU has no instructions for bfloat16"
    elif jax.__version_info__ < (0, 12):
        chosen, why = (
            "float32",
            (
                f"jax {jax.__version__} does not use this CPU's instructions for bfloat16 ({unit}); jax 0.12, for "
                "Python 3.12, does"
            ),
        )
    else:
        chosen, why = "bfloat16", f"this CPU multiplies bfloat16 in hardware ({unit}) and this jax uses it"
    log.info("dtype: %s, because %s", chosen, why)
    return chosen


def of_weights(loaded: LoadedModel, config: EngineConfig) -> EngineConfig:
    """The same settings with the dtype that the weights have.

    Raises:
      ValueError: another dtype was asked for, or this is none that an engine computes in.
    """
    known = [dtype for dtype in get_args(DType) if dtype != "auto"]
    found = {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.weights) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    dtype = next((dtype for dtype in known if found == {dtype}), None)
    if dtype is None:
        raise ValueError(f"the weights are {', '.join(sorted(found))}; try loading all of them as {' or '.join(known)}")
    if config.dtype not in ("auto", dtype):
        raise ValueError(f"dtype={config.dtype!r} and the weights are {dtype}; try loading them so, or dtype='auto'")
    return dataclasses.replace(config, dtype=dtype)


def min_rows(dtype: DType) -> int:
    """The fewest rows of a step: XLA's CPU products of bfloat16 take far longer for one row than for two."""
    return 2 if dtype == "bfloat16" and jax.default_backend() == "cpu" else 1


def _bfloat16_unit() -> str | None:
    """What Linux calls this CPU's instructions for products of bfloat16, if it has them."""
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            flags = next((line.split() for line in cpuinfo if line.startswith("flags")), [])
    except OSError:
        return None
    return next((unit for unit in ("amx_bf16", "avx512_bf16") if unit in flags), None)
