"""A named case as arrays: queries, keys and values, block tables of shuffled blocks, and the KV of a cache."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import cache as kv
from jpaged.cache import KVCache, KVLayout
from pallas_kernels import reference
from pallas_kernels.cases import Case

_SAMPLED_ROWS = 4
_INT8_SCALE = 1 / 32  # so that keys and values of an int8 cache are about as large as others
_TREE = 0b11111101  # each query sees all those before it but the second, and itself


class Batch(NamedTuple):
    """Arrays of a case; every row has as many tokens.

    Attributes:
      case: Whose.
      q_THD, k_TKD, v_TKD: Queries, and their own keys and values.
      tables_RM, kv_lens_R, cu_q_lens_R1: As `paged_attention` takes them.
      options: What else it takes for the case, arrays and numbers.
    """

    case: Case
    q_THD: Any
    k_TKD: Any
    v_TKD: Any
    tables_RM: Any
    kv_lens_R: Any
    cu_q_lens_R1: Any
    options: dict[str, Any]

    @property
    def num_blocks(self) -> int:
        return self.tables_RM.size


def make(case: Case, seed: int = 0) -> Batch:
    """The case's batch."""
    rng, columns = np.random.default_rng(seed), -(-case.context // case.block_size)
    num_tokens, dtype = case.rows * case.queries, case.dtype if case.dtype in ("float32", "float16") else "bfloat16"
    shapes = {"q": case.num_heads, "k": case.num_kv_heads, "v": case.num_kv_heads}
    q, k, v = (
        jnp.asarray(rng.standard_normal((num_tokens, heads, case.head_dim), np.float32)).astype(dtype)
        for heads in shapes.values()
    )
    options: dict[str, Any] = {"max_q_len": case.queries, "soft_cap": case.soft_cap}
    options["sliding_window"] = case.sliding_window
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(case.num_heads, np.float32))
    if case.scales:
        options["k_scale"] = options["v_scale"] = _INT8_SCALE if case.dtype == "int8" else 1.0
    if case.tree:
        before = np.tril(np.ones((case.queries, case.queries), bool))
        kept = [[bool(_TREE >> j & 1) or i == j for j in range(case.queries)] for i in range(case.queries)]
        options["tree_mask"] = jnp.asarray(np.tile(before & np.array(kept), (case.rows, 1)))
    return Batch(
        case,
        q,
        k,
        v,
        jnp.asarray(rng.permutation(case.rows * columns).reshape(case.rows, columns).astype(np.int32)),
        jnp.full(case.rows, case.context, jnp.int32),
        jnp.arange(case.rows + 1, dtype=jnp.int32) * case.queries,
        {name: value for name, value in options.items() if value is not None},
    )


def blocks(batch: Batch) -> Any:
    """KV of one layer's blocks in canonical order, as the case's cache stores it."""
    case = batch.case
    shape = KVLayout(1, batch.num_blocks, case.block_size, case.num_kv_heads, case.head_dim, case.dtype).canonical_shape
    drawn = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    if case.dtype == "int8":
        return jnp.clip(jnp.round(drawn / jnp.bfloat16(_INT8_SCALE)), -127, 127).astype("int8")
    return drawn.astype(case.dtype)


def error(batch: Batch, cache: KVCache, out_THD: Any) -> float:
    """How far some rows' results are from the oracle's in float64, over the largest of those.

    Args:
      batch: The batch.
      cache: After it was attended, its own tokens written.
      out_THD: Its results.
    """
    case = batch.case
    options = {"sm_scale": case.head_dim**-0.5, **batch.options}
    scale = options.pop("k_scale", 1.0)
    options.pop("v_scale", None)
    options.pop("max_q_len")
    sinks, tree = options.pop("sinks", None), options.pop("tree_mask", None)
    faults, largest = [], 0.0
    for row in np.linspace(0, case.rows - 1, min(case.rows, _SAMPLED_ROWS)).round().astype(int):
        # Of a prefill the last query; of few queries all, which a tree needs.
        count = case.queries if case.queries <= 8 else 1
        last = (row + 1) * case.queries
        held = np.asarray(kv.read_blocks(cache, batch.tables_RM[row]).astype(jnp.float32))[:, 0] * scale
        want = reference.paged_attention(
            np.asarray(batch.q_THD[last - count : last].astype(jnp.float32)),
            held,
            np.arange(held.shape[0])[None],
            np.array([case.context]),
            np.array([0, count]),
            sinks_H=None if sinks is None else np.asarray(sinks),
            tree_TQ=None if tree is None else np.asarray(tree[last - count : last]),
            **options,
        )
        faults.append(np.abs(np.asarray(out_THD[last - count : last].astype(jnp.float32)) - want).max())
        largest = max(largest, np.abs(want).max())
    return float(max(faults) / largest)


def smaller(name: str, case: Case, *, rows: int | None, context: int | None) -> Case:
    """The case of that name with another number of rows or tokens.

    Raises:
      ValueError: the rows would have fewer tokens than queries.
    """
    case = dataclasses.replace(case, rows=rows or case.rows, context=context or case.context)
    if case.context < case.queries:
        raise ValueError(
            f"--context={case.context} must be at least {case.queries} for {name}, the queries of a row; try more, or "
            "run this case by itself"
        )
    return case
