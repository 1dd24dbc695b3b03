"""The oracle against hand arithmetic, and the xla backend against the oracle with everything unowned poisoned."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import cache as kv
from jpaged.attention import PagedAttention, paged_attention, resolve_backend, token_rows
from pallas_kernels import reference
from tests.attention.batches import make_case, new_rows, stored


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
    with pytest.raises(ValueError, match=r"k and v must both.*q\.shape.*cu_q_lens.*sinks.*max_q_len"):
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


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("layer", [-1, 2, np.int32(7)])
def test_a_layer_that_there_is_not(layer):
    q, _, cache, tables, kv_lens, cu = make_case(7, [1], [3])
    with pytest.raises(ValueError, match=rf"layer=\S*{layer}\S* must be from 0 to 1"):
        paged_attention(jnp.asarray(q), None, None, cache, layer, tables, kv_lens, cu)


@pytest.mark.usefixtures("annotations_unchecked")
def test_lists_will_do_and_floats_will_not():
    q, _, cache, tables, kv_lens, cu = make_case(7, [1, 1], [3, 6])
    q, lists = jnp.asarray(q), (tables.tolist(), kv_lens.tolist(), cu.tolist())
    want, _ = paged_attention(q, None, None, cache, 1, tables, kv_lens, cu)
    np.testing.assert_array_equal(paged_attention(q, None, None, cache, 1, *lists)[0], want)
    with pytest.raises(ValueError, match=r"block_tables.dtype=float32 must be integers; try block_tables.astype"):
        paged_attention(q, None, None, cache, 1, tables.astype(np.float32), kv_lens, cu)


def test_a_type_of_numbers_has_its_jax_name():
    with pytest.raises(ValueError, match=r"dtype='e4m3' must be the name.*try one of .*float8_e4m3fn"):
        kv.KVLayout(1, 1, 16, 1, 64, "e4m3")


@pytest.mark.parametrize("backend", ["tpu", "gpu", "gpu_interpret", "mps"])
def test_a_named_backend_never_falls_back(backend):
    with pytest.raises(ValueError, match=backend):
        resolve_backend(backend, "cpu")
