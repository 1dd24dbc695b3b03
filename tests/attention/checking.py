"""A batch by kernels against the oracle, with NaN in all memory that no row owns."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import cache as kv
from jpaged.attention import paged_attention, prepare
from pallas_kernels import reference, tuning
from tests.attention.batches import new_rows, stored

ERRORS = {"float32": 1e-5, "bfloat16": 5e-3}  # relative, for what is not quantised


def check(case, *, backend, tiling, pad=0, writes=True, tree=None, scales=None, hoisted=False, **options):
    q, data, cache, tables, kv_lens, cu = case
    dtype = cache.layout.dtype
    owned, scale = data.copy(), np.ones((2, cache.layout.num_kv_heads)) if scales is None else np.asarray(scales)
    k = v = None
    if writes:
        k, v = (
            jnp.asarray(new) * jnp.asarray(s, jnp.float32)[None, :, None]
            for new, s in zip(new_rows(data, tables, kv_lens, cu, pad), scale, strict=True)
        )
    of_queries = dtype if dtype in ("float32", "float16") else "bfloat16"
    q = np.asarray(jnp.asarray(q).astype(of_queries).astype(jnp.float32))
    arrays = {"sinks": options.pop("sinks", None), "tree_mask": tree}
    given = {name: jnp.asarray(array) for name, array in arrays.items() if array is not None}
    if scales is not None:
        given |= {"k_scale": jnp.asarray(scale[0], jnp.float32), "v_scale": jnp.asarray(scale[1], jnp.float32)}
    most = options.pop("max_q_len", None)

    @jax.jit
    def run(q, k, v, cache, layer, tables, kv_lens, cu, given):
        work = None
        if hoisted:
            shapes = {"num_heads": q.shape[1], "num_tokens": q.shape[0], "max_q_len": most}
            work = prepare(cache.layout, tables, kv_lens, cu, **shapes, backend=backend)
        return paged_attention(
            q, k, v, cache, layer, tables, kv_lens, cu,
            max_q_len=most, backend=backend, work=work, **options, **given,
        )  # fmt: skip

    with contextlib.nullcontext() if tiling is None else tuning.trying(tiling):  # None: as the rule cuts
        out, after = run(q, k, v, stored(cache.layout, data), jnp.int32(1), tables, kv_lens, cu, given)
    want = reference.paged_attention(
        q,
        owned[1] * scale[None, None, :, :, None],
        tables,
        kv_lens,
        cu,
        **{"sm_scale": 1 / math.sqrt(q.shape[-1]), **options},
        sinks_H=arrays["sinks"],
        tree_TQ=tree,
    )
    errors = np.abs(np.asarray(out, np.float64) - want)[: cu[-1]].max(axis=(1, 2), initial=0)
    largest = np.maximum(np.abs(want)[: cu[-1]].max(axis=(1, 2), initial=0), 1e-9)  # of each query
    assert (errors <= ERRORS.get(dtype, 5e-3) * largest).all(), (errors / largest).max()
    assert not np.asarray(out)[cu[-1] :].any()  # padding queries give zeros
    assert_whole(kv.unpack(after.layout, after.data), owned, tables, kv_lens, cache.layout.block_size)


def assert_whole(found, owned, tables, kv_lens, block_size):
    """All that a row owns is as it should be, in its own layer; other layers and nobody's blocks are as they were."""
    found = np.asarray(found.astype(jnp.float32))
    np.testing.assert_array_equal(found[0], owned[0])
    mine = np.zeros(owned.shape[1:3], bool)
    for row, length in enumerate(kv_lens):
        for p in range(length):
            mine[tables[row, p // block_size], p % block_size] = True
    np.testing.assert_array_equal(found[1][mine], owned[1][mine])
    nobodys = ~mine.any(axis=1)
    np.testing.assert_array_equal(found[1][nobodys], owned[1][nobodys])


def check_nan_stays(case, *, backend, tiling, max_q_len):
    """A row whose own KV is NaN gives NaN; the row after it, which is done by the same registers, does not."""
    q, data, cache, tables, kv_lens, cu = case
    data[1, tables[0, 1]] = np.nan
    rows = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    with tuning.trying(tiling):
        out, _ = paged_attention(
            jnp.asarray(q), None, None, stored(cache.layout, data), 1, *rows, max_q_len=max_q_len, backend=backend
        )
    assert np.isnan(np.asarray(out)[:max_q_len]).all()
    assert np.isfinite(np.asarray(out)[max_q_len:]).all()


# Queries and tokens of rows.
DECODE = {
    "block borders": ([1, 1, 1, 1, 1], [1, 15, 16, 17, 33]),
    "chunk borders": ([1, 1, 1], [127, 128, 129]),
    "idle rows": ([1, 0, 1, 0, 1], [9, 5, 300, 0, 2]),
    "all finished": ([0, 0], [0, 40]),
    "long among short": ([1] * 6, [400, 1, 2, 3, 4, 5]),
}
MIXED = {
    "prefill": ([40], [40]),
    "chunks": ([33, 9, 130], [150, 9, 300]),
    "mixed": ([1, 20, 0, 1, 12], [140, 20, 5, 9, 139]),
    "all finished": ([0, 0], [0, 40]),
}
