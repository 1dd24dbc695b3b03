"""The GPU kernels against the oracle, in JAX's GPU interpreter: races are errors, and memory that nobody has written is
NaN, in the cache as in shared memory.

The interpreter runs the kernel as Hopper has it, with one thing put in for another: `plgpu.mma`, of which it knows
nothing, and `plgpu.wgmma` of weights in registers, are `jnp.dot`. What Ampere and Ada do otherwise (cp.async and its
waits) it cannot run; docs/gpu.md says so.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import cache as kv
from jpaged.attention import paged_attention
from jpaged.cache import HEADS
from pallas_kernels import tuning
from pallas_kernels.gpu import attention, chips, eighths, fetching, mosaic, spans
from pallas_kernels.gpu.copy import copy_blocks
from pallas_kernels.gpu.form import Form
from pallas_kernels.gpu.tiling import Rows, Tiling
from tests.attention import checking
from tests.attention.batches import make_case, stored
from tests.attention.checking import DECODE, MIXED
from tests.marks import needs_mosaic

pytestmark = needs_mosaic

SHORT = Tiling(chunk=32, stages=2, splits=2)  # so that a hundred tokens are several chunks
WHOLE = dataclasses.replace(SHORT, splits=1)
TOGETHER = Tiling(chunk=64, stages=2, splits=2)  # with which the products of 64 rows are wgmma's


@pytest.fixture(autouse=True)
def races_are_errors(monkeypatch):
    monkeypatch.setattr(attention, "interpreter", lambda: mosaic.plgpu.InterpretGPUParams(detect_races=True))


def check(case, *, tiling: Tiling | None = SHORT, **options):
    checking.check(case, backend="gpu_interpret", tiling=tiling, **options)


def make(q_lens, kv_lens, *, heads=(2, 4), head_dim=64, block_size=16, dtype="bfloat16", **more):
    sizes = {"heads": heads, "head_dim": head_dim, "block_size": block_size}
    return make_case(5, q_lens, kv_lens, **sizes, dtype=dtype, order=HEADS, **more)


LATER = pytest.mark.every_setting


@pytest.mark.parametrize("tiling", [SHORT, pytest.param(WHOLE, marks=LATER)], ids=["splits", "whole"])
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, tiling):
    check(make(*DECODE[name]), max_q_len=1, tiling=tiling)


@pytest.mark.parametrize("tiling", [SHORT, WHOLE], ids=["splits", "whole"])
def test_decode_with_padding(tiling):
    """Padding after rows with sinks, which alone make no result."""
    check(make([1, 0, 1], [70, 7, 33], pad=3), pad=3, max_q_len=1, tiling=tiling, sinks=np.linspace(-1, 2, 8))


@pytest.mark.parametrize("tiling", [SHORT, WHOLE], ids=["splits", "whole"])
def test_an_infinite_sink_leaves_nothing(tiling):
    """Of rows with tokens, and of padding: zeros, and not infinity less itself."""
    q, _, cache, tables, kv_lens, cu = make([1, 0, 1], [70, 7, 33], pad=2)
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    sinks = jnp.full(q.shape[1], jnp.inf)
    with tuning.trying(tiling):
        out, _ = paged_attention(
            jnp.asarray(q), None, None, cache, 1, *arrays, sinks=sinks, max_q_len=1, backend="gpu_interpret"
        )
    np.testing.assert_array_equal(out, np.zeros_like(out))


@pytest.mark.parametrize("tiling", [SHORT, WHOLE], ids=["splits", "whole"])
def test_padding_gives_zeros_whatever_the_scales(tiling):
    q, _, cache, tables, kv_lens, cu = make([1, 0, 1], [70, 7, 33], pad=2, dtype="int8")
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    scales = {"k_scale": jnp.float32(1), "v_scale": jnp.float32(1e9)}
    with tuning.trying(tiling):
        out, _ = paged_attention(
            jnp.asarray(q), None, None, cache, 1, *arrays, **scales, max_q_len=1, backend="gpu_interpret"
        )
    assert np.isfinite(np.asarray(out)).all() and not np.asarray(out)[cu[-1] :].any()


@pytest.mark.parametrize("max_q_len", [1, 40])
def test_as_the_rule_cuts(max_q_len):
    check(make([max_q_len, 1, 1], [400, 129, 16], pad=1), pad=1, max_q_len=max_q_len, tiling=None)


@pytest.mark.parametrize("tiling", [pytest.param(SHORT, marks=LATER), WHOLE], ids=["splits", "whole"])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 40},
        {"soft_cap": 2.0, "sinks": np.linspace(-1, 2, 8)},
        {"soft_cap": 1e6},
        {"sliding_window": 5, "sm_scale": 0.3, "sinks": np.linspace(2, -1, 8)},
        {"writes": False},
    ],
    ids=lambda options: ",".join(options),
)
def test_decode_options(options, tiling):
    check(make([1, 1, 0, 1], [200, 33, 7, 129]), max_q_len=1, tiling=tiling, **options)


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        pytest.param((8, 4), 64, marks=LATER),
        ((1, 4), 80),
        ((1, 3), 96),
        pytest.param((2, 7), 128, marks=LATER),
        pytest.param((2, 2), 192, marks=LATER),
        ((1, 1), 256),
        pytest.param((1, 20), 128, marks=LATER),
    ],
)
@pytest.mark.parametrize("tiling", [pytest.param(SHORT, marks=LATER), TOGETHER], ids=["by warp", "by warpgroup"])
def test_heads(heads, head_dim, tiling):
    check(make([20, 1, 1], [90, 70, 33], heads=heads, head_dim=head_dim), tiling=tiling)


@pytest.mark.parametrize("block_size", [8, 32, 64, 256])
def test_block_sizes(block_size):
    check(make([1, 1, 12], [300, block_size, 40], block_size=block_size))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_dtypes(dtype):
    scales = None if dtype == "float16" else [[0.5, 2.0], [0.25, 1.0]]
    check(make([1, 20, 0, 1], [100, 85, 7, 33], dtype=dtype, pad=3), pad=3, scales=scales, tiling=TOGETHER)


@pytest.mark.parametrize("chip", [chips.GPUS["A100"], chips.GPUS["H200"]], ids=lambda chip: chip.name)
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_number_of_eight_bits(dtype, wide, chip):
    numbers = jnp.arange(256, dtype=jnp.uint8).view(dtype)
    found = np.asarray(eighths.converted(numbers, jnp.dtype(wide), chip).astype(jnp.float32))
    np.testing.assert_array_equal(found, np.asarray(numbers.astype(jnp.float32)))


@pytest.mark.parametrize("max_q_len", [1, 20])
def test_nan_stays_in_its_row(max_q_len):
    case = make([max_q_len] * 2, [40, 70], heads=(1, 4))
    checking.check_nan_stays(case, backend="gpu_interpret", tiling=TOGETHER, max_q_len=max_q_len)


class Ref:
    """Stands for an array in memory, and knows which part of it is meant."""

    def __init__(self, *index):
        self.index = index

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return Ref(*self.index, index)


def moves(chip, *, chunks, stages=2):
    """The copies of a program on a chip, of which nothing is done: what is ordered is listed, with `Moves` itself."""
    rows, heads, blocks = Rows(1, 4, 64), 2, 9
    tiling = Tiling(64, stages)
    form = Form("", rows, tiling, chip, heads, 16, blocks, soft_cap=False, tree=False)
    tables = np.array([[5, 3, 7, 2, 1, *[blocks] * 99], [blocks] * 104], np.int32)
    smem: dict[str, Any] = {name: Ref() for name in ("q_smem", "k_smem", "v_smem", "k_there", "v_there")}
    span = spans.Span(row=0, end=70, count=1, start=69, oldest=0, limit=70, first=0, chunks=chunks)
    return fetching.Moves(form, Ref(), tables, 1, 1, span, smem)


@pytest.fixture
def ordered(monkeypatch):
    """What copies and waits are ordered: of each copy what it brings, of each wait how many may be on their way."""
    return list_orders(monkeypatch)


def list_orders(patch):
    found: list[Any] = []
    patch.setattr(fetching.pl, "loop", lambda start, stop: lambda body: [body(n) for n in range(start, int(stop))])
    patch.setattr(mosaic._Mosaic, "copy_gmem_to_smem", lambda _, there, *__, **___: found.append(there), False)
    patch.setattr(mosaic._Mosaic, "wait_gmem_to_smem", lambda _, left: found.append(left), False)
    return found


def check_bounds(chip, ordered):
    """Every block that is fetched is one of the row's: cp.async knows no bounds, and masks hide what it brought."""
    program = moves(chip, chunks=2)
    program.fetch(jnp.int32(0))
    program.fetch(jnp.int32(1))
    ids = [(int(there.index[0]) - 9 * 2 * 2) // (2 * 2) for there in ordered]
    assert ids == [5, 5, 3, 3, 7, 7, 2, 2, *[1] * 8]


@pytest.mark.parametrize("chip", ["A100", "H200"])
def test_no_copy_reads_what_a_row_does_not_own(chip, ordered):
    check_bounds(chips.GPUS[chip], ordered)


def check_waits(stages, chunks, ordered):
    """With cp.async a chunk's copies are done when it is read, and a slot is filled behind a wait for all threads."""
    program = moves(chips.GPUS["A100"], chunks=chunks, stages=stages)
    queries = Ref("queries")
    program.begin(queries)
    assert ordered[0] is queries, "queries are not there with the first chunk"
    ordered.pop(0)
    each = len(ordered) // min(chunks, stages - 1)
    done = 0
    for nth in range(chunks):
        before = len(ordered)
        program.turn(nth)
        turn = ordered[before:]
        assert isinstance(turn[0], int), "a copy stands before the wait"
        assert sum(isinstance(event, int) for event in turn) == 1
        issued = sum(isinstance(event, Ref) for event in ordered[:before])
        done = max(done, issued - turn[0])
        assert done >= each * (nth + 1), "a chunk is read that is not there"
        assert len(turn) - 1 == (each if nth + stages - 1 < chunks else 0)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_without_tma_chunks_are_waited_for(stages, chunks, ordered):
    check_waits(stages, chunks, ordered)


@pytest.mark.parametrize(("max_q_len", "tiling"), [(1, WHOLE), (5, WHOLE), (12, TOGETHER)])
def test_nan_before_the_window_is_nobodys(max_q_len, tiling):
    q, data, cache, tables, kv_lens, cu = make([1, max_q_len], [40, 56 + max_q_len])
    data[1, tables[0, 0]] = data[1, tables[1, 1]] = np.nan
    rows = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    with tuning.trying(tiling):
        out, _ = paged_attention(
            jnp.asarray(q), None, None, stored(cache.layout, data), 1, *rows, max_q_len=max_q_len,
            sliding_window=20, backend="gpu_interpret",
        )  # fmt: skip
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("most", [1, pytest.param(4, marks=LATER), 20])
def test_rows_that_contradict_themselves_give_zeros(most):
    """More queries than promised, than tokens, or more tokens than the table holds."""
    found, _, cache, tables, kv_lens, cu = make([1, 2, 5, 1], [20, 9, 5, 40])
    kv_lens[1], kv_lens[3] = 1, 16 * tables.shape[1] + 1
    new = jnp.ones((9, 2, 64))
    arrays = jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(cu)
    with tuning.trying(SHORT):
        out, after = paged_attention(
            jnp.asarray(found), new, new, cache, 1, *arrays, backend="gpu_interpret", max_q_len=most
        )
    there = np.asarray(out).any(axis=(1, 2))
    assert there.tolist() == [True, False, False, *[most == 20] * 5, False] and np.isfinite(np.asarray(out)).all()
    before, now = (np.asarray(kv.unpack(cache.layout, x.data).astype(jnp.float32)) for x in (cache, after))
    for row in (1, 3):
        np.testing.assert_array_equal(now[:, tables[row, 0]], before[:, tables[row, 0]])


@pytest.mark.parametrize("tiling", [pytest.param(SHORT, marks=LATER), TOGETHER], ids=["by warp", "by warpgroup"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=LATER) if name == "chunks" else name for name in MIXED])
def test_mixed(name, tiling):
    check(make(*MIXED[name], pad=2), pad=2, hoisted=True, tiling=tiling)


@pytest.mark.parametrize(
    "tiling",
    [WHOLE, pytest.param(dataclasses.replace(TOGETHER, splits=1), marks=LATER)],
    ids=["by warp", "by warpgroup"],
)
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 30}, {"soft_cap": 3.0, "sinks": np.linspace(-1, 2, 8)}, {"writes": False}],
    ids=lambda options: ",".join(options),
)
def test_mixed_options(options, tiling):
    check(make([40, 1, 9], [200, 33, 150]), tiling=tiling, **options)


@pytest.mark.parametrize("writes", [True, False])
def test_a_few_queries_a_row(writes):
    check(make([3, 8, 1, 0, 5], [70, 8, 129, 5, 131]), max_q_len=8, writes=writes)


def tree_of(q_lens, most, kind):
    """Which queries of its row each query sees: the first and itself, all before it, all, or as chance will."""
    if kind == "any":
        tree = np.random.default_rng(3).random((sum(q_lens), most)) < 0.5
    else:
        tree = np.zeros((sum(q_lens), most), bool)
    for t, nth in enumerate(n for q_len in q_lens for n in range(q_len)):
        tree[t] |= {"star": np.arange(most) == 0, "all": np.ones(most, bool)}.get(kind, np.zeros(most, bool))
        tree[t, nth] = True
    return tree


@pytest.mark.parametrize("options", [{}, {"sliding_window": 2}, {"sliding_window": 30}], ids=str)
@pytest.mark.parametrize("kind", ["star", pytest.param("all", marks=LATER), "any"])
def test_a_tree_of_tokens(kind, options):
    """Own tokens on both sides of a chunk's border, for items that have all of a row's queries and that have some."""
    for heads, most in (((2, 4), 4), ((1, 16), 8)):
        q_lens = [most, 2, most - 1]
        tree = tree_of(q_lens, most, kind)
        check(make(q_lens, [130, 20, 32 + most - 3], heads=heads), max_q_len=most, tree=tree, **options)


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(64, 3, 4),
        pytest.param(Tiling(64, 4), marks=LATER),
        Tiling(128, 2, 3),
        pytest.param(Tiling(32, 4, 9), marks=LATER),
    ],
    ids=["three stages", "four stages", "long chunks", "many splits"],
)
def test_tilings(tiling):
    check(make([1, 1, 0, 1, 1], [300, 33, 9, 128, 1]), max_q_len=1, tiling=tiling)


@LATER
@settings(max_examples=8)
@given(st.data())
def test_any_batch(data):
    rows = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 150)), min_size=1, max_size=4))
    options = {"sliding_window": data.draw(st.sampled_from([None, 1, 17, 100]))}
    options = {name: value for name, value in options.items() if value is not None}
    check(make([q for q, _ in rows], [q + n for q, n in rows], pad=1), pad=1, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_copies(dtype):
    layout = kv.KVLayout(2, 9, 8, 1, 64, dtype, HEADS)
    data = jax.random.randint(jax.random.key(0), layout.shape, -99, 99).astype(dtype)
    src, dst = jnp.array([3, 0, 8, 5], jnp.int32), jnp.array([1, 9, 2, 9], jnp.int32)
    with mosaic.described(chips.INTERPRETED.kind):
        found = copy_blocks(data, src, dst, interpret=attention.interpreter())
    np.testing.assert_array_equal(found, kv.copy_blocks(kv.KVCache(data, layout), src, dst).data)
