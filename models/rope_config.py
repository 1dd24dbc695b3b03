"""Rotary position embedding: its settings, and the angle per position that they mean for each pair of dimensions.

Reads both spellings of Hugging Face configs (`rope_theta` with `rope_scaling`; `rope_parameters`) and GGUF metadata.
Knows neither positions, cosines nor JAX: a model multiplies `inverse_frequencies` by positions, and scales cosines
and sines by the attention factor. Pairs are (i, i + D/2), the rotate-half layout.

Sources: RoFormer, arXiv 2104.09864, section 3.4 (default); position interpolation, arXiv 2306.15595 (linear); YaRN,
arXiv 2309.00071, section 3; Llama 3.1's reference code, `apply_scaling` (llama3).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from models.errors import ModelError
from models.sources.fields import Faults, Fields

# Which settings each type uses, beyond theta. The others must stay at their defaults: what means the same is equal.
_USED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "divisors": ("divisors",),
}
_HF_TYPES = ("default", "linear", "llama3", "yarn")
_HF_NAMES = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"} | {
    name for type in _HF_TYPES for name in _USED[type]
}


@dataclass(frozen=True)
class RopeConfig:
    """Settings of the rotary embedding; `_USED` says which belong to which type.

    Attributes:
      theta: base of the geometric series of frequencies.
      type: "default", "linear", "llama3", "yarn", or "divisors" (GGUF files tabulate Llama 3's scaling so).
      factor: how many times longer the context became.
      low_freq_factor, high_freq_factor: llama3: turns within the original context below which a pair is slowed by
        `factor`, and above which it is left alone.
      original_max_position_embeddings: positions in the context of pre-training.
      attention_factor: yarn: multiplies cosines and sines; None derives it from `factor`, `mscale`, `mscale_all_dim`.
      beta_fast, beta_slow: yarn: turns within the original context that bound the ramp.
      truncate: yarn: round the ramp's bounds outwards to whole pairs.
      divisors: one number per pair; its frequency is divided by it.

    Raises:
      ModelError: values that mean nothing; all are named.
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        faults = self._faults()
        if faults:
            raise Faults("The rotary embedding", faults, "correct its settings, and leave out those without a meaning")

    def inverse_frequencies(self, head_dim: int) -> tuple[Float32[np.ndarray, " C"], float]:
        """Radians per position for each pair of dimensions, and the factor on cosines and sines.

        Args:
          head_dim: D, even; every dimension is rotated.

        Returns:
          float32 [C = D/2], computed in float64; and the attention factor, 1.0 except for yarn.

        Raises:
          ModelError: `divisors` does not hold D/2 numbers.
        """
        pairs = np.arange(0, head_dim, 2, dtype=np.float64)
        frequencies = self.theta ** (-pairs / head_dim)
        attention_factor = 1.0
        if self.type == "linear":
            frequencies = frequencies / self.factor
        elif self.type == "llama3":
            frequencies = self._llama3(frequencies)
        elif self.type == "yarn":
            frequencies = self._yarn(frequencies, head_dim)
            attention_factor = self._yarn_attention_factor()
        elif self.type == "divisors":
            if len(self.divisors) != head_dim // 2:
                raise ModelError(f"{head_dim=} needs half as many rope.divisors, not {len(self.divisors)}; give all.")
            frequencies = frequencies / np.asarray(self.divisors, np.float64)
        return frequencies.astype(np.float32), attention_factor

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        assert self.original_max_position_embeddings and self.low_freq_factor and self.high_freq_factor
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)  # 1: as trained; 0: slowed by the whole factor
        return frequencies * (kept + (1.0 - kept) / self.factor)

    def _yarn(self, frequencies: np.ndarray, head_dim: int) -> np.ndarray:
        context = self.original_max_position_embeddings
        assert context

        def pair_turning(turns: float) -> float:
            """The (fractional) pair that turns so many times within the original context."""
            return head_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(self.theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        slowed = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
        return frequencies * (1.0 - slowed) + frequencies / self.factor * slowed

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        """YaRN's 0.1 ln(s) + 1 (its equation 22), with DeepSeek's weight on the logarithm."""
        return 1.0 if self.factor <= 1.0 else 0.1 * mscale * math.log(self.factor) + 1.0

    def _faults(self) -> list[str]:
        if self.type not in _USED:
            return [f"rope type {self.type!r} is not supported; supported are {', '.join(_USED)}"]
        defaults, used = type(self).__dataclass_fields__, ("theta", "type", *_USED[self.type])
        faults = [
            f"rope {name}={getattr(self, name)!r} means nothing for type {self.type!r}"
            for name in defaults
            if name not in used and getattr(self, name) != defaults[name].default
        ]
        for name in ("theta", "factor", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                faults.append(f"rope {name}={getattr(self, name)!r} must be positive")
        if self.type == "yarn" and not self.theta > 1:
            faults.append(f"rope theta={self.theta!r} must be above 1 for type 'yarn'")
        if self.type == "yarn" and not self.beta_fast > self.beta_slow:
            faults.append(f"rope beta_fast={self.beta_fast!r} must be above beta_slow={self.beta_slow!r}")
        if self.type in ("yarn", "llama3") and not (self.original_max_position_embeddings or 0) > 0:
            value = self.original_max_position_embeddings
            faults.append(f"rope original_max_position_embeddings={value!r} must be a positive integer")
        if self.type == "llama3" and not (self.high_freq_factor or 0) > (self.low_freq_factor or 0) > 0:
            faults.append(
                f"rope high_freq_factor={self.high_freq_factor!r} must be above low_freq_factor="
                f"{self.low_freq_factor!r}, and both positive"
            )
        if self.type == "divisors" and not (self.divisors and all(0 < d < math.inf for d in self.divisors)):
            faults.append("rope divisors must be positive numbers, one per pair of dimensions")
        return faults


def rope_from_hf(config: Fields) -> RopeConfig:
    """The rotary settings of a Hugging Face config.

    Args:
      config: the whole config.json; its `problems` receives whatever is wrong or not supported.

    Returns:
      The settings; a stand-in where problems were found.
    """
    spellings = {name: config.mapping(name) for name in ("rope_scaling", "rope_parameters")}
    found = [_rope_from_hf_mapping(config, name, values) for name, values in spellings.items() if values]
    if len(found) == 2 and found[0] != found[1]:
        config.note("rope_scaling and rope_parameters contradict each other; remove one of them")
    return found[0] if found else _rope_from_hf_mapping(config, "rope_parameters", {})


def _rope_from_hf_mapping(config: Fields, name: str, values: Mapping[str, Any]) -> RopeConfig:
    rope = Fields(values, config.problems, prefix=f"{name}.")
    kind = rope.text("rope_type", rope.text("type", "default"))
    unknown = sorted(key for key in values if key not in _HF_NAMES and values[key] is not None)
    if kind not in _HF_TYPES:
        config.note(f"rope type {kind!r} is not supported; supported are {', '.join(_HF_TYPES)}")
        return RopeConfig()
    if unknown:
        config.note(f"{name} has settings that are not supported: {', '.join(unknown)}")
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            fields.reject("partial_rotary_factor", "is not supported; only a full rotation (1.0) is")
    context = config.integer("max_position_embeddings", None)
    original = config.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", context)
    )
    settings: dict[str, Any] = {
        "factor": rope.number("factor", context / original if kind == "yarn" and context and original else None),
        "low_freq_factor": rope.number("low_freq_factor", None),
        "high_freq_factor": rope.number("high_freq_factor", None),
        "original_max_position_embeddings": original,
        "attention_factor": rope.number("attention_factor", None),
        "beta_fast": rope.number("beta_fast", None) or 32.0,
        "beta_slow": rope.number("beta_slow", None) or 1.0,
        "mscale": rope.number("mscale", None),
        "mscale_all_dim": rope.number("mscale_all_dim", None),
        "truncate": rope.flag("truncate", True),
    }
    settings = {key: settings[key] for key in _USED[kind]}
    if settings.get("factor", 1.0) is None:
        config.note(f"{name}.factor is missing")
        return RopeConfig()
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    return _built(config, theta=theta, type=kind, **settings) if rope.readable else RopeConfig()


def rope_from_gguf(metadata: Fields, architecture: str, divisors: Sequence[float] = ()) -> RopeConfig:
    """The rotary settings of a GGUF file.

    Args:
      metadata: all of the file's metadata; its `problems` receives whatever is wrong or not supported.
      architecture: the prefix of the model's own keys, such as "llama".
      divisors: the tensor `rope_freqs.weight` where the file has one: Llama 3's scaling, tabulated.

    Returns:
      The settings; a stand-in where problems were found.
    """
    key = f"{architecture}.rope.scaling."
    theta = metadata.number(f"{architecture}.rope.freq_base", 10_000.0)
    linear = metadata.number(f"{architecture}.rope.scale_linear", None)  # the spelling before `rope.scaling`
    kind = metadata.text(f"{key}type", "none" if linear is None else "linear")
    for name, neutral in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if metadata.number(key + name, neutral) != neutral:
            metadata.reject(key + name, f"is not supported; only {neutral} is")
    temperature = metadata.number(f"{key}attn_factor", 1.0)
    if kind != "yarn" and temperature != 1.0:
        metadata.reject(f"{key}attn_factor", "is supported for yarn only")
    if divisors and kind != "none":
        metadata.note(f"both rope_freqs.weight and {key}type={kind!r} scale the frequencies; one is supported")
    if divisors:
        return _built(metadata, theta=theta, type="divisors", divisors=tuple(float(d) for d in divisors))
    if kind == "none":
        return _built(metadata, theta=theta)
    if kind not in ("linear", "yarn"):
        metadata.reject(f"{key}type", "is not supported; supported are none, linear and yarn")
        return RopeConfig()
    factor = metadata.number(f"{key}factor") if linear is None else linear
    if kind == "linear":
        return _built(metadata, theta=theta, type="linear", factor=factor)
    logarithm = math.log(factor) if factor > 1 else 0.0
    return _built(
        metadata,
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=metadata.integer(
            f"{key}original_context_length", metadata.integer(f"{architecture}.context_length", None)
        ),
        attention_factor=temperature * (0.1 * logarithm + 1.0),
        beta_fast=metadata.number(f"{key}yarn_beta_fast", 32.0),
        beta_slow=metadata.number(f"{key}yarn_beta_slow", 1.0),
    )


def _built(fields: Fields, **settings: Any) -> RopeConfig:
    try:
        return RopeConfig(**settings)
    except Faults as error:
        for fault in error.faults:
            fields.note(fault)
        return RopeConfig()
