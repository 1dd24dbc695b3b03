"""Who can attend a batch on this device: our backends, and on a TPU the kernels that come with JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged import attention
from jpaged import cache as kv
from jpaged.cache import KVCache, KVLayout
from pallas_kernels.cases import Case

from .batches import Batch, blocks

OTHERS = ("jax_paged", "jax_ragged")  # jax.experimental.pallas.ops.tpu's


class Attends(NamedTuple):
    """Somebody who attends a batch.

    Attributes:
      step: Attends queries over a memory: (queries, memory) to (results, memory). Part of a jitted loop.
      memory: The KV, in the form that `step` takes.
      cache: The memory as a cache of ours, to compare results by.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    memory: Any
    cache: Callable[[Any], KVCache]


def there() -> tuple[str, ...]:
    """Who runs on this device, those that test a kernel slowly left out."""
    served = tuple(name for name in ("tpu", "gpu", "xla") if _serves(name))
    return served + (OTHERS if jax.default_backend() == "tpu" else ())


def _serves(backend: str) -> bool:
    try:
        attention.resolve_backend(backend)
    except ValueError:
        return False
    return True


def faults(name: str, case: Case) -> Iterator[str]:
    """Why it cannot attend a case."""
    if name in OTHERS:
        if case.queries > 1 and name == "jax_paged":
            yield "one query a row"
        if case.dtype not in ("bfloat16", "float32"):
            yield "no KV of eight bits"
        if case.head_dim != 128:
            yield "heads of 128"
        if case.sinks or case.tree:
            yield "no sinks and no trees"
        if case.sliding_window and name == "jax_paged":
            yield "no window"
    elif name == "xla" and (case.scales or case.tree):
        yield "no scales and no trees"


def ours(backend: str, batch: Batch) -> Attends:
    """One of our backends, as an engine calls it: what is the same in all layers is computed once."""
    case = batch.case
    layout = KVLayout(
        1,
        batch.num_blocks,
        case.block_size,
        case.num_kv_heads,
        case.head_dim,
        case.dtype,
        attention.ORDERS[backend],
    )
    rows = batch.tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1
    sizes = {"num_heads": case.num_heads, "num_tokens": batch.q_THD.shape[0], "max_q_len": case.queries}
    work = jax.jit(lambda *rows: attention.prepare(layout, *rows, **sizes, backend=backend))(*rows)

    def step(q, data):
        out, cache = attention.paged_attention(
            q, batch.k_TKD, batch.v_TKD, KVCache(data, layout), 0, *rows, backend=backend, work=work, **batch.options
        )
        return out, cache.data

    data = jax.jit(lambda: kv.pack(layout, blocks(batch)))()
    return Attends(step, data, lambda data: KVCache(data, layout))


def others(name: str, batch: Batch) -> Attends:
    """A kernel of JAX's own. They only read: the batch's own KV is in memory before they are timed."""
    case, scale = batch.case, batch.case.head_dim**-0.5
    canonical = KVLayout(
        1, batch.num_blocks, case.block_size, case.num_kv_heads, case.head_dim, case.dtype, kv.CANONICAL
    )
    written = jax.jit(
        lambda: (
            attention.paged_attention(
                batch.q_THD,
                batch.k_TKD,
                batch.v_TKD,
                KVCache(kv.pack(_xla(canonical), blocks(batch)), _xla(canonical)),
                0,
                batch.tables_RM,
                batch.kv_lens_R,
                batch.cu_q_lens_R1,
                backend="xla",
            )[1].data
        )
    )()
    pages_LNBCKD = kv.unpack(_xla(canonical), written)
    if name == "jax_paged":
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

        memory = jax.jit(lambda pages: tuple(pages[0].transpose(2, 3, 0, 1, 4)))(pages_LNBCKD)
        pages_at_once = max(1, min(512 // case.block_size, batch.tables_RM.shape[1]))

        def step(q, memory):
            out = paged_attention(
                q * jnp.asarray(scale, q.dtype),
                *memory,
                batch.kv_lens_R,
                batch.tables_RM,
                pages_per_compute_block=pages_at_once,
                attn_logits_soft_cap=case.soft_cap,
            )
            return out, memory

        return Attends(step, memory, lambda _: KVCache(pages_LNBCKD, canonical))
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def interleaved(pages):  # a head's keys and then its values
        return jnp.moveaxis(pages[0], 2, 3).reshape(batch.num_blocks, case.block_size, -1, case.head_dim)

    def ragged(q, memory):
        out = ragged_paged_attention(
            q,
            memory,
            batch.kv_lens_R,
            batch.tables_RM,
            batch.cu_q_lens_R1,
            jnp.array([case.rows], jnp.int32),
            sm_scale=scale,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
        )
        return out, memory

    return Attends(ragged, jax.jit(interleaved)(pages_LNBCKD), lambda _: KVCache(pages_LNBCKD, canonical))


def _xla(layout: KVLayout) -> KVLayout:
    return KVLayout(
        1, layout.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim, layout.dtype,
        attention.ORDERS["xla"],
    )  # fmt: skip
