"""Hugging Face directories: every tensor where it belongs, and all that is wrong in one error."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.convert import open_source
from models.errors import ModelError
from models.llama import parameter_shapes
from tests.fixtures import GOLDEN
from tests.weights.checkpoints import CONFIG, D, E, F, G, H, K, L, V, converted, tensors, write_hf

BFLOAT16 = ml_dtypes.bfloat16
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_placement(found: dict[str, np.ndarray], held: dict[str, np.ndarray], sizes: tuple[int, ...]) -> None:
    """Compares every array with slices of the checkpoint's tensors, indexed by hand."""
    num_layers, num_kv_heads, group, head_dim = sizes
    seen = 0

    def equal(path: str, index: Any, expected: np.ndarray) -> None:
        nonlocal seen
        assert found[path].dtype == expected.dtype, path
        np.testing.assert_array_equal(found[path][index], expected, err_msg=f"{path} {index}")
        seen += expected.size

    equal("embed.weight", ..., held[EMBED])
    equal("final_norm.scale", ..., held["model.norm.weight"])
    if HEAD in held:
        equal("lm_head.weight", ..., held[HEAD])
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        equal("layers.attn_norm.scale", layer, held[at + "input_layernorm.weight"])
        equal("layers.mlp_norm.scale", layer, held[at + "post_attention_layernorm.weight"])
        for kind in ("weight", "bias"):
            if f"{at}mlp.up_proj.{kind}" in held:
                equal(f"layers.mlp.gate_up.{kind}", (layer, 0), held[f"{at}mlp.gate_proj.{kind}"])
                equal(f"layers.mlp.gate_up.{kind}", (layer, 1), held[f"{at}mlp.up_proj.{kind}"])
                equal(f"layers.mlp.down.{kind}", layer, held[f"{at}mlp.down_proj.{kind}"])
            if f"{at}self_attn.q_proj.{kind}" not in held:
                continue
            equal(f"layers.attn.out.{kind}", layer, held[f"{at}self_attn.o_proj.{kind}"])
            q, k, v = (held[f"{at}self_attn.{name}_proj.{kind}"] for name in "qkv")
            for head in range(num_kv_heads):
                rows = slice(head * head_dim, (head + 1) * head_dim)
                for member in range(group):  # query head `head * group + member`
                    ours = slice(member * head_dim, (member + 1) * head_dim)
                    query = head * group + member
                    expected = q[query * head_dim : (query + 1) * head_dim]
                    equal(f"layers.attn.qkv.{kind}", (layer, head, ours), expected)
                ours = slice(group * head_dim, (group + 1) * head_dim)
                equal(f"layers.attn.qkv.{kind}", (layer, head, ours), k[rows])
                equal(f"layers.attn.qkv.{kind}", (layer, head, slice(ours.stop, None)), v[rows])
    assert seen == sum(array.size for array in found.values())  # nothing is left that was not looked at


@pytest.mark.parametrize("family", ["llama", "llama3-rope"])
def test_golden_checkpoints(family: str):
    folder = GOLDEN / "tiny" / family
    config, found = converted(folder)
    held = load_file(folder / "model.safetensors")
    assert found["embed.weight"].dtype == BFLOAT16  # what is stored so stays so
    check_placement(found, held, (3, 2, 2, config.head_dim))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": H},
        {"head_dim": 8},
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_placement(fields: dict[str, Any], shards: int, tmp_path: Path):
    wanted = CONFIG | fields
    held = tensors(wanted)
    config, found = converted(write_hf(tmp_path, wanted, shards=shards))
    check_placement(found, held, (L, config.num_kv_heads, H // config.num_kv_heads, config.head_dim))


def test_parameter_shapes():
    """The tree that the rest of the house builds on, written out."""
    assert parameter_shapes(open_source(GOLDEN / "tiny" / "llama").config) == {
        "embed.weight": (320, 64),
        "layers.attn_norm.scale": (3, 64),
        "layers.attn.qkv.weight": (3, 2, (2 + 2) * 16, 64),
        "layers.attn.out.weight": (3, 64, 64),
        "layers.mlp_norm.scale": (3, 64),
        "layers.mlp.gate_up.weight": (3, 2, 96, 64),
        "layers.mlp.down.weight": (3, 64, 96),
        "final_norm.scale": (64,),
        "lm_head.weight": (320, 64),
    }


def test_parameter_shapes_with_biases_and_a_tie(tmp_path: Path):
    fields = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    assert parameter_shapes(open_source(write_hf(tmp_path, CONFIG | fields)).config) == {
        "embed.weight": (V, E),
        "layers.attn_norm.scale": (L, E),
        "layers.attn.qkv.weight": (L, K, (G + 2) * D, E),
        "layers.attn.qkv.bias": (L, K, (G + 2) * D),
        "layers.attn.out.weight": (L, E, H * D),
        "layers.attn.out.bias": (L, E),
        "layers.mlp_norm.scale": (L, E),
        "layers.mlp.gate_up.weight": (L, 2, F, E),
        "layers.mlp.gate_up.bias": (L, 2, F),
        "layers.mlp.down.weight": (L, E, F),
        "layers.mlp.down.bias": (L, E),
        "final_norm.scale": (E,),
    }


def test_kv_heads_default_to_heads(tmp_path: Path):
    config = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    config, found = converted(write_hf(tmp_path, config))
    assert found["layers.attn.qkv.weight"].shape == (L, H, 3 * D, E) and config.num_kv_heads == H


def test_dtypes_are_kept_and_float16_becomes_float32(tmp_path: Path):
    held = tensors()
    kinds = {"embed_tokens": BFLOAT16, "up_proj": BFLOAT16, "down_proj": np.float16, "o_proj": BFLOAT16}
    for name in held:
        kind = next((kind for part, kind in kinds.items() if part in name), np.float32)
        held[name] = (held[name] % 256).astype(kind)
    held["model.layers.0.mlp.down_proj.weight"][0, 0] = 2047  # 11 bits: float16 has them, bfloat16 has not
    _, found = converted(write_hf(tmp_path, held=held))
    dtypes = {path: array.dtype for path, array in found.items()}
    assert dtypes["embed.weight"] == dtypes["layers.attn.out.weight"] == BFLOAT16
    assert dtypes["layers.mlp.down.weight"] == np.float32  # from float16
    assert dtypes["layers.mlp.gate_up.weight"] == np.float32  # one half of it is float32
    np.testing.assert_array_equal(
        found["layers.mlp.down.weight"][0], held["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
    )
    assert found["layers.mlp.down.weight"][0, 0, 0] == 2047


class TestTies:
    """Whether the output head is the embedding: what the config says, against what the file holds."""

    def tied(self, tmp_path: Path, says: bool, head: np.ndarray | None) -> tuple[bool, dict[str, np.ndarray]]:
        held = tensors(CONFIG | {"tie_word_embeddings": True})
        if head is not None:
            held[HEAD] = head
        config, found = converted(write_hf(tmp_path, CONFIG | {"tie_word_embeddings": says}, held))
        return config.tie_word_embeddings, found

    @property
    def embed(self) -> np.ndarray:
        return tensors(CONFIG)[EMBED]

    def test_tied_and_no_head(self, tmp_path: Path):
        tied, found = self.tied(tmp_path, True, None)
        assert tied and "lm_head.weight" not in found

    def test_tied_and_a_copy(self, tmp_path: Path):
        tied, found = self.tied(tmp_path, True, self.embed)
        assert tied and "lm_head.weight" not in found

    def test_tied_and_another_head(self, tmp_path: Path):
        tied, found = self.tied(tmp_path, True, self.embed + 1)
        assert not tied
        np.testing.assert_array_equal(found["lm_head.weight"], self.embed + 1)

    def test_untied_and_a_copy_stay_untied(self, tmp_path: Path):
        tied, found = self.tied(tmp_path, False, self.embed)
        assert not tied
        np.testing.assert_array_equal(found["lm_head.weight"], self.embed)

    def test_untied_and_no_head(self, tmp_path: Path):
        with pytest.raises(ModelError, match=r"missing \(1\): lm_head.weight"):
            self.tied(tmp_path, False, None)

    def test_tied_and_a_head_of_another_shape(self, tmp_path: Path):
        with pytest.raises(ModelError, match=r"lm_head.weight is \[5, 12\] and should be \[11, 12\]"):
            self.tied(tmp_path, True, self.embed[:5])


def test_rotary_buffers_of_old_checkpoints_are_left_alone(tmp_path: Path):
    held = tensors()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(D // 2, np.float32)
    converted(write_hf(tmp_path, held=held))


def test_everything_wrong_comes_in_one_error(tmp_path: Path):
    held = tensors()
    del held["model.layers.1.mlp.up_proj.weight"], held["model.norm.weight"]
    held["model.layers.0.self_attn.q_proj.bias"] = np.zeros(H * D, np.float32)  # the config says there is none
    held["model.layers.2.mlp.up_proj.weight"] = np.zeros((F, E), np.float32)  # and only two layers
    held["model.layers.0.self_attn.k_proj.weight"] = np.zeros((K * D, E + 1), np.float32)
    held["model.layers.0.input_layernorm.weight"] = np.zeros((E, 1), np.float32)
    held["model.layers.0.mlp.down_proj.weight"] = np.zeros((E, F), np.int8)
    with pytest.raises(ModelError) as caught:
        converted(write_hf(tmp_path, held=held))
    text = str(caught.value)
    assert str(tmp_path) in text and "\n" not in text
    for part in (
        "missing (2): model.layers.1.mlp.up_proj.weight, model.norm.weight;",
        "unexpected (2): model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight;",
        "misshapen (2): model.layers.0.input_layernorm.weight is [12, 1] and should be [12], "
        "model.layers.0.self_attn.k_proj.weight is [8, 13] and should be [8, 12];",
        "cannot be read (1): model.layers.0.mlp.down_proj.weight (I8);",
        "'llama' with 2 layers",
    ):
        assert part in text, text


def test_long_lists_are_cut_and_sorted_by_number(tmp_path: Path):
    deep = CONFIG | {"num_hidden_layers": 12}
    with pytest.raises(ModelError, match=r"missing \(90\): .*layers\.2\..* and 84 more") as caught:
        converted(write_hf(tmp_path, deep, tensors(CONFIG)))
    assert "layers.10." not in str(caught.value)


def test_a_truncated_shard_is_named(tmp_path: Path):
    write_hf(tmp_path, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match=re.escape(f"{shard} is not a whole safetensors file")):
        converted(tmp_path)


def test_missing_shards_are_named(tmp_path: Path):
    write_hf(tmp_path, shards=3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks the weight files model-00001-of-00003\S+, model-00003"):
        converted(tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path):
    write_hf(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": weight_map[EMBED]}}))
    with pytest.raises(ModelError, match="promises 1 tensors that its shards do not hold, the first ghost"):
        converted(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_an_index_without_a_map(tmp_path: Path, weight_map: object):
    write_hf(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="has no weight_map"):
        converted(tmp_path)


def test_an_index_must_not_lead_out_of_the_directory(tmp_path: Path):
    write_hf(tmp_path / "other")
    write_hf(tmp_path / "model", shards=2)
    away = {"weight_map": {EMBED: "../other/model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(away))
    with pytest.raises(ModelError, match=r"lacks the weight files ../other/model.safetensors"):
        converted(tmp_path / "model")


def test_directories_that_are_no_checkpoint(tmp_path: Path):
    with pytest.raises(ModelError, match=r"holds neither config.json nor a GGUF file"):
        open_source(tmp_path)
    write_hf(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model.bin; save the model as model.safetensors"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        open_source(tmp_path)
    invalid = ("{", "\xff", "[" * 10**5)
    for text, reason in (*((text, "not valid JSON") for text in invalid), ("[]", "holds list")):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=reason):
            open_source(tmp_path)


def test_generation_config_knows_more_about_the_end(tmp_path: Path):
    write_hf(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "bos_token_id": 9}')
    config = open_source(tmp_path).config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("config.json", {"vocab_size": "11"}, "vocab_size='11' must be an integer"),
        ("config.json", {"eos_token_id": [2, V]}, f"[{V}] are outside of vocab_size={V}"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id='2' must be one or several integers"),
        ("generation_config.json", {"eos_token_id": V}, f"[{V}] are outside of vocab_size={V}"),
    ],
)
def test_what_is_wrong_names_the_file_and_the_way_out(name: str, fields: dict[str, Any], reason: str, tmp_path: Path):
    write_hf(tmp_path)
    held = json.loads((tmp_path / name).read_text()) if name == "config.json" else {}
    (tmp_path / name).write_text(json.dumps(held | fields))
    with pytest.raises(ModelError, match=f"{re.escape(name)}.* cannot be used: .*{re.escape(reason)}.*; correct it"):
        open_source(tmp_path)


def test_more_layers_than_tensors_are_refused_before_they_are_listed(tmp_path: Path):
    write_hf(tmp_path, CONFIG | {"num_hidden_layers": 2**24}, tensors())
    with pytest.raises(ModelError, match=r"says 16777216 layers, and it has 21 tensors in all; correct its config"):
        converted(tmp_path)


def test_a_model_of_no_size_at_all_is_refused_before_it_is_made(tmp_path: Path):
    write_hf(tmp_path, CONFIG | {"hidden_size": 2**24, "intermediate_size": 2**24}, tensors())
    with pytest.raises(ModelError, match=r"asks for 1\.7e\+15 numbers; correct its config"):
        converted(tmp_path)
