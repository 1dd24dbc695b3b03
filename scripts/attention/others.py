"""What comes with JAX to attend a batch: kernels of jax.experimental.pallas.ops, for TPUs and GPUs, and cuDNN's."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import attention
from jpaged import cache as kv
from jpaged.cache import KVCache

from .attending import Attends, layout
from .batches import Batch, blocks


def attends(name: str, batch: Batch) -> Attends:
    """They only read: the batch's own KV is in memory before they are timed."""
    pages_LNBCKD = _written(batch)
    try:
        memory, step = _STEPS[name](batch, pages_LNBCKD)
    except ImportError as error:
        raise ValueError(f"jax {jax.__version__} has it no more, or not yet ({error})") from error
    rows = batch.tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1
    return Attends(step, memory, rows, lambda _: KVCache(pages_LNBCKD, layout(batch, kv.CANONICAL)))


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


def _jax_triton(batch: Batch, pages_LNBCKD: Any) -> tuple[Any, Callable[..., Any]]:
    with warnings.catch_warnings():  # it says that it will go; with an older jax it is what people have
        warnings.simplefilter("ignore", DeprecationWarning)
        # By its name, since jax 0.12.1 took it away and a checker of types would look for it there.
        triton: Any = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")

    case, columns = batch.case, batch.tables_RM.shape[1]
    splits = max(n for n in range(1, 17) if columns % n == 0)

    def step(q, k, v, memory, rows):
        out = triton.paged_attention(
            q * jnp.asarray(case.head_dim**-0.5, q.dtype),
            *memory,
            rows[0],
            rows[1],
            k_splits=splits,
            pages_per_compute_block=max(n for n in range(1, 9) if columns // splits % n == 0),
            attn_logits_soft_cap=case.soft_cap,
            interpret=jax.default_backend() == "cpu",
        )
        return out, memory

    return jax.jit(lambda pages: tuple(pages[0].transpose(2, 3, 0, 1, 4)))(pages_LNBCKD), step


def _cudnn(batch: Batch, pages_LNBCKD: Any) -> tuple[Any, Callable[..., Any]]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # JAX has no public way to it

    case = batch.case
    attend: Any = cudnn.paged_attention  # a decorator hides what it takes
    try:
        cudnn.check_cudnn_version()
    except RuntimeError as error:  # how it says that there is none
        raise ValueError(str(error)) from error

    def step(q, k, v, memory, rows):
        table = rows[0][:, None, :, None]
        ones = jnp.ones(case.rows, jnp.int32)
        out = attend(
            q[:, None],
            *memory,
            ones,
            rows[1],
            table,
            table,
            scale=case.head_dim**-0.5,
            mask_type=cudnn.MaskType.PADDING,
        )
        return out[:, 0], memory

    return jax.jit(lambda pages: tuple(jnp.moveaxis(pages[0], 2, 0)))(pages_LNBCKD), step


_STEPS = {"jax_paged": _jax_paged, "jax_ragged": _jax_ragged, "jax_triton": _jax_triton, "cudnn": _cudnn}


def _written(batch: Batch) -> Any:
    """The blocks with the batch's own KV in them, in canonical order."""
    plain = layout(batch, attention.ORDERS["xla"])
    rows = batch.tables_RM, batch.kv_lens_R, batch.cu_q_lens_R1

    def write():
        cache = KVCache(kv.pack(plain, blocks(batch)), plain)
        _, cache = attention.paged_attention(batch.q_THD, batch.k_TKD, batch.v_TKD, cache, 0, *rows, backend="xla")
        return kv.unpack(plain, cache.data)

    return jax.jit(write)()
