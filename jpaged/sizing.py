"""How large the engine's arrays are, where the caller left it open, and which dtype suits the machine.

It knows a model's numbers and the memory there is. It creates nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import get_args

import jax
import jax.numpy as jnp

from jpaged.cache import KVLayout
from jpaged.config import DType, EngineConfig
from jpaged.model import LoadedModel, ModelSpec

CPU_CACHE_BYTES = 1 << 30  # of KV on a CPU unless the caller says otherwise; the memory is the host's own
DEVICE_SHARE = 0.9  # of an accelerator's free memory

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ResolvedConfig(EngineConfig):
    """An `EngineConfig` with nothing left open."""

    num_blocks: int = 1
    max_model_len: int = 1
    dtype: DType = "float32"


def resolve(spec: ModelSpec, config: EngineConfig) -> ResolvedConfig:
    """The same settings with nothing left open: ``max_model_len``, ``num_blocks``, ``dtype``.

    Raises:
      ValueError: naming every setting that does not fit the model.
    """
    faults = []
    longest = config.max_model_len or spec.max_model_len
    if longest > spec.max_model_len:
        faults.append(
            f"max_model_len={longest} must be at most {spec.max_model_len}, what {spec.name} was trained for; try less"
        )
    num_blocks, dtype = config.num_blocks, resolve_dtype(config.dtype)
    block_bytes = layout(spec, num_blocks=1, block_size=config.block_size, dtype=dtype).bytes_per_block
    if num_blocks is None:
        wanted = config.max_num_seqs * -(-longest // config.block_size)
        room = config.kv_cache_memory // block_bytes if config.kv_cache_memory else free_bytes() // block_bytes
        num_blocks = room if config.kv_cache_memory else min(wanted, room)
        if num_blocks < 1:
            faults.append(
                f"one KV block takes {block_bytes:,} bytes and there is room for none; try more kv_cache_memory"
            )
    if num_blocks * block_bytes > (most := most_bytes()):
        faults.append(
            f"{num_blocks:,} KV blocks of {block_bytes:,} bytes need {num_blocks * block_bytes:,}, and there are "
            f"{most:,}; try num_blocks={most // block_bytes // 2}, or less kv_cache_memory"
        )
    if faults:
        raise ValueError("; ".join(faults))
    settled = {"num_blocks": num_blocks, "max_model_len": longest, "dtype": dtype, "kv_cache_memory": None}
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    return ResolvedConfig(**{**given, **settled})


def with_dtype_of(loaded: LoadedModel, config: EngineConfig) -> EngineConfig:
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


def layout(spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: str) -> KVLayout:
    """The KV cache of a model at these sizes."""
    return KVLayout(spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype)


def free_bytes() -> int:
    """Bytes that KV may take on the first device."""
    stats = jax.devices()[0].memory_stats() or {}
    if jax.default_backend() == "cpu" or "bytes_limit" not in stats:
        return CPU_CACHE_BYTES
    return int(DEVICE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))


def most_bytes() -> int:
    """Bytes that KV cannot exceed: what is free on the first accelerator, or the memory of the host."""
    stats = jax.devices()[0].memory_stats() or {}
    if jax.default_backend() == "cpu" or "bytes_limit" not in stats:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return stats["bytes_limit"] - stats["bytes_in_use"]


def resolve_dtype(dtype: DType) -> DType:
    """ "auto" becomes bfloat16 on accelerators, and on CPUs that multiply it in hardware (docs/cpu.md)."""
    if dtype != "auto":
        return dtype
    platform = jax.default_backend()
    if platform != "cpu":
        chosen, why = "bfloat16", f"a {platform} computes in it"
    elif jax.__version_info__ >= (0, 12) and (unit := _bfloat16_unit()):
        chosen, why = "bfloat16", f"this CPU multiplies bfloat16 in hardware ({unit}) and this jax uses it"
    else:
        chosen, why = "float32", "this CPU or this jax multiplies bfloat16 more slowly"
    log.info("dtype: %s, because %s", chosen, why)
    return chosen


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
