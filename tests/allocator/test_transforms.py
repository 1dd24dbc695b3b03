"""The allocator under JAX's transformations: traced once, mapped, looped, donated, and compiled without a loop."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import blocks, tables
from jpaged.tables import PagedState
from tests.allocator.world import COMPILE_FAST

SLOTS = 4


def small() -> PagedState:
    state, ok = tables.append(tables.create(12, SLOTS, 4, 2), jnp.array([3, 2, 0, 0], jnp.int32), max_new=3)
    assert ok
    return state


def i32(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def flags(*values: int) -> jax.Array:
    return jnp.array(values, jnp.bool_)


def plan(**commands):
    return jax.tree.map(
        jnp.asarray, tables.idle_plan(small(), keeps=2, drops=2, attaches=2, forks=2).replace(**commands)
    )


ROWS = jnp.full((2, 4), 12, jnp.int32)

# Each function, and arguments of one shape but different meaning: something, nothing, and a fault if it can have one.
CALLS: dict[str, tuple[Callable, list[tuple]]] = {
    "take": (lambda s, n: blocks.take(s.pool, n, 2), [(i32(1, 2, 0, 0),), (i32(0, 0, 0, 0),), (i32(-1, 0, 0, 0),)]),
    "retain": (lambda s, ids: blocks.retain(s.pool, ids), [(i32(0, 1),), (i32(12, 12),), (i32(11, -1),)]),
    "release": (lambda s, ids: blocks.release(s.pool, ids), [(i32(0, 1),), (i32(12, 12),), (i32(0, 0),)]),
    "append": (lambda s, n: tables.append(s, n, 3), [(i32(1, 2, 3, 0),), (i32(0, 0, 0, 0),), (i32(0, 0, 0, 4),)]),
    "grow": (lambda s, n: tables.grow(s, n, 3), [(i32(1, 2, 3, 0),), (i32(0, 0, 0, 0),), (i32(0, 0, 0, 4),)]),
    "fork": (tables.fork, [(i32(0, 1), i32(2, 3)), (i32(0, 0), i32(4, 4)), (i32(0, 0), i32(1, 2))]),
    "permute": (tables.permute, [(i32(0, 2), i32(0, 3)), (i32(4, 4), i32(0, 9)), (i32(0, 0), i32(0, 0))]),
    "attach": (
        tables.attach,
        [
            (i32(2, 4), ROWS.at[0, 0].set(0), i32(2, 0)),
            (i32(4, 4), ROWS, i32(0, 0)),
            (i32(2, 2), ROWS.at[0, 0].set(9), i32(2, 0)),
        ],
    ),
    "truncate": (tables.truncate, [(i32(1, 0, 0, 0),), (i32(3, 2, 0, 0),), (i32(3, 3, 0, 0),)]),
    "free": (tables.free, [(flags(1, 0, 0, 0),), (flags(0, 0, 0, 0),), (flags(1, 1, 1, 1),)]),
    "copy_on_write": (tables.copy_on_write, [(flags(1, 0, 0, 0),), (flags(0, 0, 0, 0),), (flags(1, 1, 1, 1),)]),
    "slots": (tables.slots, [(i32(0, 1), i32(2, 0)), (i32(4, 4), i32(0, 0)), (i32(-1, 9), i32(9, -1))]),
    "apply": (
        lambda s, p: tables.apply(s, p, 3),
        [
            (plan(keep=i32(0, 12), fork_src=i32(0, 4), fork_dst=i32(3, 4), new_S=i32(1, 0, 1, 1)),),
            (plan(),),
            (plan(free_S=flags(0, 1, 0, 0), drop=i32(3, 12), new_S=i32(0, -1, 0, 0)),),
        ],
    ),
}
EACH = pytest.mark.parametrize(("function", "calls"), CALLS.values(), ids=CALLS.keys())


def hlo(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None and "\nENTRY " in text
    return text


def assert_equal(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@EACH
def test_traced_once_and_the_same_as_without_jit(function: Callable, calls: list[tuple]):
    traces = []

    def counted(*args):
        traces.append(args)
        return function(*args)

    jitted = jax.jit(counted, compiler_options=COMPILE_FAST)
    state = small()
    for args in calls:
        assert_equal(jitted(state, *args), function(state, *args))
    assert len(traces) == 1


@EACH
def test_mapped_over_replicas_each_is_as_if_alone(function: Callable, calls: list[tuple]):
    alone = [function(small(), *args) for args in calls]
    states, *args = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[(small(), *args) for args in calls])
    together = jax.jit(jax.vmap(function), compiler_options=COMPILE_FAST)(states, *args)
    assert_equal(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))


@EACH
def test_integers_stay_int32_where_jax_would_have_64_bits(function: Callable, calls: list[tuple]):
    expected = jax.eval_shape(function, small(), *calls[0])
    with jax.enable_x64(True):
        found = jax.eval_shape(function, small(), *calls[0])
    assert found == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(expected)} <= {np.dtype(np.int32), np.dtype(np.bool_)}


@pytest.mark.usefixtures("no_executable_cache")
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("grow", "apply")])  # made of the others
def test_compiled_without_a_loop(name: str):
    function, calls = CALLS[name]
    assert " while(" not in hlo(jax.jit(function).lower(small(), *calls[0]).compile())


def test_scan_appends_as_single_steps_do():
    def step(state: PagedState, new_S: jax.Array):
        return tables.append(state, new_S, 1)

    new = jnp.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], jnp.int32)
    last, ok = jax.jit(lambda state: jax.lax.scan(step, state, new))(small())
    assert ok.all()
    assert last.lengths_S.tolist() == [6, 4, 1, 0]
    # Slot 0 had blocks 0 and 1, slot 1 block 2. Step by step: 3 for slot 1; 4 and 5 for slots 0 and 2.
    assert last.tables_SM.tolist() == [[0, 1, 4, 12], [2, 3, 12, 12], [5, 12, 12, 12], [12, 12, 12, 12]]


def test_while_loop_leaves_at_the_first_step_that_does_not_fit_with_the_state_intact():
    def step(carry):
        state, steps, _ = carry
        state, _, ok = tables.grow(state, jnp.ones(2, jnp.int32), 1)
        return state, steps + ok.astype(jnp.int32), ok

    start = (tables.create(5, 2, 8, 2), jnp.int32(0), jnp.asarray(True))
    state, steps, ok = jax.jit(lambda carry: jax.lax.while_loop(lambda c: c[2], step, carry))(start)
    # Two blocks in steps 1 and 3; step 5 needs two and one is left.
    assert not ok and steps == 4
    assert state.lengths_S.tolist() == [4, 4] and state.pool.num_free == 1
    assert (state.pool.refs_N == 1).sum() == 4


@pytest.mark.usefixtures("no_executable_cache")
def test_append_updates_a_large_donated_state_in_place():
    state = jax.eval_shape(lambda: tables.create(65_536, 512, 128, 16))
    new = jax.ShapeDtypeStruct((512,), jnp.int32)
    compiled = jax.jit(lambda s, n: tables.append(s, n, 1), donate_argnums=0).lower(state, new).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.size * 4 for leaf in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < 65_536  # less than a byte a block
    assert " while(" not in hlo(compiled)


@pytest.mark.usefixtures("no_executable_cache")
def test_release_of_nothing_skips_the_work():
    pool = jax.eval_shape(lambda: blocks.create(65_536))
    ids = jax.ShapeDtypeStruct((512, 128), jnp.int32)
    text = hlo(jax.jit(blocks.release).lower(pool, ids).compile())
    entry = text[text.index("\nENTRY ") :]
    assert " conditional(" in entry
    assert " scatter(" not in entry
