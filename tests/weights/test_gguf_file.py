"""GGUF files: rows in our order, quantised blocks decoded, and damage named."""

import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from models.conversions.llama import rotate_half_rows
from models.convert import open_source
from models.errors import ModelError
from tests.fixtures import smollm2_gguf
from tests.weights.checkpoints import CONFIG, as_gguf, converted, tensors, write_gguf, write_hf

Type = gguf.GGMLQuantizationType
WIDE = CONFIG | {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 12}  # rows that divide into blocks of 32


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
    ],
)
def test_the_same_model_in_both_forms(fields: dict, tmp_path: Path):
    """Query and key rows, permuted by hand on the way to GGUF, come back to where Hugging Face has them."""
    config = CONFIG | fields
    theirs, expected = converted(write_hf(tmp_path / "hf", config))
    ours, found = converted(write_gguf(tmp_path / "model.gguf", config))
    assert found.keys() == expected.keys()
    for path in found:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)  # GGUF has it in float32
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings


def test_rows_of_a_head_by_hand(tmp_path: Path):
    config = converted(write_hf(tmp_path))[0]  # head_dim 4
    gguf_order = np.array([10, 12, 11, 13, 20, 22, 21, 23])
    assert rotate_half_rows(gguf_order, config).tolist() == [10, 11, 12, 13, 20, 21, 22, 23]


def test_q8_0_and_q4_1_blocks_by_hand(tmp_path: Path):
    held: dict = as_gguf(tensors(WIDE))
    rng = np.random.default_rng(0)

    # Q8_0: a block is a float16 scale and 32 int8.
    scale, q8 = np.float16(0.375), rng.integers(-128, 128, (12, 64), np.int8)
    rows = [b"".join(scale.tobytes() + row[i : i + 32].tobytes() for i in (0, 32)) for row in q8]
    held["token_embd.weight"] = (np.frombuffer(b"".join(rows), np.uint8).reshape(12, -1), Type.Q8_0)

    # Q4_1: a float16 scale, a float16 minimum, and 16 bytes: the low halves are the first 16 values, the high the rest.
    scale, low, q4 = np.float16(0.5), np.float16(-3.25), rng.integers(0, 16, (64, 32), np.uint8)
    rows = [scale.tobytes() + low.tobytes() + (row[:16] | row[16:] << 4).astype(np.uint8).tobytes() for row in q4]
    held["blk.1.ffn_down.weight"] = (np.frombuffer(b"".join(rows), np.uint8).reshape(64, -1), Type.Q4_1)

    _, found = converted(write_gguf(tmp_path / "model.gguf", WIDE, held))
    np.testing.assert_array_equal(found["embed.weight"], q8.astype(np.float32) * 0.375)
    np.testing.assert_array_equal(found["layers.mlp.down.weight"][1], q4.astype(np.float32) * 0.5 - 3.25)
    assert found["embed.weight"].dtype == np.float32


def test_half_precisions(tmp_path: Path):
    held: dict = as_gguf(tensors(WIDE))
    values = np.arange(12 * 64).reshape(12, 64) % 256
    held["token_embd.weight"] = (values.astype(ml_dtypes.bfloat16).view(np.uint8), Type.BF16)
    held["output.weight"] = values.astype(np.float16)
    _, found = converted(write_gguf(tmp_path / "model.gguf", WIDE, held))
    assert found["embed.weight"].dtype == ml_dtypes.bfloat16
    assert found["lm_head.weight"].dtype == np.float32
    for path in ("embed.weight", "lm_head.weight"):
        np.testing.assert_array_equal(found[path].astype(np.int64), values)


def test_a_quantised_query_is_permuted_after_it_is_decoded(tmp_path: Path):
    held: dict = as_gguf(tensors(WIDE))
    name = "blk.0.attn_q.weight"
    q8 = np.random.default_rng(1).integers(-128, 128, (24, 64), np.int8)
    blocks = np.concatenate([np.full((24, 2, 1), 1.0, np.float16).view(np.int8), q8.reshape(24, 2, 32)], axis=2)
    held[name] = (blocks.reshape(24, -1).view(np.uint8), Type.Q8_0)
    _, found = converted(write_gguf(tmp_path / "model.gguf", WIDE, held))
    ours = found["layers.attn.qkv.weight"][0, 1, 4:8]  # KV head 1, its second query: head 3 * 1 + 1 = 4
    np.testing.assert_array_equal(ours, q8[4 * 4 + np.array([0, 2, 1, 3])].astype(np.float32))


def test_every_usual_quantisation_can_be_read():
    from models.sources.gguf_file import _dtype

    names = "F32 F16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ3_XXS IQ3_S IQ2_S IQ4_NL IQ4_XS"
    assert all(_dtype(Type[name]) == np.float32 for name in names.split())
    assert _dtype(Type.BF16) == ml_dtypes.bfloat16
    assert _dtype(Type.I32) is None


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path):
    held = as_gguf(tensors()) | {"blk.0.ffn_up.weight": np.zeros((10, 12), np.int32)}
    with pytest.raises(ModelError, match=r"cannot be read \(1\): blk.0.ffn_up.weight \(I32\)"):
        converted(write_gguf(tmp_path / "model.gguf", CONFIG, held))


def test_llama3_scaling_comes_as_a_tensor(tmp_path: Path):
    """The table that GGUF files carry means what the Hugging Face settings mean."""
    settings = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings |= {"original_max_position_embeddings": 64}
    theirs = open_source(write_hf(tmp_path / "hf", CONFIG | {"rope_parameters": settings})).config.rope
    plain = open_source(write_hf(tmp_path / "plain")).config.rope.inverse_frequencies(4)[0]
    scaled = theirs.inverse_frequencies(4)[0]
    held = as_gguf(tensors()) | {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
    config, _ = converted(write_gguf(tmp_path / "model.gguf", CONFIG, held))
    assert config.rope.type == "divisors"
    np.testing.assert_allclose(config.rope.inverse_frequencies(4)[0], scaled, rtol=1e-6)
    assert scaled[1] == pytest.approx(plain[1] / 8)


def test_biases_only_of_some_projections_are_missing_tensors(tmp_path: Path):
    held = as_gguf(tensors()) | {"blk.0.attn_q.bias": np.zeros(24, np.float32)}
    with pytest.raises(ModelError, match=r"missing \(7\): blk.0.attn_k.bias"):
        converted(write_gguf(tmp_path / "model.gguf", CONFIG, held))


def test_missing_and_misshapen_tensors(tmp_path: Path):
    held = as_gguf(tensors())
    del held["blk.1.ffn_up.weight"]
    held["output_norm.weight"] = np.zeros(13, np.float32)
    with pytest.raises(ModelError, match=r"missing \(1\): blk.1.ffn_up.weight; .* is \[13\] and should be \[12\]"):
        converted(write_gguf(tmp_path / "model.gguf", CONFIG, held))


def test_a_file_that_is_cut_off(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf")
    whole = path.read_bytes()
    for length in (0, 3, 20, 200, len(whole) // 4, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model.gguf .*(not a whole GGUF file|cut off)"):
            open_source(path)


def test_files_that_are_something_else(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf")
    whole = path.read_bytes()
    for data, reason in (
        (b"{}" + whole, "instead of b'GGUF'"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "little-endian"),
        (whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_xp").replace(b"\0blk.0.ffn_up", b"\0blk.0.ffn_xx"), "unexpected"),
        (whole.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"), "two tensors have the same name"),
    ):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=reason):
            converted(path)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path):
    write_gguf(tmp_path / "a.gguf")
    assert open_source(tmp_path).path == tmp_path / "a.gguf"
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="holds 2 GGUF files; name one"):
        open_source(tmp_path)


def test_smollm2():
    """What the real file says; that its numbers are right, the golden answers of the model tell."""
    source = open_source(smollm2_gguf())
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert config.rope.theta == 100_000.0 and config.tie_word_embeddings and config.eos_token_ids == (2,)
    assert source.tensors["blk.7.ffn_down.weight"] == ((576, 1536), "Q4_1", np.float32)
    assert len(source.tensors) == 272
    norms = source.read("blk.7.attn_norm.weight")
    assert norms.shape == (576,) and np.isfinite(norms).all() and norms.std() > 0


def test_what_is_wrong_names_the_file_and_the_way_out(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", extra={"llama.expert_count": 8, "llama.rope.freq_base": "high"})
    with pytest.raises(ModelError) as caught:
        open_source(path)
    text = str(caught.value)
    assert text.startswith(f"{path} cannot be used: ") and "; correct it or fetch it again" in text
    assert "llama.expert_count=8 is not supported" in text
    assert "llama.rope.freq_base='high' must be a finite number" in text


def test_scaling_of_another_shape_is_counted(tmp_path: Path):
    held = as_gguf(tensors()) | {"rope_freqs.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(ModelError, match=r"rope has 4 divisors where llama.attention.key_length=4 needs half as many"):
        open_source(write_gguf(tmp_path / "model.gguf", CONFIG, held))
    held["rope_freqs.weight"] = np.array([1, np.inf], np.float32)
    with pytest.raises(ModelError, match=r"rope divisors must be positive numbers"):
        open_source(write_gguf(tmp_path / "model.gguf", CONFIG, held))
