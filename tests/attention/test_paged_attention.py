"""The oracle against hand arithmetic, and the xla backend against the oracle with everything unowned poisoned."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import cache as kv
from jpaged.attention import ORDERS, WORDS, PagedAttention, paged_attention, prepare, resolve_backend, token_rows
from pallas_kernels import reference
from tests.attention.batches import make_case, new_rows, stored
from tests.marks import needs_mosaic

loosely: Any = paged_attention  # for arguments that its annotations refuse


def test_the_oracle_by_hand():
    # Scores ln 1, ln 3 weigh the values 1/4 and 3/4.
    q, k, v = np.array([1.0]), np.array([[0.0], [math.log(3)]]), np.array([[4.0], [8.0]])
    assert reference.attend_one(q, k, v, sm_scale=1.0) == pytest.approx([7.0])
    # A sink of ln 4 doubles the denominator: (1·4 + 3·8) / 8.
    assert reference.attend_one(q, k, v, sm_scale=1.0, sink=math.log(4)) == pytest.approx([3.5])
    # A cap of 2 turns ln 3 into 2·tanh(ln 3 / 2) = 1.
    weight = math.e / (1 + math.e)
    assert reference.attend_one(q, k, v, sm_scale=1.0, soft_cap=2.0) == pytest.approx([4 + 4 * weight])
    assert reference.attend_one(q, k[:0], v[:0], sm_scale=1.0) == pytest.approx([0.0])


def test_the_oracle_reads_through_the_table():
    kv_NBCKD = np.zeros((3, 2, 2, 1, 1))
    kv_NBCKD[2, :, 1, 0, 0] = [1, 2]  # the values at positions 0 and 1
    kv_NBCKD[0, 0, 1, 0, 0] = 6  # the value at position 2
    q, tables = np.zeros((2, 1, 1)), np.array([[2, 0]])
    out = reference.paged_attention(q, kv_NBCKD, tables, np.array([3]), np.array([0, 2]), sm_scale=1.0)
    assert out[:, 0, 0] == pytest.approx([1.5, 3.0])  # equal scores: plain means of what each query sees
    out = reference.paged_attention(
        q, kv_NBCKD, tables, np.array([3]), np.array([0, 2]), sm_scale=1.0, sliding_window=2
    )
    assert out[:, 0, 0] == pytest.approx([1.5, 4.0])


@jax.jit
def run(q, k, v, cache, layer, tables, kv_lens, cu, options):
    options = {name: value for name, value in options.items() if value is not None}
    return paged_attention(q, k, v, cache, layer, tables, kv_lens, cu, **options)


def check(case, pad, *, rtol=1e-5, **options):
    q, data, cache, tables, kv_lens, cu = case
    owned = data.copy()
    k, v = new_rows(data, tables, kv_lens, cu, pad)
    fresh = stored(cache.layout, data)
    sinks = options.pop("sinks", None)
    plain = {name: value for name, value in options.items() if value is not None}
    out, after = run(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        fresh,
        jnp.int32(1),
        jnp.asarray(tables),
        jnp.asarray(kv_lens),
        jnp.asarray(cu),
        {**plain, "sinks": None if sinks is None else jnp.asarray(sinks, jnp.float32)},
    )
    want = reference.paged_attention(
        q,
        owned[1],
        tables,
        kv_lens,
        cu,
        **{"sm_scale": 1 / math.sqrt(q.shape[-1]), **plain},
        sinks_H=None if sinks is None else np.asarray(sinks),
    )
    np.testing.assert_allclose(np.asarray(out, np.float64)[: cu[-1]], want[: cu[-1]], rtol=rtol, atol=rtol)
    assert not np.asarray(out)[cu[-1] :].any()  # padding queries give zeros
    np.testing.assert_array_equal(kv.unpack(after.layout, after.data), owned)  # written once each, nothing else touched


CASES = {
    "decode": ([1, 1, 1], [1, 4, 9]),
    "one row": ([1], [130]),
    "prefill": ([7], [7]),
    "chunk": ([5, 40], [21, 40]),
    "mixed": ([1, 6, 0, 1, 33], [5, 9, 0, 300, 70]),
    "block borders": ([1, 1, 1, 4, 3, 5], [3, 4, 5, 4, 4, 5]),
    "all finished": ([0, 0, 0], [0, 0, 0]),
    "idle rows keep their tokens": ([0, 1, 0], [9, 2, 8]),
    "long among short": ([1] * 9, [700, *range(1, 9)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_the_xla_backend_is_the_oracle(name, block_size):
    q_lens, kv_lens = CASES[name]
    check(make_case(0, q_lens, kv_lens, block_size=block_size, pad=2), 2)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 5},
        {"sliding_window": 150},
        {"soft_cap": 1.5},
        {"sm_scale": 0.7},
        {"sinks": [0.5, -1.0, 2.0, 0.0, 9.0, -30.0]},
        {"sliding_window": 3, "soft_cap": 2.0, "sinks": [1.0] * 6},
    ],
    ids=str,
)
def test_options(options):
    check(make_case(1, [1, 6, 0, 1, 33], [5, 9, 0, 300, 170], pad=1), 1, **options)


@pytest.mark.parametrize("heads, head_dim", [((1, 1), 4), ((1, 8), 16), ((3, 3), 64), ((4, 1), 80)])
def test_heads(heads, head_dim):
    check(make_case(2, [1, 3], [9, 12], heads=heads, head_dim=head_dim), 0)


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=1, max_size=5)


@pytest.mark.one_python
@settings(max_examples=25, deadline=None)
@given(ROWS, st.sampled_from([1, 3, 16]), st.integers(0, 3), st.sampled_from([None, 1, 7, 64]), st.integers(0, 99))
def test_any_ragged_batch(rows, block_size, pad, window, seed):
    q_lens = [q for q, _ in rows]
    pad += not sum(q_lens)  # at least one token, so that shapes are not empty
    check(
        make_case(seed, q_lens, [q + past for q, past in rows], block_size=block_size, pad=pad),
        pad,
        sliding_window=window,
    )


def test_bfloat16_within_its_rounding():
    q, data, cache, tables, kv_lens, cu = make_case(3, [1, 5], [200, 40], dtype="bfloat16")
    out, _ = paged_attention(
        jnp.asarray(q, jnp.bfloat16), None, None, cache, 1, jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    )
    rounded = np.asarray(jnp.asarray(data).astype(jnp.bfloat16), np.float32)
    q = np.asarray(jnp.asarray(q).astype(jnp.bfloat16), np.float32)
    want = reference.paged_attention(q, rounded[1], tables, kv_lens, cu, sm_scale=1 / math.sqrt(8))
    error = np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want)
    assert error < 5e-3


def test_a_decode_promise_changes_nothing():
    q, _, cache, tables, kv_lens, cu = make_case(4, [1, 0, 1], [50, 3, 130])
    args = (jnp.asarray(q), None, None, cache, 1, jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu))
    np.testing.assert_array_equal(paged_attention(*args, max_q_len=1)[0], paged_attention(*args)[0])


@pytest.mark.usefixtures("no_executable_cache")
def test_memory_does_not_grow_with_the_table():
    def temporaries(width):
        q, _, cache, tables, kv_lens, cu = make_case(5, [1] * 4, [100] * 4, width=width, spare=4)
        args = (jnp.asarray(q), None, None, cache, 1, jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu))
        return (
            jax.jit(paged_attention, static_argnames="max_q_len")
            .lower(*args)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert temporaries(8192) <= temporaries(256) * 1.05


def test_the_module_is_the_function():
    q, _, cache, tables, kv_lens, cu = make_case(6, [1, 4], [9, 4])
    arrays = (jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu))
    out, _ = PagedAttention(layer=1, soft_cap=3.0)(jnp.asarray(q), None, None, cache, *arrays)
    np.testing.assert_array_equal(out, paged_attention(jnp.asarray(q), None, None, cache, 1, *arrays, soft_cap=3.0)[0])


def test_token_rows_by_hand():
    rows = token_rows(jnp.array([5, 0, 2]), jnp.array([0, 3, 3, 4]), 6)
    assert rows.row_T.tolist() == [0, 0, 0, 2, 3, 3]
    assert rows.position_T.tolist() == [2, 3, 4, 1, 0, 0]


@pytest.mark.usefixtures("annotations_unchecked")
def test_every_misfit_is_named():
    _, _, cache, tables, kv_lens, _ = make_case(7, [1], [3])
    with pytest.raises(ValueError, match=r"k and v must both.*q\.shape.*cu_q_lens.*max_q_len.*sinks"):
        paged_attention(
            jnp.zeros((1, 5, 8)),
            jnp.zeros((1, 2, 8)),
            None,
            cache,
            0,
            jnp.asarray(tables),
            jnp.asarray(kv_lens),
            jnp.zeros(5, jnp.int32),
            sinks=jnp.zeros(2),
            max_q_len=0,
        )


def scaled(dtype):
    """A mixed batch in a cache of eight bits, and what it holds times its scales."""
    q, data, cache, tables, kv_lens, cu = make_case(11, [1, 20, 1], [70, 33, 5], head_dim=16, dtype=dtype)
    scale = np.array([[0.5, 2.0], [0.25, 1.0]], np.float32)  # of keys and values, a head each
    return q, data, cache, tables, kv_lens, cu, scale


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_eight_bits(dtype):
    q, data, cache, tables, kv_lens, cu, scale = scaled(dtype)
    owned = data[1] * scale[None, None, :, :, None]
    q = np.asarray(jnp.asarray(q).astype("bfloat16").astype("float32"))
    k, v = (x * s[None, :, None] for x, s in zip(new_rows(data, tables, kv_lens, cu, 0), scale, strict=True))
    arrays = (jnp.asarray(x) for x in (tables, kv_lens, cu))
    out, after = paged_attention(
        jnp.asarray(q, "bfloat16"), jnp.asarray(k), jnp.asarray(v), stored(cache.layout, data), 1, *arrays,
        k_scale=jnp.asarray(scale[0]), v_scale=jnp.asarray(scale[1]),
    )  # fmt: skip
    want = reference.paged_attention(q, owned, tables, kv_lens, cu, sm_scale=0.25)
    assert np.abs(np.asarray(out, np.float64) - want).max() <= 8e-3 * np.abs(want).max()
    held = np.asarray(kv.unpack(after.layout, after.data).astype("float32"))[1]
    for row, length in enumerate(kv_lens):
        for p in range(length):
            place = tables[row, p // 4], p % 4
            np.testing.assert_array_equal(held[place], owned[place] / scale[:, :, None])


def test_what_is_too_large_for_eight_bits_becomes_the_largest():
    _, _, cache, tables, _, _ = make_case(11, [1], [1], head_dim=16, dtype="float8_e4m3fn")
    huge = jnp.full((1, 2, 16), 1000.0)
    out, _ = paged_attention(
        jnp.full((1, 4, 16), 500.0), huge, -huge, cache, 1, jnp.asarray(tables), jnp.array([1]), jnp.array([0, 1])
    )
    assert (np.asarray(out) == -448).all()


def test_nan_before_the_window_is_nobodys():
    q, data, cache, tables, kv_lens, cu = make_case(8, [1, 3], [40, 60])
    data[1, tables[0, 2]] = data[1, tables[1, 1]] = np.nan
    window = 20
    out, _ = paged_attention(
        jnp.asarray(q), None, None, stored(cache.layout, data), 1, *map(jnp.asarray, (tables, kv_lens, cu)),
        sliding_window=window,
    )  # fmt: skip
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (4, 2, 0)], ids=["no tokens", "no rows", "no columns"])
@pytest.mark.parametrize(
    "backend",
    [
        "xla",
        "tpu_interpret",
        pytest.param("gpu_interpret", marks=needs_mosaic),
    ],
)
def test_empty_batches(shape, backend):
    tokens, rows, columns = shape
    layout = kv.KVLayout(1, 4, 16, 2, 64, "bfloat16", ORDERS[backend])
    cache = kv.create(layout)
    arrays = jnp.zeros((rows, columns), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros(rows + 1, jnp.int32)
    q, new = jnp.ones((tokens, 4, 64)), jnp.ones((tokens, 2, 64))
    work = prepare(layout, *arrays, num_heads=4, num_tokens=tokens, backend=backend)
    out, after = paged_attention(q, new, new, cache, 0, *arrays, backend=backend, work=work)
    assert out.shape == q.shape and not out.any() and not after.data.any()


@pytest.mark.parametrize("order", ["LCKNBD", WORDS])
def test_no_blocks_are_copied_or_moved(order):
    cache, none = kv.create(kv.KVLayout(2, 4, 16, 2, 64, "bfloat16", order)), jnp.zeros(0, jnp.int32)
    assert kv.copy_blocks(cache, none, none).data.shape == cache.data.shape
    read = kv.read_blocks(cache, none)
    assert read.shape == (0, 2, 16, 2, 2, 64) and read.dtype == jnp.bfloat16
    assert kv.write_blocks(cache, none, read).data.shape == cache.data.shape


WRONG = [
    ({"sliding_window": 0}, r"sliding_window=0 must be a whole number from 1"),
    ({"sliding_window": 4.5}, r"sliding_window=4.5 must be"),
    ({"sliding_window": 2**40}, r"sliding_window=\d+ must be"),
    ({"sliding_window": np.float32(2.9)}, r"sliding_window=.*2.9.* must be"),
    ({"sliding_window": True}, r"sliding_window=True must be"),
    ({"soft_cap": 0.0}, r"soft_cap=0.0 must be above 0.*; try None"),
    ({"soft_cap": np.float32(-1)}, r"soft_cap=.*-1.* must be above 0"),
    ({"soft_cap": 1e39}, r"soft_cap=1e\+39 must be above 0 and a finite float32"),
    ({"sm_scale": math.nan}, r"sm_scale=nan must be a finite float32; try None"),
    ({"k_scale": np.zeros(1), "v_scale": 1.0}, r"k_scale=.*0.* must be a number other than 0"),
    ({"k_scale": 1e-40, "v_scale": 1.0}, r"k_scale=1e-40 must be"),
    ({"k_scale": 0, "v_scale": 1.0}, r"k_scale=0 must be a number other than 0"),
    ({"k_scale": math.nan, "v_scale": 1.0}, r"k_scale=nan must be"),
    ({"sm_scale": np.ones(2)}, r"sm_scale.shape=\(2,\) must be \(\)"),
    ({"max_q_len": 2.0}, r"max_q_len=2.0 must be a whole number"),
    ({"q": np.ones((1, 6, 8), np.int32)}, r"q.dtype=int32 must be one of float32"),
    ({"q": np.float32(1)}, r"q.shape=\(\) must be \[T, H, 8\]"),
    ({"q": np.ones((1, 0, 8), np.float32)}, r"q.shape=\(1, 0, 8\) must be"),
    ({"order": "LNBCKD"}, r"cache.data is float32\[.*and its layout's float32\["),
    ({"sinks": [0.0] * 5}, r"sinks.shape=\(5,\) must be \[H\]"),
]


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(
    ("change", "reason"), WRONG, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_what_cannot_be_meant(change, reason):
    q, _, cache, tables, kv_lens, cu = make_case(7, [1], [3])
    change = dict(change)
    q = change.pop("q", q)
    if order := change.pop("order", None):
        cache = kv.KVCache(kv.create(dataclasses.replace(cache.layout, order=order)).data, cache.layout)
    with pytest.raises(ValueError, match=reason):
        loosely(q, None, None, cache, 0, tables, kv_lens, cu, **change)


def test_a_traced_window_is_at_least_one():
    q, _, cache, tables, kv_lens, cu = make_case(9, [1, 2], [30, 9])
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)

    @jax.jit
    def attend(window):
        return paged_attention(jnp.asarray(q), None, None, cache, 1, *arrays, sliding_window=window)[0]

    np.testing.assert_array_equal(attend(jnp.int32(-(2**31))), attend(jnp.int32(1)))


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("layer", [-1, 2, np.int32(7)])
def test_a_layer_that_there_is_not(layer):
    q, _, cache, tables, kv_lens, cu = make_case(7, [1], [3])
    with pytest.raises(ValueError, match=rf"layer=\S*{layer}\S* must be from 0 to 1"):
        loosely(jnp.asarray(q), None, None, cache, layer, tables, kv_lens, cu)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("layer", [1.5, jnp.float32(1), jnp.array([1]), True], ids=str)
def test_a_layer_that_is_no_number_of_one(layer):
    q, _, cache, tables, kv_lens, cu = make_case(7, [1], [3])
    with pytest.raises(ValueError, match=r"layer=.* must be a single whole number; try one from 0 to 1"):
        loosely(jnp.asarray(q), None, None, cache, layer, tables, kv_lens, cu)


@pytest.mark.usefixtures("annotations_unchecked")
def test_lists_will_do_and_floats_will_not():
    q, _, cache, tables, kv_lens, cu = make_case(7, [1, 1], [3, 6])
    q, lists = jnp.asarray(q), (tables.tolist(), kv_lens.tolist(), cu.tolist())
    want, _ = loosely(q, None, None, cache, 1, tables, kv_lens, cu)
    np.testing.assert_array_equal(loosely(q, None, None, cache, 1, *lists)[0], want)
    with pytest.raises(ValueError, match=r"block_tables.dtype=float32 must be integers; try block_tables.astype"):
        loosely(q, None, None, cache, 1, tables.astype(np.float32), kv_lens, cu)


def test_a_type_of_numbers_has_its_jax_name():
    with pytest.raises(ValueError, match=r"dtype='e4m3' must be one of .*'float8_e4m3fn'"):
        kv.KVLayout(1, 1, 16, 1, 64, "e4m3")


@pytest.mark.parametrize("backend", ["tpu", "gpu", "mps"])
def test_a_named_backend_never_falls_back(backend):
    with pytest.raises(ValueError, match=backend):
        resolve_backend(backend, "cpu")
