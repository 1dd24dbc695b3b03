"""Times of what the host does in each step, and of the allocator's functions on the device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import tables
from jpaged.config import SamplingParams
from jpaged.llm import LLM
from jpaged.model import LoadedModel, ModelSpec
from jpaged.tables import PagedState
from jpaged.tokenizer import Tokenizer

from .instant import InstantSteps

PROMPT_LEN = 16
BLOCK_SIZE = 16


class _NoModel:
    """As much of a `Model` as an engine needs whose steps never run."""

    spec = ModelSpec("nothing", num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=258, max_model_len=4096)


def step_seconds(slots: int, decode_steps: int, output_len: int, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Host seconds of a dispatch: "decode" with all slots decoding, "admit" with sequences starting.

    A dispatch is scheduled, packed into a plan, sent, and the one before is read and handed to its requests. Medians.

    Args:
      slots: Sequences at once, and requests.
      decode_steps: Of one dispatch.
      output_len: Tokens of each request.
      tokenizer: None leaves text out.
    """
    model: Any = _NoModel()
    loaded = LoadedModel(model, {"nothing": jnp.zeros(1)}, tokenizer, None)
    most = PROMPT_LEN + output_len
    llm = LLM(loaded, dtype="float32", max_num_seqs=slots, max_model_len=most, decode_steps=decode_steps)
    engine = llm.engine
    steps: Any = InstantSteps(engine, output_len)
    engine.steps = steps
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    for request in llm.make_requests([[1] * PROMPT_LEN] * slots, params):
        engine.add(request)
    found: dict[str, list[float]] = {"decode": [], "admit": []}
    while engine.has_work:
        begin, before = time.perf_counter(), steps.seconds
        changed = engine.step()
        seconds = time.perf_counter() - begin - (steps.seconds - before)
        if not steps.decoded:
            found["admit"].append(seconds)
        elif len(changed) == slots:
            found["decode"].append(seconds)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def allocator_seconds(num_blocks: int, slots: int, repeats: int) -> dict[str, float]:
    """Seconds of the allocator's functions, called alone with all slots taking part; medians.

    Every sequence crosses a block border in each `append` and `grow`, and every block comes back in `free`.
    """
    columns = num_blocks // slots
    every_S = jnp.full(slots, BLOCK_SIZE, jnp.int32)
    full = _jitted(functools.partial(tables.append, max_new=columns * BLOCK_SIZE))
    empty = _jitted(lambda: tables.create(num_blocks, slots, columns, BLOCK_SIZE))
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


def _jitted(run: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(run)
