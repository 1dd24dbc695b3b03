"""What the TPU kernels cannot serve is refused when it is traced, with a way out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import cache as kv
from jpaged.attention import paged_attention, prepare
from jpaged.cache import HEADS, WORDS
from pallas_kernels.options import Purpose
from pallas_kernels.tpu import chips
from pallas_kernels.tpu.attention import Memory, plan
from tests.attention.test_tpu_kernels import make
from tests.marks import needs_mosaic


def test_blocks_that_vmem_does_not_hold():
    small = dataclasses.replace(chips.INTERPRETED, name="v4", vmem=16 << 20)
    llama2 = Memory(32, 128, 256, "bfloat16")
    with pytest.raises(
        ValueError, match=r"block_size=256 makes blocks of 4 MiB.*16 MiB of VMEM of a v4; try block_size=128"
    ):
        plan(llama2, Purpose(1, 8, 1, 32, 1), chip=small)
    assert plan(dataclasses.replace(llama2, block_size=128), Purpose(1, 8, 1, 32, 1), chip=small)


def served(work=None, max_q_len=None, q=None):
    """A few rows' attention on the kernels."""
    found, _, cache, tables, kv_lens, cu = make([1, 3], [20, 9])
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    q = jnp.asarray(found) if q is None else q
    return paged_attention(q, None, None, cache, 1, *arrays, backend="tpu_interpret", work=work, max_q_len=max_q_len)[0]


@pytest.mark.parametrize(
    ("change", "max_q_len"), [({"rows": 4, "columns": 2}, 3), ({"max_q_len": 2}, 3), ({"tokens": 5}, 3), ({}, None)]
)
def test_work_of_another_batch_is_refused(change, max_q_len):
    _, _, cache, tables, *_ = make([1, 3], [20, 9])
    sizes = {"rows": 2, "columns": tables.shape[1], "tokens": 4, "max_q_len": 3} | change
    lens = jnp.zeros(sizes["rows"], jnp.int32)
    tables = jnp.zeros((sizes["rows"], sizes["columns"]), jnp.int32)
    work = prepare(
        cache.layout, tables, lens, jnp.zeros(sizes["rows"] + 1, jnp.int32), num_heads=8, num_tokens=sizes["tokens"],
        max_q_len=sizes["max_q_len"], backend="tpu_interpret",
    )  # fmt: skip
    with pytest.raises(ValueError, match="work was prepared for another number of rows, columns, tokens"):
        served(work, max_q_len)


def test_work_of_another_cache_is_refused():
    """Whose blocks are larger, and so other tokens' places."""
    _, _, cache, tables, kv_lens, cu = make([1, 3], [20, 9])
    larger = dataclasses.replace(cache.layout, block_size=32)
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    work = prepare(larger, *arrays, num_heads=8, num_tokens=4, max_q_len=3, backend="tpu_interpret")
    with pytest.raises(ValueError, match="cache layout or backend; try prepare"):
        served(work, 3)


@needs_mosaic
def test_work_of_another_backend_is_refused():
    _, _, cache, tables, kv_lens, cu = make([1, 3], [20, 9])
    blocks = kv.KVLayout(2, cache.layout.num_blocks, 16, 2, 128, "bfloat16", HEADS)
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    work = prepare(blocks, *arrays, num_heads=8, num_tokens=4, max_q_len=3, backend="gpu_interpret")
    with pytest.raises(ValueError, match="or backend; try prepare"):
        served(work, 3)


def test_no_gradient_and_no_vmap():
    q = jnp.asarray(make([1, 3], [20, 9])[0])
    with pytest.raises(NotImplementedError, match=r"no gradient; try backend='xla'"):
        jax.grad(lambda q: served(q=q).sum())(q)
    found, _, cache, tables, kv_lens, cu = make([1, 3], [20, 9])
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    new = jnp.ones((4, 2, 128))
    for which in (1, 2):  # keys, values

        def total(q, k, v):
            return paged_attention(q, k, v, cache, 1, *arrays, backend="tpu_interpret")[0].sum()

        with pytest.raises(NotImplementedError, match=r"no gradient; try backend='xla'"):
            jax.grad(total, which)(jnp.asarray(found), new, new)
    with pytest.raises(NotImplementedError, match=r"take no jax\.vmap; try more rows"):
        jax.vmap(lambda q: served(q=q))(q[None])

    def of(sinks=None, kv_lens=arrays[1], data=cache.data, soft_cap=None):
        rows = arrays[0], kv_lens, arrays[2]
        whole = cache.replace(data=data)
        return paged_attention(q, None, None, whole, 1, *rows, sinks=sinks, soft_cap=soft_cap, backend="tpu_interpret")[
            0
        ]

    for name, x in (("sinks", jnp.ones(8)), ("soft_cap", jnp.float32(9))):
        with pytest.raises(NotImplementedError, match=r"no gradient; try backend='xla'"):
            jax.grad(lambda x, name=name: of(**{name: x}).sum())(x)
    for name, x in (("kv_lens", arrays[1]), ("data", cache.data), ("sinks", jnp.ones(8))):
        with pytest.raises(NotImplementedError, match=r"take no jax\.vmap; try more rows"):
            jax.vmap(lambda x, name=name: of(**{name: x}))(x[None])


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_tree_that_is_not_of_truths_is_refused(dtype):
    found, _, cache, tables, kv_lens, cu = make([2], [2])
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    with pytest.raises(ValueError, match=r"tree_mask.dtype=.* must be bool; try tree_mask != 0"):
        paged_attention(
            jnp.asarray(found), None, None, cache, 1, *arrays, backend="tpu_interpret", max_q_len=2,
            tree_mask=jnp.full((2, 2), 2, dtype),
        )  # fmt: skip


def test_64_bits_are_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"needs jax_enable_x64 off"):
        served()


def test_a_query_of_a_tree_sees_itself():
    found, _, cache, tables, kv_lens, cu = make([2], [2])
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)

    def attend(tree):
        q = jnp.asarray(found)
        return paged_attention(
            q, None, None, cache, 1, *arrays, backend="tpu_interpret", max_q_len=2, tree_mask=jnp.asarray(tree)
        )[0]

    np.testing.assert_array_equal(attend(np.zeros((2, 2), bool)), attend(np.eye(2, dtype=bool)))


@pytest.mark.parametrize(
    "args", [{"num_heads": 5}, {"num_heads": 0}, {"max_q_len": -1}, {"order": "LCKNBD"}, {"block_size": 12}]
)
@pytest.mark.usefixtures("annotations_unchecked")
def test_what_cannot_be_prepared(args):
    sizes = {"order": WORDS, "block_size": 16}
    sizes |= {name: args[name] for name in args if name in sizes}
    args = {name: value for name, value in args.items() if name not in sizes}
    layout = kv.KVLayout(num_layers=1, num_blocks=2, num_kv_heads=2, head_dim=64, **sizes)
    rows = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"prepare: .*; try"):
        prepare(layout, *rows, **{"num_heads": 4, "num_tokens": 1, "backend": "tpu_interpret", **args})


@pytest.mark.parametrize("most", [2, 20])
def test_rows_that_contradict_themselves_give_zeros(most):
    """More queries than promised, than tokens, or more tokens than the table holds: no copy knows such bounds."""
    found, _, cache, tables, kv_lens, cu = make([1, 2, 5, 1], [20, 9, 5, 40])
    kv_lens[1], kv_lens[3] = 1, 16 * tables.shape[1] + 1
    out, after = paged_attention(
        jnp.asarray(found), jnp.ones((9, 2, 128)), jnp.ones((9, 2, 128)), cache, 1, jnp.asarray(tables),
        jnp.asarray(kv_lens), jnp.asarray(cu), backend="tpu_interpret", max_q_len=most,
    )  # fmt: skip
    there = np.asarray(out).any(axis=(1, 2))
    assert there.tolist() == [True, False, False, *[most == 20] * 5, False] and np.isfinite(np.asarray(out)).all()
    before, now = (np.asarray(kv.unpack(cache.layout, x.data)) for x in (cache, after))
    for row in (1, 3):
        np.testing.assert_array_equal(now[:, tables[row, 0]], before[:, tables[row, 0]])
