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
from .batches import Batch

_LEAST_SECONDS = 0.2  # of what is timed at once
_MOST_STEPS = 1000
_COPY_BYTES = 1 << 31  # more than a cache of any device keeps a part of
_COPY_BYTES_OF_CPUS = 1 << 28


def step_seconds(who: Attends, batch: Batch, repeats: int) -> tuple[list[float], Any, Any]:
    """Seconds of a step, repeat by repeat, and the first step's results and memory."""

    @functools.partial(jax.jit, donate_argnums=1)
    def once(tokens, memory, given):
        q, k, v = tokens
        return who.step(q, k, v, memory, given)

    @functools.partial(jax.jit, donate_argnums=1)
    def many(tokens, memory, given, count):
        def one(_, carry):
            (q, k, v), memory = carry
            out, memory = who.step(q, k, v, memory, given)
            # Each step's tokens are a little other ones, so that no part of a step can be left out or done once.
            return tuple(
                x + jnp.asarray(1e-6, x.dtype) * out[:, : x.shape[1]].astype(x.dtype) for x in (q, k, v)
            ), memory

        return lax.fori_loop(0, count, one, (tokens, memory))

    tokens = batch.q_THD, batch.k_TKD, batch.v_TKD
    out, memory = jax.block_until_ready(once(tokens, who.memory, who.given))
    kept = jax.tree.map(jnp.copy, (out, memory))

    def timed(memory: Any, count: int) -> tuple[float, Any]:
        began = time.perf_counter()
        _, memory = jax.block_until_ready(many(tokens, memory, who.given, jnp.int32(count)))
        return time.perf_counter() - began, memory

    _, memory = timed(memory, 1)  # compiles
    count = 1
    while count < _MOST_STEPS:
        seconds, memory = timed(memory, count)
        if seconds >= _LEAST_SECONDS:
            break
        count = min(_MOST_STEPS, max(2 * count, int(count * _LEAST_SECONDS / max(seconds, 1e-6))))
    found = []
    for _ in range(repeats):
        seconds, memory = timed(memory, count)
        found.append(seconds / count)
    return found, *kept


def copy_bytes_per_second(repeats: int) -> float:
    """The best rate at which the device reads and writes its memory; every byte counts twice."""

    @functools.partial(jax.jit, donate_argnums=0)
    def many(x, count):
        return lax.fori_loop(0, count, lambda _, x: x + 1, x)

    size = _COPY_BYTES_OF_CPUS if jax.default_backend() == "cpu" else _COPY_BYTES
    x, best, count = jnp.zeros(size // 4, jnp.int32), 0.0, 8
    x = jax.block_until_ready(many(x, jnp.int32(1)))
    for _ in range(max(3, repeats)):
        began = time.perf_counter()
        x = jax.block_until_ready(many(x, jnp.int32(count)))
        best = max(best, 2 * size * count / (time.perf_counter() - began))
    return best
