"""A named case as `jpaged.paged_attention` is called for it, in shapes: fused write and all, with the cache first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jpaged import attention
from jpaged.cache import KVLayout, create
from pallas_kernels.cases import Case
from pallas_kernels.options import Purpose

LAYERS, LAYER = 8, 1  # fewer than models have, and so few that a copy of one would be seen
_SCALES = ("k_scale", "v_scale")


def layout(case: Case, backend: str) -> KVLayout:
    """Of the case's cache."""
    blocks, order = case.rows * columns(case), attention.ORDERS[backend]
    return KVLayout(LAYERS, blocks, case.block_size, case.num_kv_heads, case.head_dim, case.dtype, order)


def columns(case: Case) -> int:
    """Of its block tables."""
    return -(-case.context // case.block_size)


def purpose(case: Case) -> Purpose:
    """What a step's work is for."""
    return Purpose(case.rows, columns(case), case.rows * case.queries, case.num_heads, case.queries)


def call(case: Case, backend: str) -> tuple[Any, tuple[Any, ...]]:
    """The call of a case, and its arguments as shapes; the first is the cache, to be donated."""
    num_tokens = case.rows * case.queries
    activation = case.dtype if case.dtype in ("float32", "float16") else "bfloat16"
    shapes = {
        "cache": jax.eval_shape(lambda: create(layout(case, backend))),
        "q": jax.ShapeDtypeStruct((num_tokens, case.num_heads, case.head_dim), activation),
        "kv": jax.ShapeDtypeStruct((num_tokens, case.num_kv_heads, case.head_dim), activation),
        "tables": jax.ShapeDtypeStruct((case.rows, columns(case)), jnp.int32),
        "lens": jax.ShapeDtypeStruct((case.rows,), jnp.int32),
        "starts": jax.ShapeDtypeStruct((case.rows + 1,), jnp.int32),
        "extra": {
            **({"sinks": jax.ShapeDtypeStruct((case.num_heads,), jnp.float32)} if case.sinks else {}),
            **({"tree_mask": jax.ShapeDtypeStruct((num_tokens, case.queries), jnp.bool_)} if case.tree else {}),
            **({"sliding_window": jax.ShapeDtypeStruct((), jnp.int32)} if case.sliding_window else {}),
            **({name: jax.ShapeDtypeStruct((), jnp.float32) for name in _SCALES} if case.scales else {}),
        },
    }

    def attend(cache, q, kv, tables, lens, starts, extra):
        rows = tables, lens, starts
        options = {"soft_cap": case.soft_cap, "max_q_len": case.queries, "backend": backend, **extra}
        return attention.paged_attention(q, kv, kv, cache, LAYER, *rows, **options)

    return attend, tuple(shapes.values())
