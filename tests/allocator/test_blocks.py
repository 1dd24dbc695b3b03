"""The block pool against states worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import blocks, tables
from jpaged.blocks import BlockPool
from tests.allocator.world import jitted

fns = jitted(tables)


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def pool(free: list[int], refs: list[int]) -> BlockPool:
    """A pool whose stack holds ``free`` under stale entries that must never be read."""
    stale = [-9] * (len(refs) - len(free))
    return BlockPool(ids(*free, *stale), jnp.int32(len(free)), ids(*refs))


def stack(pool: BlockPool) -> list[int]:
    return np.asarray(pool.free_N)[: int(pool.num_free)].tolist()


def refs(pool: BlockPool) -> list[int]:
    return np.asarray(pool.refs_N).tolist()


def assert_same(a: BlockPool, b: BlockPool) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_create_has_every_block_free_and_block_zero_on_top():
    new = blocks.create(4)
    assert stack(new) == [3, 2, 1, 0]
    assert refs(new) == [0, 0, 0, 0]
    assert new.null == 4


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31 - 1])
def test_create_refuses_a_size_whose_null_is_no_int32(num_blocks: int):
    with pytest.raises(ValueError, match=rf"num_blocks={num_blocks} must be in \[1, 2\*\*31 - 2\]; try"):
        blocks.create(num_blocks)


def test_take_gives_each_row_its_slice_of_the_stack_from_the_top():
    before = pool([5, 3, 1, 0, 4], refs=[0, 0, 2, 0, 0, 0])
    after, taken, ok = fns.take(before, ids(1, 0, 2), width=3)
    assert ok
    assert taken.tolist() == [[4, 6, 6], [6, 6, 6], [0, 1, 6]]
    assert stack(after) == [5, 3]
    assert refs(after) == [1, 1, 2, 0, 1, 0]


def test_take_may_empty_the_pool():
    after, taken, ok = fns.take(blocks.create(3), ids(3), width=3)
    assert ok and taken.tolist() == [[0, 1, 2]] and stack(after) == []


@pytest.mark.parametrize(
    "counts",
    [(2, 2), (4, 0), (-1, 1), (3, -3), (2**31 - 1, 2**31 - 1)],
    ids=["one too many", "over the width", "negative", "negative that would balance", "overflow"],
)
def test_take_refuses_all_or_serves_all(counts: tuple[int, int]):
    before = blocks.create(3)
    after, taken, ok = fns.take(before, ids(*counts), width=3)
    assert not ok
    assert (np.asarray(taken) == before.null).all()
    assert_same(after, before)


@pytest.mark.parametrize("width", [0, 2**30])
def test_take_refuses_a_width_that_no_table_could_hold(width: int):
    with pytest.raises(ValueError, match=rf"width={width} must be at least 1, and times 2 rows fit an int32; try"):
        fns.take(blocks.create(3), ids(0, 0), width)


def test_retain_counts_duplicates_and_ignores_null():
    before = pool([0], refs=[0, 1, 2])
    after, ok = fns.retain(before, ids(1, 3, 2, 1))
    assert ok and refs(after) == [0, 3, 3] and stack(after) == [0]


@pytest.mark.parametrize("bad", [0, -1, 4], ids=["free", "negative", "past NULL"])
def test_retain_refuses_what_is_not_live(bad: int):
    before = pool([0], refs=[0, 1, 2])
    after, ok = fns.retain(before, ids(1, bad))
    assert not ok
    assert_same(after, before)


def test_release_frees_a_block_with_its_last_reference_once():
    before = pool([0], refs=[0, 1, 3, 2])
    after, ok = fns.release(before, jnp.array([[3, 4, 2], [3, 1, 4]], jnp.int32))
    assert ok
    assert refs(after) == [0, 0, 2, 0]
    assert stack(after) == [0, 1, 3]


def test_a_released_block_is_the_next_to_be_taken():
    full, _, _ = fns.take(blocks.create(3), ids(3), width=3)
    one_free, _ = fns.release(full, ids(1))
    _, taken, ok = fns.take(one_free, ids(1), width=1)
    assert ok and taken.tolist() == [[1]]


@pytest.mark.parametrize(
    "bad", [(0, 4), (1, 1), (-1, 4), (5, 4)], ids=["free", "more often than held", "negative", "past NULL"]
)
def test_release_refuses_what_nobody_holds(bad: tuple[int, int]):
    before = pool([0], refs=[0, 1, 3, 2])
    after, ok = fns.release(before, ids(2, *bad))
    assert not ok
    assert_same(after, before)


@pytest.mark.parametrize("change", [fns.retain, fns.release], ids=["retain", "release"])
@pytest.mark.parametrize("nothing", [(), (3, 3)], ids=["no ids", "only NULL"])
def test_nothing_to_do_is_ok(change, nothing: tuple[int, ...]):
    before = pool([0], refs=[0, 1, 2])
    after, ok = change(before, ids(*nothing))
    assert ok
    assert_same(after, before)


def test_is_live():
    live = blocks.is_live(pool([0], refs=[0, 1, 2]), ids(0, 1, 2, 3, -1, 4, -7))
    assert live.tolist() == [False, True, True, False, False, False, False]
