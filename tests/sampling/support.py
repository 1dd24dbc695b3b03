"""Rows of settings and small batches for the tests. `sampling` is the package under test, or a mutant of it."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig, SamplingParams

CONFIG = EngineConfig(
    max_logprobs=5, max_stop_token_ids=4, max_logit_bias=4, max_bad_words=3, max_bad_word_tokens=3, max_model_len=64
)

# Every batch is filled up to this shape, so that a sampler compiles once. The vocabulary is no multiple of a block.
ROWS, VOCAB, POSITIONS = 256, 160, 16


@functools.cache
def jitted(sampling: ModuleType) -> Callable:
    return jax.jit(sampling.sample, static_argnames="vocab_limit")


def layout(sampling: ModuleType) -> Any:
    return sampling.RowLayout.of(CONFIG, VOCAB)


def rows(sampling: ModuleType, params: list[SamplingParams], **settings: list) -> Any:
    """A row for each of `params`. Settings not given: seed r, no stop ids, no bad words, a prompt of 2 tokens."""
    count = len(params)
    packed = [
        sampling.pack_row(
            layout(sampling),
            params[r],
            index=settings.get("index", [0] * count)[r],
            seed=settings.get("seed", range(count))[r],
            prompt_len=settings.get("prompt_len", [2] * count)[r],
            max_tokens=settings.get("max_tokens", [16] * count)[r],
            stop_ids=settings.get("stop_ids", [()] * count)[r],
            bad_words=settings.get("bad_words", [()] * count)[r],
        )
        for r in range(count)
    ]
    return layout(sampling).unpack(np.stack(packed))


def many(sampling: ModuleType, params: SamplingParams, seeds: np.ndarray) -> Any:
    """The same row for each of the seeds, which are below 2**32."""
    one = rows(sampling, [params])
    spread = jax.tree.map(lambda x: jnp.repeat(x, len(seeds), axis=0), one)
    return spread.replace(
        seed_R2=jnp.stack([jnp.zeros(len(seeds), jnp.uint32), jnp.asarray(seeds, jnp.uint32)], axis=1)
    )


def sample(
    sampling: ModuleType,
    logits_RV: Any,
    rows: Any,
    histories: list[list[int]] | None = None,
    vocab_limit: int = VOCAB,
) -> Any:
    """One step for at most ROWS rows, in NumPy. The vocabulary is filled up with -inf.

    Histories are lists of tokens, by default the prompt [0, 0]; what lies past their ends is nonsense.
    """
    logits_RV = np.asarray(logits_RV, np.float32)
    count, size = logits_RV.shape
    padded_RV = np.full((ROWS, VOCAB), -np.inf, np.float32)
    padded_RV[:count, :size] = logits_RV
    padded_RV[count:, 0] = 0
    history_RP = np.full((ROWS, POSITIONS), 1, np.int32)
    lengths_R = np.zeros(ROWS, np.int32)
    for r, history in enumerate(histories or [[0, 0]] * count):
        history_RP[r, : len(history)] = history
        lengths_R[r] = len(history)
    padded = sampling.gather(rows, jnp.minimum(jnp.arange(ROWS), count))  # past the end: neutral rows
    result = jitted(sampling)(padded_RV, padded, history_RP, lengths_R, vocab_limit=vocab_limit)
    return jax.tree.map(lambda x: np.asarray(x)[:count], result)


def draws(sampling: ModuleType, logits_V: np.ndarray, params: SamplingParams, count: int = ROWS) -> np.ndarray:
    """Tokens from `count` draws, each with a seed of its own."""
    seeds = np.arange(count).reshape(-1, ROWS)
    batch_RV = np.tile(logits_V, (ROWS, 1))
    return np.concatenate([sample(sampling, batch_RV, many(sampling, params, some)).token_R for some in seeds])


def support(sampling: ModuleType, logits_V: np.ndarray, params: SamplingParams) -> set[int]:
    """The tokens that come out of many draws."""
    return set(draws(sampling, logits_V, params).tolist())
