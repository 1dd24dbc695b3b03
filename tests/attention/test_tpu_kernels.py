"""The TPU kernels against the oracle, in JAX's TPU interpreter: races are errors, and memory that nobody has written is
NaN, in the cache as in VMEM."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged import cache as kv
from jpaged.attention import paged_attention
from jpaged.cache import WORDS
from pallas_kernels.tpu import chips, eighths, words
from pallas_kernels.tpu.copy import copy_blocks
from pallas_kernels.tpu.tiling import Tiling
from tests.attention import checking
from tests.attention.batches import make_case
from tests.attention.checking import DECODE, MIXED

SHORT = Tiling(chunk=128, items=1, buffers=2, lanes=128, rows=64)  # so that a few hundred tokens are several chunks
STRICT = any(field.name == "on_race" for field in dataclasses.fields(pltpu.InterpretParams))  # newer JAX raises


@pytest.fixture(autouse=True)
def races_are_errors(monkeypatch):
    monkeypatch.setattr(chips, "interpreter", lambda: pltpu.InterpretParams(detect_races=True))
    yield
    if not STRICT:
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        assert not getattr(interpret_pallas_call.races, "races_found", False)


def check(case, *, tiling=SHORT, **options):
    tiling = dataclasses.replace(tiling, chunk=max(tiling.chunk, case[2].layout.block_size))
    checking.check(case, backend="tpu_interpret", tiling=tiling, **options)


def make(q_lens, kv_lens, *, heads=(2, 4), head_dim=128, block_size=16, **more):
    return make_case(5, q_lens, kv_lens, heads=heads, head_dim=head_dim, block_size=block_size, order=WORDS, **more)


@pytest.mark.parametrize("name", DECODE)
def test_decode(name):
    check(make(*DECODE[name]), max_q_len=1)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 40},
        {"soft_cap": 2.0, "sinks": np.linspace(-1, 2, 8)},
        {"sliding_window": 5, "sm_scale": 0.3, "sinks": np.linspace(2, -1, 8)},
        {"writes": False},
    ],
    ids=lambda options: ",".join(options),
)
def test_decode_options(options):
    check(make([1, 1, 0, 1], [200, 33, 7, 129]), max_q_len=1, **options)


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        ((8, 4), 64),
        ((1, 4), 64),
        ((1, 2), 80),
        ((4, 3), 96),
        ((2, 2), 192),
        ((2, 1), 256),
        ((3, 5), 128),
        ((1, 8), 128),
    ],
)
@pytest.mark.one_python
def test_heads(heads, head_dim):
    check(make([20, 1, 1], [140, 130, 33], heads=heads, head_dim=head_dim))


@pytest.mark.parametrize("block_size", [8, 32, 64, 256])
@pytest.mark.every_setting
def test_block_sizes(block_size):
    check(make([1, 1, 12], [300, block_size, 40], block_size=block_size, head_dim=64))


@pytest.mark.parametrize(
    ("dtype", "block_size"), [("bfloat16", 8), ("bfloat16", 16), ("float8_e4m3fn", 32), ("int8", 32)]
)
def test_dtypes(dtype, block_size):
    scales = None if dtype == "bfloat16" else [[0.5, 2.0], [0.25, 1.0]]
    case = make([1, 1, 1], [200, 33, 64], dtype=dtype, block_size=block_size)
    check(case, max_q_len=1, scales=scales)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int8"])
@pytest.mark.one_python
def test_dtypes_in_a_mixed_batch(dtype):
    scales = None if dtype == "bfloat16" else [[0.5, 2.0], [0.25, 1.0]]
    check(make([1, 40, 0, 1], [200, 45, 7, 33], dtype=dtype, block_size=32, pad=3), pad=3, scales=scales)


def check_nan_stays(max_q_len):
    case = make([max_q_len] * 2, [40, 70], heads=(1, 4))
    checking.check_nan_stays(case, backend="tpu_interpret", tiling=SHORT, max_q_len=max_q_len)


@pytest.mark.parametrize("max_q_len", [1, 20])
def test_nan_stays_in_its_row(max_q_len):
    check_nan_stays(max_q_len)


@pytest.mark.parametrize("name", MIXED)
def test_mixed(name):
    check(make(*MIXED[name], pad=2, head_dim=64), pad=2, hoisted=True)


@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 30}, {"soft_cap": 3.0, "sinks": np.linspace(-1, 2, 8)}, {"writes": False}],
    ids=lambda options: ",".join(options),
)
@pytest.mark.one_python
def test_mixed_options(options):
    check(make([40, 1, 9], [200, 33, 150], head_dim=64), **options)


@pytest.mark.parametrize("writes", [True, False])
def test_a_few_queries_a_row(writes):
    check(make([3, 8, 1, 0, 5], [70, 8, 129, 5, 131]), max_q_len=8, writes=writes)


def test_a_tree_of_tokens():
    tree = np.zeros((9, 4), bool)
    for t, seen in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0], [0, 1, 2], [0], [1], [0, 1, 2]]):
        tree[t, seen] = True
    tree[5] = [True, True, False, False]
    check(make([4, 2, 3], [130, 20, 40]), max_q_len=4, tree=tree)


@pytest.mark.parametrize(
    "tiling",
    [
        dataclasses.replace(SHORT, items=3),
        dataclasses.replace(SHORT, items=2, buffers=4, early=0.3, staged=False),
        dataclasses.replace(SHORT, chunk=256, lanes=256, early=0.0),
        dataclasses.replace(SHORT, groups=1),
        dataclasses.replace(SHORT, groups=2, items=2),
    ],
    ids=["three at once", "four buffers", "longer chunks", "group by group", "two groups at once"],
)
@pytest.mark.every_setting
def test_tilings(tiling):
    check(make([1, 1, 0, 1, 1, 1], [300, 33, 9, 128, 1, 257], heads=(8, 4)), max_q_len=1, tiling=tiling)


def check_turns():
    """Four head groups in two turns, two rows at once, whose blocks the turns share out unevenly."""
    tiling = dataclasses.replace(SHORT, groups=2, items=2)
    check(make([1, 1, 1], [300, 128, 33], heads=(8, 4)), max_q_len=1, tiling=tiling)


def test_group_by_group():
    check_turns()


def test_groups_that_leave_some_out_are_refused():
    with pytest.raises(ValueError, match="groups=3 must divide the 4 head groups"):
        dataclasses.replace(SHORT, groups=3).turns(4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_python
def test_a_few_queries_group_by_group(dtype):
    tiling = dataclasses.replace(SHORT, groups=1)
    case = make([3, 8, 1], [70, 8, 129], heads=(4, 4), dtype=dtype)
    check(case, max_q_len=8, tiling=tiling, sliding_window=50)


def test_float32_in_parts_shorter_than_a_register():
    """And whose last is shorter than the others."""
    tiling = dataclasses.replace(SHORT, part=48)
    check(make([1, 1, 0], [300, 33, 9], dtype="float32"), max_q_len=1, tiling=tiling)


def test_one_product_for_all_lanes_of_a_group():
    """Heads of 80 lie on 640 lanes, which no matrix unit takes at once; the compiler adds up what it takes in parts."""
    check(make([1, 1], [300, 33], heads=(8, 1), head_dim=80), max_q_len=1, tiling=dataclasses.replace(SHORT, lanes=640))


@pytest.fixture
def by_hand(monkeypatch):
    """A chip whose compiler has no conversion of eight-bit numbers."""
    chip = dataclasses.replace(chips.INTERPRETED, converts=False)
    monkeypatch.setattr("pallas_kernels.tpu.attention.INTERPRETED", chip)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_eight_bits_by_hand(dtype, by_hand):
    scales = [[0.5, 2.0], [0.25, 1.0]]
    check(make([1, 1], [300, 33], dtype=dtype, block_size=32), max_q_len=1, scales=scales, sliding_window=200)


@pytest.mark.one_python
def test_eight_bits_by_hand_in_a_mixed_batch(by_hand):
    check(make([1, 40], [200, 45], dtype="int8", block_size=32), scales=[[0.5, 2.0], [0.25, 1.0]], soft_cap=20.0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_number_of_eight_bits(dtype):
    numbers = np.arange(256, dtype=np.uint8)
    tokens = np.stack([np.roll(numbers, shift).reshape(2, 128) for shift in (0, 3, 77, 200)], axis=1).reshape(8, 128)
    stored_8X = jnp.asarray(tokens).view(dtype)

    def convert(given, out):
        out[...] = eighths.to_bfloat16(given[...], dtype)

    shape = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    found = pl.pallas_call(convert, out_shape=shape, interpret=chips.interpreter())(words.to_words(stored_8X))
    order = np.arange(8).reshape(2, 2, 2).transpose(1, 0, 2).reshape(-1)  # the low halves of both words come first
    want = np.asarray(stored_8X.astype(jnp.float32))[order]
    np.testing.assert_array_equal(np.asarray(found.astype(jnp.float32)), np.where(np.isfinite(want), want, np.nan))


@pytest.mark.parametrize("chunk", [128, 256, 1024])
def test_the_order_of_eight_bits(chunk):
    place, starts = eighths.places(jnp.arange(128, dtype=jnp.int32), chunk)
    found = np.concatenate([np.asarray(place) + start for start in starts])
    np.testing.assert_array_equal(found, np.arange(chunk).reshape(-1, 2, 2).transpose(1, 0, 2).reshape(-1))


@pytest.mark.one_python
def test_two_cores(monkeypatch):
    two = dataclasses.replace(chips.INTERPRETED, cores=2)
    monkeypatch.setattr("pallas_kernels.tpu.attention.INTERPRETED", two)
    parallel = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    monkeypatch.setattr(chips, "interpreter", lambda: parallel)
    check(make([1, 1, 1, 1], [200, 33, 70, 5]), max_q_len=1)
    check(make([40, 1, 9], [200, 33, 9]))


@pytest.mark.every_setting
@settings(max_examples=12)
@given(st.data())
def test_any_batch(data):
    rows = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 150)), min_size=1, max_size=5))
    q_lens = [min(q, q + n) for q, n in rows]
    kv_lens = [q + n for q, n in rows]
    options = {"sliding_window": data.draw(st.sampled_from([None, 1, 17, 100]))}
    options = {name: value for name, value in options.items() if value is not None}
    check(make(q_lens, kv_lens, head_dim=64, pad=1), pad=1, **options)


def test_copies():
    layout = kv.KVLayout(3, 9, 16, 2, 64, "bfloat16", WORDS)
    cache = kv.KVCache(jax.random.randint(jax.random.key(0), layout.shape, 0, 2**30, jnp.int32), layout)
    src, dst = jnp.array([3, 0, 8, 5], jnp.int32), jnp.array([1, 9, 2, 9], jnp.int32)
    found = copy_blocks(cache.data, src, dst, interpret=chips.interpreter())
    np.testing.assert_array_equal(found, kv.copy_blocks(cache, src, dst).data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int8"])
def test_words_hold_what_is_packed(dtype):
    layout = kv.KVLayout(2, 3, 8, 3, 24, dtype, WORDS)
    blocks = jnp.arange(2 * 3 * 8 * 2 * 3 * 24).reshape(layout.canonical_shape).astype(dtype)
    data = kv.pack(layout, blocks)
    assert data.shape == layout.shape and data.dtype == jnp.int32
    np.testing.assert_array_equal(kv.unpack(layout, data).astype(jnp.float32), blocks.astype(jnp.float32))
    assert layout.bytes_per_block * 3 == data.nbytes


def test_a_word_by_hand():
    layout = kv.KVLayout(1, 1, 8, 1, 64, "bfloat16", WORDS)
    blocks = jnp.zeros(layout.canonical_shape, "bfloat16").at[0, 0, 2, 0, 0, 5].set(1.0).at[0, 0, 3, 0, 0, 5].set(-2.0)
    assert kv.pack(layout, blocks)[0, 0, 1, 5] == np.int32(np.uint32(0xC0003F80).view(np.int32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 12}, "block_size=12 must be a power of two"),
        ({"block_size": 8, "dtype": "int8"}, "block_size=8 must be a power of two from 16"),
        ({"block_size": 512}, "to 256"),
    ],
)
def test_what_the_kernels_do_not_serve(change, reason):
    layout = kv.KVLayout(**{"num_layers": 1, "num_blocks": 2, "block_size": 16, "num_kv_heads": 2, "head_dim": 64,
                            "dtype": "bfloat16", "order": WORDS, **change})  # fmt: skip
    q = jnp.zeros((1, 2, 64), "bfloat16")
    with pytest.raises(ValueError, match=reason):
        paged_attention(
            q, None, None, kv.create(layout), 0, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32),
            jnp.arange(2, dtype=jnp.int32), backend="tpu_interpret",
        )  # fmt: skip
