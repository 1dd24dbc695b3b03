"""Block tables against states worked by hand. N = 8 blocks of B = 4 tokens, S = 4 slots, M = 3 columns: NULL is 8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import blocks, tables
from jpaged.tables import PagedState
from tests.allocator.world import jitted

NULL = 8
fns = jitted(tables)


def i32(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def flags(*values: int) -> jax.Array:
    return jnp.array(values, jnp.bool_)


def start(*lengths: int) -> PagedState:
    """A state in which slot s has so many tokens. Blocks are taken from 0 up, slot by slot."""
    state, ok = fns.append(tables.create(8, 4, 3, 4), i32(*lengths, *[0] * (4 - len(lengths))), max_new=12)
    assert ok
    return state


def rows(state: PagedState) -> list[list[int]]:
    """The mapped part of each row of the table; the rest must be NULL."""
    return [[b for b in row if b != NULL] for row in np.asarray(state.tables_SM).tolist()]


def refs(state: PagedState) -> list[int]:
    return np.asarray(state.pool.refs_N).tolist()


def assert_same(a: PagedState, b: PagedState) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_create_names_every_bad_size_at_once():
    with pytest.raises(ValueError, match=r"num_blocks=0 must .*; max_seqs=-1 must .*; block_size=0 must .*; try"):
        tables.create(0, -1, 3, 0)


def test_create_refuses_lengths_beyond_int32():
    with pytest.raises(ValueError, match=r"max_blocks_per_seq=65536 \* block_size=32768 must be below 2\*\*31"):
        tables.create(8, 4, 2**16, 2**15)


# append


def test_append_maps_a_block_for_each_border_crossed():
    state = start(1, 0, 4, 5)
    assert rows(state) == [[0], [], [1], [2, 3]]
    state, ok = fns.append(state, i32(3, 1, 1, 6), max_new=12)  # fills its block; starts; crosses; crosses once
    assert ok
    assert rows(state) == [[0], [4], [1, 5], [2, 3, 6]]
    assert state.lengths_S.tolist() == [4, 1, 5, 11]
    assert refs(state) == [1] * 7 + [0]


def test_append_fills_a_table_and_the_pool_to_the_brim():
    state, ok = fns.append(start(12, 12), i32(0, 0, 8, 0), max_new=12)
    assert ok and rows(state) == [[0, 1, 2], [3, 4, 5], [6, 7], []] and state.pool.num_free == 0


@pytest.mark.parametrize(
    "new",
    [(0, 0, 12, 1), (1, 0, 0, 0), (0, -1, 0, 0), (0, 0, 13, 0), (0, 0, 2**31 - 1, 0)],
    ids=["out of blocks", "out of columns", "negative", "over max_new", "overflow"],
)
def test_append_refuses_and_leaves_the_state(new: tuple[int, ...]):
    state = start(12, 8)
    after, ok = fns.append(state, i32(*new), max_new=12)
    assert not ok
    assert_same(after, state)


def test_append_of_nothing_is_ok_when_the_pool_is_empty():
    state, ok = fns.append(start(12, 12, 8), i32(0, 0, 0, 0), max_new=1)
    assert ok and state.pool.num_free == 0


def test_append_refuses_a_width_of_nothing():
    with pytest.raises(ValueError, match="max_new=0 must be at least 1; try"):
        fns.append(start(), i32(0, 0, 0, 0), max_new=0)


@pytest.mark.parametrize("block_size", [1, 2, 7])
def test_the_smallest_state_there_is(block_size: int):
    state = tables.create(1, 1, 1, block_size)
    state, ok = fns.append(state, i32(block_size), max_new=block_size)
    assert ok and state.tables_SM.tolist() == [[0]]
    state, copies, ok = fns.grow(state, i32(1), max_new=1)
    assert not ok and copies.dst_S.tolist() == [1]
    state = fns.free(state, flags(1))
    assert state.tables_SM.tolist() == [[1]] and state.pool.num_free == 1


# fork, attach


def test_fork_shares_every_block():
    state, ok = fns.fork(start(6, 3), i32(0, 1, 0), i32(2, 4, 3))
    assert ok
    assert rows(state) == [[0, 1], [2], [0, 1], [0, 1]]
    assert state.lengths_S.tolist() == [6, 3, 6, 6]
    assert refs(state) == [3, 3, 1, 0, 0, 0, 0, 0]
    assert state.pool.num_free == 5


def test_fork_reads_all_sources_before_it_writes():
    state, ok = fns.fork(start(6), i32(0, 1), i32(1, 2))
    assert ok and rows(state) == [[0, 1], [0, 1], [], []]  # slot 1 was still empty


def test_fork_of_an_empty_slot_and_padding_are_no_ops():
    state = start(6)
    after, ok = fns.fork(state, i32(1, 3, 99, -1), i32(2, 3, 4, 4))
    assert ok
    assert_same(after, state)


@pytest.mark.parametrize(
    ("src", "dst"),
    [((0, 0), (2, 1)), ((0, 1), (2, 2)), ((0, -1), (2, 3)), ((0, 4), (2, 3)), ((0, 1), (2, -1)), ((0, 1), (2, 5))],
    ids=["occupied", "twice", "negative source", "no such source", "negative destination", "no such destination"],
)
def test_fork_refuses_and_leaves_the_state(src: tuple[int, ...], dst: tuple[int, ...]):
    state = start(6, 3)
    after, ok = fns.fork(state, i32(*src), i32(*dst))
    assert not ok
    assert_same(after, state)


def test_permute_shares_what_goes_on_and_frees_what_does_not():
    state = start(6, 6)
    state, ok = fns.permute(state, i32(0, 1), i32(1, 1))
    assert ok and rows(state) == [[2, 3], [2, 3], [], []]
    assert refs(state) == [0, 0, 2, 2, 0, 0, 0, 0] and state.pool.num_free == 6


def test_permute_reads_all_sources_before_it_writes():
    state, ok = fns.permute(start(6, 6), i32(0, 1, 4), i32(1, 0, -7))
    assert ok and rows(state) == [[2, 3], [0, 1], [], []]
    assert refs(state) == [1, 1, 1, 1, 0, 0, 0, 0] and state.pool.num_free == 4


@pytest.mark.parametrize(
    ("dst", "src"),
    [((0, 2), (1, 0)), ((0, 0), (1, 0)), ((0, -1), (1, 0)), ((0, 5), (1, 0)), ((0, 1), (1, -1)), ((0, 1), (1, 4))],
    ids=["other length", "twice", "negative destination", "no such destination", "negative source", "no such source"],
)
def test_permute_refuses_and_leaves_the_state(dst: tuple[int, ...], src: tuple[int, ...]):
    state = start(6, 6, 3)
    after, ok = fns.permute(state, i32(*dst), i32(*src))
    assert not ok
    assert_same(after, state)


def test_attach_starts_slots_from_live_full_blocks():
    state = start(9)  # blocks 0, 1 full, 2 partial
    ids = jnp.array([[0, 1, NULL], [0, NULL, NULL], [7, -5, 99]], jnp.int32)
    state, ok = fns.attach(state, i32(3, 1, 4), ids, i32(8, 4, -1))
    assert ok
    assert rows(state) == [[0, 1, 2], [0], [], [0, 1]]
    assert state.lengths_S.tolist() == [9, 4, 0, 8]
    assert refs(state) == [3, 2, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("dst", "row", "length"),
    [
        (0, (0, 1, NULL), 8),
        (1, (0, 3, NULL), 8),
        (1, (0, -7, NULL), 8),
        (1, (0, NULL, 1), 8),
        (1, (0, 1, NULL), 4),
        (1, (0, 1, NULL), 12),
        (1, (0, 1, NULL), 7),
        (1, (0, 1, 2), 16),
        (1, (NULL, NULL, NULL), -4),
        (-3, (0, 1, NULL), 8),
        (5, (0, 1, NULL), 8),
    ],
    ids=[
        "occupied",
        "dead block",
        "negative id",
        "gap",
        "more ids than length",
        "fewer ids than length",
        "partial block",
        "longer than a table",
        "negative length",
        "negative slot",
        "no such slot",
    ],
)
def test_attach_refuses_and_leaves_the_state(dst: int, row: tuple[int, ...], length: int):
    state = start(9)
    ids = jnp.array([[0, NULL, NULL], row], jnp.int32)
    after, ok = fns.attach(state, i32(2, dst), ids, i32(4, length))
    assert not ok
    assert_same(after, state)


def test_attach_refuses_one_destination_twice():
    state = start(9)
    after, ok = fns.attach(state, i32(2, 2), jnp.array([[0, NULL, NULL]] * 2, jnp.int32), i32(4, 4))
    assert not ok
    assert_same(after, state)


# truncate, free


def test_truncate_releases_whole_blocks_only():
    state, ok = fns.truncate(start(9, 8, 5), i32(8, 5, 0, 0))  # 0 1 2 | 3 4 | 5 6
    assert ok
    assert rows(state) == [[0, 1], [3, 4], [], []]
    assert state.lengths_S.tolist() == [8, 5, 0, 0]
    assert refs(state) == [1, 1, 0, 1, 1, 0, 0, 0]
    assert state.pool.num_free == 4


@pytest.mark.parametrize("lengths", [(10, 0, 0, 0), (-1, 0, 0, 0), (0, 1, 0, 0)], ids=["grow", "negative", "empty"])
def test_truncate_refuses_and_leaves_the_state(lengths: tuple[int, ...]):
    state = start(9)
    after, ok = fns.truncate(state, i32(*lengths))
    assert not ok
    assert_same(after, state)


def test_free_leaves_what_a_twin_still_holds():
    state, _ = fns.fork(start(6, 2), i32(0), i32(3))
    state = fns.free(state, flags(1, 1, 1, 0))
    assert rows(state) == [[], [], [], [0, 1]]
    assert state.lengths_S.tolist() == [0, 0, 0, 6]
    assert refs(state) == [1, 1, 0, 0, 0, 0, 0, 0]


def test_twins_that_leave_together_free_their_blocks_once():
    state, _ = fns.fork(start(6), i32(0), i32(3))
    state = fns.free(state, flags(1, 0, 0, 1))
    assert refs(state) == [0] * 8
    assert sorted(np.asarray(state.pool.free_N).tolist()) == list(range(8)) and state.pool.num_free == 8


# copy_on_write


def triplets() -> PagedState:
    """Slots 0, 2 and 3 share the full block 0 and the partial block 1; slot 1 has block 2 to itself."""
    state, ok = fns.fork(start(6, 3), i32(0, 0), i32(2, 3))
    assert ok
    return state


def test_when_every_holder_writes_the_last_keeps_the_original():
    state, copies, ok = fns.copy_on_write(triplets(), flags(1, 1, 1, 1))
    assert ok
    assert copies.src_S.tolist() == [1, NULL, 1, NULL]
    assert copies.dst_S.tolist() == [3, NULL, 4, NULL]
    assert rows(state) == [[0, 3], [2], [0, 4], [0, 1]]
    assert refs(state) == [3, 1, 1, 1, 1, 0, 0, 0]


def test_when_somebody_only_reads_every_writer_copies():
    state, copies, ok = fns.copy_on_write(triplets(), flags(0, 0, 1, 1))
    assert ok
    assert copies.src_S.tolist() == [NULL, NULL, 1, 1]
    assert copies.dst_S.tolist() == [NULL, NULL, 3, 4]
    assert rows(state) == [[0, 1], [2], [0, 3], [0, 4]]


def test_writers_of_different_blocks_are_ranked_apart():
    state, _ = fns.fork(start(6, 3), i32(0, 1), i32(2, 3))
    state, copies, ok = fns.copy_on_write(state, flags(1, 1, 1, 1))
    assert ok
    assert copies.src_S.tolist() == [1, 2, NULL, NULL]
    assert copies.dst_S.tolist() == [3, 4, NULL, NULL]


def test_a_full_last_block_is_not_written_and_not_copied():
    state, _ = fns.fork(start(8, 12), i32(0, 1), i32(2, 3))  # slots 1 and 3 have no column left either
    after, copies, ok = fns.copy_on_write(state, flags(1, 1, 1, 1))
    assert ok and (np.asarray(copies.dst_S) == NULL).all()
    assert_same(after, state)


def test_a_shared_block_that_truncation_made_partial_is_copied():
    state, _ = fns.fork(start(8), i32(0), i32(1))
    state, _ = fns.truncate(state, i32(8, 6, 0, 0))
    state, copies, ok = fns.copy_on_write(state, flags(0, 1, 0, 0))
    assert ok and copies.src_S.tolist()[1] == 1 and rows(state)[:2] == [[0, 1], [0, 2]]


def test_copy_on_write_refuses_when_the_pool_cannot_serve_every_writer():
    state = triplets()
    pool, _, _ = blocks.take(state.pool, i32(4), width=4)  # one is left, two are needed
    state = state.replace(pool=pool)
    after, copies, ok = fns.copy_on_write(state, flags(1, 0, 1, 1))
    assert not ok and (np.asarray(copies.src_S) == NULL).all() and (np.asarray(copies.dst_S) == NULL).all()
    assert_same(after, state)


def test_a_thousand_writers_of_one_block():
    num_slots = 1025
    state = tables.create(num_slots, num_slots, 1, 4)
    state, _ = fns.append(state, jnp.zeros(num_slots, jnp.int32).at[0].set(1), max_new=1)
    twins = jnp.arange(1, num_slots, dtype=jnp.int32)
    state, ok = fns.fork(state, jnp.zeros_like(twins), twins)
    assert ok
    state, copies, ok = fns.copy_on_write(state, jnp.ones(num_slots, jnp.bool_))
    assert ok
    assert np.asarray(copies.src_S).tolist() == [0] * 1024 + [num_slots]
    assert np.asarray(copies.dst_S).tolist() == [*range(1, 1025), num_slots]
    assert (np.asarray(state.pool.refs_N) == 1).all()


# slots


def test_slots_names_a_block_and_an_offset():
    block, offset = fns.slots(start(6, 3), i32(0, 0, 0, 1, 1), i32(0, 3, 5, 0, 2))
    assert block.tolist() == [0, 0, 1, 2, 2]
    assert offset.tolist() == [0, 3, 1, 0, 2]


@pytest.mark.parametrize(
    ("seq", "pos"), [(0, 6), (0, 7), (0, 8), (0, 2**31 - 1), (0, -1), (2, 0), (4, 0), (-4, 0), (2**31 - 1, 0)], ids=str
)
def test_slots_has_no_place_for_a_token_that_does_not_exist(seq: int, pos: int):
    block, offset = fns.slots(start(6, 3), i32(seq), i32(pos))
    assert block.tolist() == [NULL] and offset.tolist() == [0]
