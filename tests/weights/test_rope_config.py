"""Rotary frequencies against values worked by hand."""

import math

import numpy as np
import pytest

from models.config import ModelConfig
from models.errors import ModelError
from models.rope_config import RopeConfig
from tests.weights.checkpoints import CONFIG

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def from_hf(**fields: object) -> RopeConfig:
    return ModelConfig.from_hf({**CONFIG, **fields}).rope


def frequencies(rope: RopeConfig, head_dim: int) -> list[float]:
    values, _ = rope.inverse_frequencies(head_dim)
    assert values.dtype == np.float32 and values.shape == (head_dim // 2,)
    return values.tolist()


def test_default():
    rope = RopeConfig(theta=10_000.0)
    assert frequencies(rope, 4) == pytest.approx([1.0, 0.01], rel=1e-7)
    assert rope.inverse_frequencies(4)[1] == 1.0


def test_linear_slows_all_pairs_alike():
    rope = RopeConfig(theta=10_000.0, type="linear", factor=4.0)
    assert frequencies(rope, 4) == pytest.approx([0.25, 0.0025], rel=1e-7)


def test_llama3_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    # 64 positions, in which a pair turns 64 f / 2π times. The first pair turns 10.2 times, above 4: kept. With this
    # theta the second turns 2.5 times, halfway from 1 to 4: half kept, half an eighth.
    middle = 2.5 * 2 * math.pi / 64
    rope = RopeConfig(
        theta=middle**-2,
        type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    assert frequencies(rope, 4) == pytest.approx([1.0, middle * (0.5 + 0.5 / 8)], rel=1e-7)
    # Theta 500000 makes the second pair turn 0.014 times, below 1: an eighth.
    slow = RopeConfig(**{**vars(rope), "theta": 500_000.0})
    assert frequencies(slow, 4) == pytest.approx([1.0, 500_000.0**-0.5 / 8], rel=1e-7)


def test_yarn():
    # The pair that turns 32 times in 4096 positions is 8 ln(4096 / 64π) / (2 ln 10000) = 1.31, rounded down to 1; once,
    # 2.81, rounded up to 3. So the ramp over pairs 0..3 is 0, 0, 1/2, 1, from as trained to a quarter.
    rope = RopeConfig(theta=10_000.0, type="yarn", factor=4.0, original_max_position_embeddings=4096)
    half = 0.5 * 0.01 + 0.5 * 0.01 / 4
    assert frequencies(rope, 8) == pytest.approx([1.0, 0.1, half, 0.001 / 4], rel=1e-7)
    assert rope.inverse_frequencies(8)[1] == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_without_rounding():
    rope = RopeConfig(theta=10_000.0, type="yarn", factor=4.0, original_max_position_embeddings=4096, truncate=False)
    low = 8 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(10_000))
    high = 8 * math.log(4096 / (2 * math.pi)) / (2 * math.log(10_000))
    slowed = (2 - low) / (high - low)
    assert 0.45 < slowed < 0.47
    assert frequencies(rope, 8)[2] == pytest.approx(0.01 * (1 - slowed) + 0.0025 * slowed, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 0.707}, 0.1 * math.log(4) + 1),  # either alone does nothing, as in transformers
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(settings: dict[str, float], factor: float):
    rope = from_hf(rope_scaling=YARN | settings)
    assert rope.inverse_frequencies(8)[1] == pytest.approx(factor)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
def test_float32_computation_agrees(theta: float, head_dim: int):
    """Peers compute in float32; this must not be far from it."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    peer = np.float32(1) / np.float32(theta) ** exponents
    np.testing.assert_allclose(RopeConfig(theta=theta).inverse_frequencies(head_dim)[0], peer, rtol=1e-6)


def test_both_spellings_of_a_config_mean_the_same():
    old = from_hf(rope_theta=500_000.0, rope_scaling=LLAMA3)
    new = from_hf(rope_parameters={**LLAMA3, "rope_theta": 500_000.0})
    assert old == new
    assert (old.type, old.theta, old.factor, old.original_max_position_embeddings) == ("llama3", 500_000.0, 8.0, 64)
    assert (
        from_hf(rope_theta=500_000.0, rope_scaling=LLAMA3, rope_parameters={**LLAMA3, "rope_theta": 500_000.0}) == old
    )
    with pytest.raises(ModelError, match="contradict"):
        from_hf(rope_scaling=LLAMA3, rope_parameters={**LLAMA3, "factor": 9.0})


def test_older_names_and_defaults():
    assert from_hf() == RopeConfig()
    assert from_hf(rope_scaling=None, rope_theta=5.0) == RopeConfig(theta=5.0)
    assert from_hf(rope_scaling={"type": "linear", "factor": 2}) == RopeConfig(type="linear", factor=2.0)
    assert from_hf(rope_scaling={"rope_type": "default", "factor": 3.0}) == RopeConfig()  # a default has no factor


def test_the_original_context_comes_from_wherever_it_is_said():
    said = {**YARN, "original_max_position_embeddings": 32}
    assert from_hf(rope_scaling=said).original_max_position_embeddings == 32
    without = {"rope_type": "yarn", "factor": 4.0}
    assert from_hf(rope_scaling=without).original_max_position_embeddings == CONFIG["max_position_embeddings"]
    assert from_hf(rope_scaling=said, original_max_position_embeddings=16).original_max_position_embeddings == 16
    # A factor left out is what the context grew by: 64 / 16.
    assert from_hf(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 16}).factor == 4.0


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}, "'longrope' is not supported"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "'mrope' is not supported"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2' must be a finite number"),
        ({"rope_type": "linear", "factor": -2.0}, "factor=-2.0 must be positive"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}, "not supported: mrope_section"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0 must be above"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor=None"),
        ({**YARN, "beta_fast": 0.5}, "beta_fast=0.5 must be above beta_slow=1.0"),
        ({**LLAMA3, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("linear", "rope_scaling='linear' must be an object"),
    ],
)
def test_what_is_not_supported_is_refused(scaling: object, reason: str):
    with pytest.raises(ModelError, match=reason.replace("(", r"\(")):
        from_hf(rope_scaling=scaling)


def test_settings_of_another_type_are_refused():
    with pytest.raises(ModelError, match=r"factor=2.0 means nothing for type 'default'"):
        RopeConfig(factor=2.0)
    with pytest.raises(ModelError, match="'ntk' is not supported"):
        RopeConfig(type="ntk")
