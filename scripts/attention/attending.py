"""Who can attend a batch on this device: our backends, and what comes with JAX (`others`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jpaged import attention
from jpaged import cache as kv
from jpaged.backends import kernels_of
from jpaged.cache import KVCache, KVLayout
from pallas_kernels.cases import Case

from .batches import Batch, blocks

# What comes with JAX, by platform: jax.experimental.pallas.ops' kernels, and its way to cuDNN's attention.
OTHERS_OF = {"tpu": ("jax_paged", "jax_ragged"), "gpu": ("jax_triton", "cudnn")}
OTHERS = tuple(name for names in OTHERS_OF.values() for name in names)


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
    return served + OTHERS_OF.get(jax.default_backend(), ())


def _serves(backend: str) -> bool:
    try:
        attention.resolve_backend(backend)
    except ValueError:
        return False
    return backend == "xla" or kernels_of(backend).lacks_here() is None


def refuses(error: Exception) -> bool:
    """Whether a kernel says so of a shape or dtype that it cannot have, or a device of memory that it has not.

    What else the runtime reports (an access out of bounds, a kernel that does not compile) is a fault, and no refusal.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return str(error).startswith("RESOURCE_EXHAUSTED")
    return isinstance(error, (ValueError, NotImplementedError))


def faults(name: str, case: Case) -> Iterator[str]:
    """Why it cannot attend a case."""
    if name in OTHERS:
        if case.queries > 1 and name != "jax_ragged":
            yield "one query a row"
        dtypes = ("bfloat16", "float32" if name in OTHERS_OF["tpu"] else "float16")
        if case.dtype not in dtypes:
            yield f"KV in {' or '.join(dtypes)}"
        if case.head_dim != 128 and name in OTHERS_OF["tpu"]:
            yield "heads of 128"
        if case.sinks or case.tree:
            yield "no sinks and no trees"
        if case.sliding_window and name != "jax_ragged":
            yield "no window"
        if case.soft_cap and name == "cudnn":
            yield "no soft cap"
    elif name == "xla" and case.tree:
        yield "no trees"


def ours(backend: str, batch: Batch) -> Attends:
    """One of our backends, as an engine calls it: what is the same in all layers is computed once."""
    case = batch.case
    ordered = layout(batch, attention.ORDERS[backend])
    rows = batch.tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1
    sizes = {"num_heads": case.num_heads, "num_tokens": batch.q_THD.shape[0], "max_q_len": case.queries}
    work = jax.jit(lambda *rows: attention.prepare(ordered, *rows, **sizes, backend=backend))(*rows)
    arrays = {name: x for name, x in batch.options.items() if isinstance(x, jax.Array)}
    numbers = {name: x for name, x in batch.options.items() if name not in arrays}

    def step(q, k, v, data, given):
        rows, work, arrays = given
        out, cache = attention.paged_attention(
            q, k, v, KVCache(data, ordered), 0, *rows, backend=backend, work=work, **arrays, **numbers
        )
        return out, cache.data

    data = jax.jit(lambda: kv.pack(ordered, blocks(batch)))()
    return Attends(step, data, (rows, work, arrays), lambda data: KVCache(data, ordered))


def layout(batch: Batch, order: str) -> KVLayout:
    """Of a cache of one layer for the batch."""
    case = batch.case
    return KVLayout(1, batch.num_blocks, case.block_size, case.num_kv_heads, case.head_dim, case.dtype, order)
