"""Beam search as anyone would write it, one hypothesis at a time, and a small model to search in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.model import LoadedModel, ModelSpec

Found = list[tuple[list[int], float, float]]  # tokens, sum of log-probabilities, score
Logprobs = Callable[[Sequence[int]], np.ndarray]  # of the token after some tokens


def search(
    logprobs: Logprobs,
    prompt: Sequence[int],
    *,
    width: int,
    most: int,
    stops: Sequence[int] = (),
    penalty: float = 1.0,
    early: bool = False,
) -> Found:
    """The best hypotheses, best first; the rules are those of `jpaged.beam`."""
    live, done = [(0.0, list[int]())], []
    for length in range(1, most + 1):
        found = []
        for beam, (total, tokens) in enumerate(live):
            scores = logprobs([*prompt, *tokens])
            found += [(-(total + scores[token]), beam, token) for token in range(len(scores))]
        found.sort()
        next_live = []
        for rank, (negative, beam, token) in enumerate(found):
            tokens = [*live[beam][1], token]
            if token not in stops:
                next_live.append((-negative, tokens))
            elif rank < width:
                done.append((tokens, -negative, -negative / length**penalty))
        live = next_live[:width]
        done = sorted(done, key=lambda each: -each[2])[:width]
        if not live:
            return done
        full = len(done) == width
        reach = most if penalty > 0 else min(length + 1, most)
        if full and (early or live[0][0] / reach**penalty <= done[-1][2]):
            return done
    done += [(tokens, total, total / most**penalty) for total, tokens in live]
    return sorted(done, key=lambda each: -each[2])[:width]


def every_continuation(
    logprobs: Logprobs, prompt: Sequence[int], vocab: int, most: int, stops: Sequence[int], penalty: float
) -> Found:
    """All that there are: those that stop, and those of the greatest length that do not."""
    found = []
    for length in range(1, most + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            inside = any(token in stops for token in tokens[:-1])
            if inside or (tokens[-1] not in stops and length < most):
                continue
            total = sum(logprobs([*prompt, *tokens[:i]])[token] for i, token in enumerate(tokens))
            found.append((list(tokens), float(total), float(total) / length**penalty))
    return sorted(found, key=lambda each: -each[2])


class Toy:
    """A model whose next token depends on the last one and, through KV memory, on all before it.

    Its weights are two tables, [V, V]: scores by the last token, and by the mean of all tokens, counted twice or thrice
    by their positions.
    """

    def __init__(self, vocab: int):
        self.spec = ModelSpec(
            "toy", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=vocab, vocab_size=vocab, max_model_len=64
        )

    def hidden(self, weights: Any, tokens_T: jax.Array, positions_T: jax.Array, view: Any) -> tuple[jax.Array, Any]:
        one_hot_TV = jax.nn.one_hot(tokens_T, self.spec.vocab_size, dtype=jnp.float32)
        v_TV = one_hot_TV * (1 + positions_T % 3)[:, None].astype(jnp.float32)
        nothing = jnp.zeros_like(v_TV)[:, None]
        mean, view = view.attend(0, nothing, nothing, v_TV[:, None])
        return jnp.concatenate([one_hot_TV, mean[:, 0]], axis=1), view

    def logits(self, weights: Any, hidden_RE: jax.Array) -> jax.Array:
        return hidden_RE @ jnp.concatenate([weights["last"], weights["mean"]])


def tables(vocab: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(vocab, vocab)).astype(np.float32) * 2 for name in ("last", "mean")}


def toy(vocab: int, seed: int) -> LoadedModel:
    return LoadedModel(Toy(vocab), jax.tree.map(jnp.asarray, tables(vocab, seed)), None, None)


def toy_logprobs(weights: dict[str, np.ndarray]) -> Logprobs:
    """What the toy says, in NumPy."""

    def logprobs(text: Sequence[int]) -> np.ndarray:
        one_hot = np.eye(len(weights["last"]))[list(text)]
        mean = (one_hot * (1 + np.arange(len(text)) % 3)[:, None]).mean(axis=0)
        logits = one_hot[-1] @ weights["last"] + mean @ weights["mean"]
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    return logprobs
