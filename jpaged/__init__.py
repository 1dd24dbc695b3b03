"""PagedAttention for JAX: an immutable block allocator on the device, attention through block tables, and an engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged import attention as attention
    from jpaged import cache as cache
    from jpaged.attention import PagedAttention, paged_attention
    from jpaged.config import BeamSearchParams, EngineConfig, SamplingParams
    from jpaged.llm import LLM
    from jpaged.model import LoadedModel
    from jpaged.outputs import RequestOutput

__version__ = "0.1.0.dev0"

_HOMES = {
    "LLM": "llm",
    "BeamSearchParams": "config",
    "EngineConfig": "config",
    "LoadedModel": "model",
    "PagedAttention": "attention",
    "RequestOutput": "outputs",
    "SamplingParams": "config",
    "paged_attention": "attention",
}
_ROOMS = ("attention", "cache")  # that people reach by name: `jpaged.attention.best_layout`

__all__ = [
    "LLM",
    "BeamSearchParams",
    "EngineConfig",
    "LoadedModel",
    "PagedAttention",
    "RequestOutput",
    "SamplingParams",
    "paged_attention",
]


def __getattr__(name: str) -> object:
    """Imports on first use, so that `--help` and the configs do not wait for JAX."""
    if name in _ROOMS:
        return importlib.import_module(f"jpaged.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"jpaged.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
