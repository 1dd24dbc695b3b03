"""How large the engine's arrays are, where the caller left it open.

It knows a model's numbers and the memory there is, which it asks JAX for. It creates nothing.
"""

from __future__ import annotations

import dataclasses
import os

import jax

from jpaged import backends, dtypes
from jpaged.cache import KVLayout
from jpaged.config import DType, EngineConfig
from jpaged.model import ModelSpec

CPU_CACHE_BYTES = 1 << 30  # of KV on a CPU unless the caller says otherwise; the memory is the host's own
DEVICE_SHARE = 0.9  # of an accelerator's free memory


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
    num_blocks, dtype = config.num_blocks, dtypes.resolve(config.dtype)
    one = layout(spec, num_blocks=1, block_size=config.block_size, dtype=dtype, backend=config.backend)
    faults += backends.faults(one)
    block_bytes = one.bytes_per_block
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
    if config.preemption_mode == "swap" and config.swap_space < block_bytes:
        faults.append(
            f"swap_space={config.swap_space:,} holds no KV block, which takes {block_bytes:,} bytes, and "
            "preemption_mode='swap' needs some; try more, or preemption_mode='recompute'"
        )
    if faults:
        raise ValueError("; ".join(faults))
    settled = {"num_blocks": num_blocks, "max_model_len": longest, "dtype": dtype, "kv_cache_memory": None}
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    return ResolvedConfig(**{**given, **settled})


def layout(spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: str, backend: str | None) -> KVLayout:
    """The KV cache of a model at these sizes, in the order of the backend that will run."""
    sizes = KVLayout(spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype)
    return backends.best_layout(sizes, backend)


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
