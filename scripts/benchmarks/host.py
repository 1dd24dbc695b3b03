"""Times of what the host does in each step. No step runs on a device."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax.numpy as jnp

from jpaged.config import EngineConfig, SamplingParams
from jpaged.engine import MAX_ADMISSIONS
from jpaged.llm import LLM
from jpaged.model import LoadedModel, ModelSpec
from jpaged.tokenizer import Tokenizer

from .instant import InstantSteps

PROMPT_LEN = 16
MOST_TOKENS = 2**24  # of all sequences together, prompts included: the engine has arrays for them on the device


class _NoModel:
    """As much of a `Model` as an engine needs whose steps never run. Nobody fills its KV, so that is small."""

    def __init__(self, max_model_len: int):
        self.spec = ModelSpec(
            "nothing",
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            vocab_size=258,
            max_model_len=max_model_len,
        )


def output_lens(slots: int, decode_steps: int) -> tuple[int, int]:
    """The least and the most tokens of a request with which `step_seconds` has something to time.

    Few start in a step, and whoever has started gets a token a step. Once the last has begun, the first must still have
    tokens to go for two dispatches: one is timed, and meanwhile the other is read.
    """
    admissions = -(-slots // MAX_ADMISSIONS)
    return admissions + decode_steps + 1, MOST_TOKENS // slots - PROMPT_LEN


def step_seconds(slots: int, decode_steps: int, output_len: int, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Host seconds of a dispatch: "decode" with all slots decoding, "admit" with sequences starting. Medians.

    A dispatch is scheduled and packed into a plan, and the tokens of the one before are handed to its requests.

    Args:
      slots: Sequences at once, and requests.
      decode_steps: Of one dispatch.
      output_len: Tokens of each request; see `output_lens`.
      tokenizer: None leaves text out.
    """
    model: Any = _NoModel(PROMPT_LEN + output_len)
    loaded = LoadedModel(model, {"nothing": jnp.zeros(1)}, tokenizer, None)
    # Room for those that run and for those that start, so that no prompt has to be taken in chunks.
    tokens = max(EngineConfig.max_num_batched_tokens, slots + MAX_ADMISSIONS * PROMPT_LEN)
    llm = LLM(
        loaded,
        dtype="float32",
        max_num_seqs=slots,
        max_num_batched_tokens=tokens,
        decode_steps=decode_steps,
    )
    engine = llm.engine
    steps: Any = InstantSteps(engine, output_len)
    engine.steps = steps
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    engine.add(*llm.make_requests([[1] * PROMPT_LEN] * slots, params))
    found: dict[str, list[float]] = {"decode": [], "admit": []}
    changed: list[Any] = []
    # Not to the end: at idle the engine compares its books with a pool that was never used.
    while not any(sample.finish_reason for sample in changed):
        known, answering = len(steps.plans), steps.seconds
        begin = time.perf_counter()
        changed = engine.step()
        seconds = time.perf_counter() - begin - (steps.seconds - answering)
        if len(steps.plans) == known:  # nothing was dispatched, only read
            continue
        kind, rows = steps.plans[-1]
        if kind == "prefill":
            found["admit"].append(seconds)
        elif steps.plans[-2][0] == "decode" and rows == len(changed) == slots:
            found["decode"].append(seconds)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}
