"""Who can attend a batch on this device: our backends, and on a TPU the kernels that come with JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged import attention, tpu_attention
from jpaged import cache as kv
from jpaged.cache import KVCache, KVLayout
from pallas_kernels.cases import Case

from .batches import Batch, blocks

# What a kernel says of a shape or dtype that it cannot have, and a device of memory that it has not.
REFUSALS = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
OTHERS = ("jax_paged", "jax_ragged")  # jax.experimental.pallas.ops.tpu's


class Attends(NamedTuple):
    """Somebody who attends a batch.

    Attributes:
      step: Attends: (queries, their keys, their values, memory, given) to (results, memory). Part of a jitted loop.
      memory: The KV, in the form that `step` takes.
      given: What else `step` reads, the same in every layer of a step.
      cache: The memory as a cache of ours, to compare results by.
    """

    step: Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
    memory: Any
    given: Any
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
    return backend != "tpu" or tpu_attention.serves_here()


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
    elif name == "xla" and case.tree:
        yield "no trees"


def ours(backend: str, batch: Batch) -> Attends:
    """One of our backends, as an engine calls it: what is the same in all layers is computed once."""
    case = batch.case
    layout = _layout(batch, attention.ORDERS[backend])
    rows = batch.tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1
    sizes = {"num_heads": case.num_heads, "num_tokens": batch.q_THD.shape[0], "max_q_len": case.queries}
    work = jax.jit(lambda *rows: attention.prepare(layout, *rows, **sizes, backend=backend))(*rows)
    arrays = {name: x for name, x in batch.options.items() if isinstance(x, jax.Array)}
    numbers = {name: x for name, x in batch.options.items() if name not in arrays}

    def step(q, k, v, data, given):
        rows, work, arrays = given
        out, cache = attention.paged_attention(
            q, k, v, KVCache(data, layout), 0, *rows, backend=backend, work=work, **arrays, **numbers
        )
        return out, cache.data

    data = jax.jit(lambda: kv.pack(layout, blocks(batch)))()
    return Attends(step, data, (rows, work, arrays), lambda data: KVCache(data, layout))


def others(name: str, batch: Batch) -> Attends:
    """A kernel of JAX's own. They only read: the batch's own KV is in memory before they are timed."""
    pages_LNBCKD = _written(batch)
    memory, step = (_jax_paged if name == "jax_paged" else _jax_ragged)(batch, pages_LNBCKD)
    rows = batch.tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1
    return Attends(step, memory, rows, lambda _: KVCache(pages_LNBCKD, _layout(batch, kv.CANONICAL)))


def _jax_paged(batch: Batch, pages_LNBCKD: Any) -> tuple[Any, Callable[..., Any]]:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    case = batch.case
    most = max(1, 512 // case.block_size)
    at_once = max(n for n in range(1, most + 1) if batch.tables_RM.shape[1] % n == 0)

    def step(q, k, v, memory, rows):
        out = paged_attention(
            q * jnp.asarray(case.head_dim**-0.5, q.dtype),
            *memory,
            rows[1],
            rows[0],
            pages_per_compute_block=at_once,
            attn_logits_soft_cap=case.soft_cap,
        )
        return out, memory

    return jax.jit(lambda pages: tuple(pages[0].transpose(2, 3, 0, 1, 4)))(pages_LNBCKD), step


def _jax_ragged(batch: Batch, pages_LNBCKD: Any) -> tuple[Any, Callable[..., Any]]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    case = batch.case

    def interleaved(pages):  # a head's keys and then its values
        return jnp.moveaxis(pages[0], 2, 3).reshape(batch.num_blocks, case.block_size, -1, case.head_dim)

    def step(q, k, v, memory, rows):
        out = ragged_paged_attention(
            q,
            memory,
            rows[1],
            rows[0],
            rows[2],
            jnp.array([case.rows], jnp.int32),
            sm_scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
        )
        return out, memory

    return jax.jit(interleaved)(pages_LNBCKD), step


def _written(batch: Batch) -> Any:
    """The blocks with the batch's own KV in them, in canonical order."""
    layout = _layout(batch, attention.ORDERS["xla"])
    rows = batch.tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1

    def write():
        cache = KVCache(kv.pack(layout, blocks(batch)), layout)
        _, cache = attention.paged_attention(batch.q_THD, batch.k_TKD, batch.v_TKD, cache, 0, *rows, backend="xla")
        return kv.unpack(layout, cache.data)

    return jax.jit(write)()


def _layout(batch: Batch, order: str) -> KVLayout:
    case = batch.case
    return KVLayout(1, batch.num_blocks, case.block_size, case.num_kv_heads, case.head_dim, case.dtype, order)
