"""How long a step takes on this device, and how fast the device copies: steps in a loop on the device, so that no
dispatch is in the figure."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .attending import Attends

_LEAST_SECONDS = 0.2  # of what is timed at once
_MOST_STEPS = 1000
_COPY_BYTES = 1 << 28


def step_seconds(who: Attends, q: Any, repeats: int) -> tuple[list[float], Any, Any]:
    """Seconds of a step, repeat by repeat, and the first step's results and memory."""

    @functools.partial(jax.jit, donate_argnums=1)
    def once(q, memory):
        return who.step(q, memory)

    @functools.partial(jax.jit, donate_argnums=1)
    def many(q, memory, count):
        def one(_, carry):
            q, memory = carry
            out, memory = who.step(q, memory)
            return q + jnp.asarray(1e-6, q.dtype) * out, memory  # so that no step can be left out

        return lax.fori_loop(0, count, one, (q, memory))

    out, memory = jax.block_until_ready(once(q, who.memory))
    kept = jax.tree.map(jnp.copy, (out, memory))
    _, memory = jax.block_until_ready(many(q, memory, jnp.int32(1)))  # compiles
    count = 1
    while count < _MOST_STEPS:
        seconds, memory = _timed(many, q, memory, count)
        if seconds >= _LEAST_SECONDS:
            break
        count = min(_MOST_STEPS, max(2 * count, int(count * _LEAST_SECONDS / max(seconds, 1e-6))))
    found = []
    for _ in range(repeats):
        seconds, memory = _timed(many, q, memory, count)
        found.append(seconds / count)
    return found, *kept


def _timed(many: Any, q: Any, memory: Any, count: int) -> tuple[float, Any]:
    began = time.perf_counter()
    _, memory = jax.block_until_ready(many(q, memory, jnp.int32(count)))
    return time.perf_counter() - began, memory


def copy_bytes_per_second(repeats: int) -> float:
    """The best rate at which the device reads and writes its memory; every byte counts twice."""

    @functools.partial(jax.jit, donate_argnums=0)
    def many(x, count):
        return lax.fori_loop(0, count, lambda _, x: x + 1, x)

    x, best, count = jnp.zeros(_COPY_BYTES // 4, jnp.int32), 0.0, 8
    x = jax.block_until_ready(many(x, jnp.int32(1)))
    for _ in range(max(3, repeats)):
        began = time.perf_counter()
        x = jax.block_until_ready(many(x, jnp.int32(count)))
        best = max(best, 2 * _COPY_BYTES * count / (time.perf_counter() - began))
    return best
