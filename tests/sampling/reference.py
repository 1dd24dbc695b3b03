"""The sampler's rules once more: with sorts, fractions and loops, in NumPy and plain Python."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def ranking(values: Sequence) -> list[int]:
    """Indices by value, greatest first, and equal values by index, lowest first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def kept(
    weights: Sequence[int], *, top_k: int = 0, top_p: Fraction = Fraction(1), min_p: Fraction = Fraction(0)
) -> set[int]:
    """The tokens that the cuts leave of a distribution in proportion to `weights`, in exact arithmetic."""
    left = [i for i in ranking(weights) if weights[i] > 0 and weights[i] >= min_p * max(weights)]
    left = left[:top_k] if top_k > 0 else left
    total = sum(weights[i] for i in left)
    return {token for n, token in enumerate(left) if n == 0 or sum(weights[i] for i in left[:n]) < top_p * total}


def logits(weights: Sequence[int] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Logits whose softmax at that temperature is in proportion to `weights`."""
    with np.errstate(divide="ignore"):
        return (np.log(np.array(weights, np.float64)) * temperature).astype(np.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.sum(np.exp(x - x.max())))


def penalised(
    x: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
) -> np.ndarray:
    result = np.array(x, np.float64)
    for token in {*prompt, *output}:
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * list(output).count(token) + presence
    return result
