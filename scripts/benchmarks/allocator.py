"""Times of the allocator's functions on the device, each called alone. It knows no engine."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import tables
from jpaged.tables import PagedState

BLOCK_SIZE = 16


def call_seconds(num_blocks: int, slots: int, repeats: int) -> dict[str, float]:
    """Seconds of each function with all slots taking part; medians.

    Every sequence crosses a block border in each `append` and `grow`, and every block comes back in `free`.

    Args:
      num_blocks: Blocks of the pool, at least two a slot.
      slots: Sequences.
      repeats: Calls of each function.
    """
    columns = num_blocks // slots
    every_S = jnp.full(slots, BLOCK_SIZE, jnp.int32)
    full = jax.jit(functools.partial(tables.append, max_new=columns * BLOCK_SIZE))
    empty = jax.jit(lambda: tables.create(num_blocks, slots, columns, BLOCK_SIZE))
    plan = tables.idle_plan(empty()).replace(new_S=every_S)

    def filled() -> PagedState:
        return full(empty(), every_S * (columns - 1))[0]

    def border() -> PagedState:
        return full(empty(), every_S)[0]

    timed: dict[str, tuple[Callable[..., Any], Callable[[], PagedState], tuple]] = {
        "append": (functools.partial(tables.append, max_new=BLOCK_SIZE), border, (every_S,)),
        "grow": (functools.partial(tables.grow, max_new=BLOCK_SIZE), border, (every_S,)),
        "apply": (functools.partial(tables.apply, max_new=BLOCK_SIZE), border, (plan,)),
        "copy_on_write": (tables.copy_on_write, border, (every_S > 0,)),
        "free": (tables.free, filled, (every_S > 0,)),
    }
    return {
        name: _median(jax.jit(run, donate_argnums=0), state, args, repeats)
        for name, (run, state, args) in timed.items()
    }


def _median(run: Callable[..., Any], state: Callable[[], PagedState], args: tuple, repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):  # the first compiles
        donated = jax.block_until_ready(state())
        begin = time.perf_counter()
        jax.block_until_ready(run(donated, *args))
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
