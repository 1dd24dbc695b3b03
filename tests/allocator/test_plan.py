"""Plans against states worked by hand. N = 6 blocks of B = 2 tokens, S = 3 slots, M = 3 columns: NULL is 6."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import tables
from jpaged.tables import Copies, MemoryPlan, PagedState
from tests.allocator.world import jitted

NULL = 6
fns = jitted(tables)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def start() -> PagedState:
    """Slot 0 has 5 tokens in blocks 0, 1, 2; slot 1 has 1 token in block 3; blocks 4 and 5 are free."""
    state, ok = fns.append(tables.create(6, 3, 3, 2), jnp.array([5, 1, 0], jnp.int32), max_new=6)
    assert ok
    return state


def plan(**commands: np.ndarray) -> MemoryPlan:
    idle = tables.idle_plan(start(), keeps=2, drops=2, attaches=2, forks=2)
    return idle.replace(**commands)


def rows(state: PagedState) -> list[list[int]]:
    return [[b for b in row if b != NULL] for row in np.asarray(state.tables_SM).tolist()]


def refs(state: PagedState) -> list[int]:
    return np.asarray(state.pool.refs_N).tolist()


def assert_refused(before: PagedState, after: PagedState, copies: Copies, ok: jax.Array) -> None:
    assert not ok
    assert (np.asarray(copies.src_S) == NULL).all() and (np.asarray(copies.dst_S) == NULL).all()
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("length", [0, 2])
def test_an_idle_plan_does_nothing(length: int):
    state = start()
    idle = tables.idle_plan(state, keeps=length, drops=length, attaches=length, forks=length)
    after, copies, ok = fns.apply(state, idle, max_new=6)
    assert ok
    assert_refused(state, after, copies, ~ok)


def test_an_idle_plan_is_the_hosts_to_fill_in():
    idle = tables.idle_plan(start(), keeps=1)
    idle.keep[0] = 3
    idle.free_S[1] = True
    state, _, ok = fns.apply(start(), idle, max_new=6)
    assert ok and refs(state) == [1, 1, 1, 1, 0, 0] and rows(state)[1] == []


def test_keep_precedes_free():
    state, _, ok = fns.apply(start(), plan(keep=i32(0, 1), free_S=np.array([True, False, False])), max_new=6)
    assert ok
    assert rows(state) == [[], [3], []]
    assert refs(state) == [1, 1, 0, 1, 0, 0]  # block 2 was partial: the cache does not want it
    assert state.pool.num_free == 3


def test_a_plan_may_seat_a_sequence_in_the_slot_and_the_blocks_that_it_frees():
    state, copies, ok = fns.apply(
        start(),
        plan(
            keep=i32(0, NULL),
            free_S=np.array([True, False, False]),
            attach_dst=i32(0, 3),
            attach_ids=np.array([[0, NULL, NULL], [NULL] * 3], np.int32),
            attach_lengths=i32(2, 0),
            fork_src=i32(0, 3),
            fork_dst=i32(2, 3),
            new_S=i32(3, 0, 4),
        ),
        max_new=6,
    )
    assert ok
    assert state.lengths_S.tolist() == [5, 1, 6]
    assert state.pool.num_free == 0
    assert refs(state) == [3, 1, 1, 1, 1, 1]  # block 0: the cache, slot 0 and slot 2
    assert (np.asarray(copies.dst_S) == NULL).all()  # block 0 is full: nobody writes to it


def test_a_fork_and_the_writes_that_part_the_twins():
    state, copies, ok = fns.apply(start(), plan(fork_src=i32(0, 3), fork_dst=i32(2, 3), new_S=i32(1, 0, 1)), max_new=1)
    assert ok
    assert rows(state) == [[0, 1, 4], [3], [0, 1, 2]]
    assert copies.src_S.tolist() == [2, NULL, NULL]
    assert copies.dst_S.tolist() == [4, NULL, NULL]
    assert state.lengths_S.tolist() == [6, 1, 6]


def test_eviction_makes_room_for_growth():
    cached, _, ok = fns.apply(start(), plan(keep=i32(0, 1), free_S=np.array([True, False, False])), max_new=6)
    assert ok and cached.pool.num_free == 3
    grown = i32(0, 5, 6)  # 2 blocks and 3 blocks
    after, copies, ok = fns.apply(cached, plan(new_S=grown), max_new=6)
    assert_refused(cached, after, copies, ok)
    after, copies, ok = fns.apply(cached, plan(drop=i32(0, 1), new_S=grown), max_new=6)
    assert ok and after.pool.num_free == 0 and rows(after)[0] == []


def test_what_a_plan_evicts_it_cannot_attach():
    cached, _, _ = fns.apply(start(), plan(keep=i32(0, 1), free_S=np.array([True, False, False])), max_new=6)
    hit = plan(
        attach_dst=i32(2, 3), attach_ids=np.array([[0, NULL, NULL], [NULL] * 3], np.int32), attach_lengths=i32(2, 0)
    )
    after, _, ok = fns.apply(cached, hit, max_new=6)
    assert ok and rows(after)[2] == [0]
    after, copies, ok = fns.apply(cached, hit.replace(drop=i32(NULL, 0)), max_new=6)
    assert_refused(cached, after, copies, ok)


FINE = {
    "keep": i32(0, NULL),
    "free_S": np.array([False, True, False]),
    "drop": i32(NULL, NULL),
    "fork_src": i32(0, 3),
    "fork_dst": i32(2, 3),
    "new_S": i32(1, 0, 0),
}


@pytest.mark.parametrize(
    "fault",
    [
        {"keep": i32(0, 5)},
        {"drop": i32(5, NULL)},
        {"drop": i32(2, 2)},
        {"attach_dst": i32(0, 3)},
        {"attach_dst": i32(2, 3)},
        {"fork_dst": i32(0, 3)},
        {"new_S": i32(2, 0, 0)},
        {"new_S": i32(1, 0, -1)},
        {"new_S": i32(1, 6, 2)},
    ],
    ids=[
        "keeps a free block",
        "drops a free block",
        "drops more references than there are",
        "attaches to an occupied slot",
        "seats two in one slot",
        "forks onto its source",
        "outgrows a table",
        "shrinks",
        "runs out of blocks",
    ],
)
def test_one_fault_refuses_the_whole_plan(fault: dict[str, np.ndarray]):
    state = start()
    # A copy, a kept block, a fork and a freed slot: much that would have to be undone.
    attach = {"attach_ids": np.array([[0, NULL, NULL], [NULL] * 3], np.int32), "attach_lengths": i32(2, 0)}
    _, copies, ok = fns.apply(state, plan(**FINE, **attach), max_new=6)
    assert ok and copies.dst_S.tolist() != [NULL] * 3
    after, copies, ok = fns.apply(state, plan(**{**FINE, **attach, **fault}), max_new=6)
    assert_refused(state, after, copies, ok)
