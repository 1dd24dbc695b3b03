"""The model config: what is read from where, and that all faults come in one error."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig
from models.errors import ModelError
from models.rope_config import RopeConfig
from tests.fixtures import golden
from tests.weights.checkpoints import CONFIG, D, E, F, H, K, L, V

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 24,
    "llama.block_count": 2,
    "llama.feed_forward_length": 10,
    "llama.attention.head_count": 6,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (11, 24)}


def from_hf(**fields: object) -> ModelConfig:
    return ModelConfig.from_hf({**CONFIG, **fields})


def test_every_field_of_a_hugging_face_config():
    assert from_hf(attention_bias=True, mlp_bias=True) == ModelConfig(
        vocab_size=V,
        hidden_size=E,
        intermediate_size=F,
        num_layers=L,
        num_heads=H,
        num_kv_heads=K,
        head_dim=D,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        rope=RopeConfig(),
        family="llama",
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        hidden_act="silu",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_what_a_config_may_leave_out():
    config = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "head_dim", "eos_token_id")}
    found = ModelConfig.from_hf(config | {"bos_token_id": None})
    assert (found.num_kv_heads, found.head_dim) == (H, E // H)
    assert (found.bos_token_id, found.eos_token_ids) == (None, ())


def test_several_ends_and_one_kv_head():
    assert from_hf(eos_token_id=[2, 5]).eos_token_ids == (2, 5)
    assert from_hf(num_key_value_heads=1).num_kv_heads == 1


@pytest.mark.parametrize("family", ["llama", "llama3-rope"])
def test_golden_configs(family: str):
    config = ModelConfig.from_hf(golden(f"tiny/{family}/config.json"))
    assert (config.num_heads, config.num_kv_heads, config.num_layers, config.vocab_size) == (4, 2, 3, 320)
    assert config.rope.type == {"llama": "default", "llama3-rope": "llama3"}[family]
    assert config.head_dim == {"llama": 16, "llama3-rope": 32}[family]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"model_type": "qwen2"}, "model_type='qwen2' is not supported; supported are llama"),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] must be a string"),
        ({"architectures": 7}, "architectures=7 must be one or several strings"),
        ({"architectures": ["LlamaForCausalLM", None]}, "must be one or several strings"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is present"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "11"}, "vocab_size='11' must be an integer"),
        ({"vocab_size": 11.0}, "vocab_size=11.0 must be an integer"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 must be from 1 to 2147483647"),
        ({"head_dim": 2**24 + 2}, "head_dim=16777218 must be from 1 to 16777216"),
        ({"hidden_size": 10**30}, "must be an integer of 64 bits"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be from 1 to"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads=0 must be from 1 to"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 must be a multiple of num_key_value_heads=4"),
        ({"head_dim": 3}, "head_dim=3 must be even"),
        ({"head_dim": None, "hidden_size": 13}, "hidden_size=13 must be a multiple of num_attention_heads=6"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        ({"rms_norm_eps": 10**400}, "must be a finite number"),
        ({"rope_theta": -(10**400)}, "must be a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        ({"eos_token_id": [2, 11]}, r"tokens \[11\] are outside of vocab_size=11"),
        ({"eos_token_id": "2"}, "eos_token_id='2' must be one or several integers"),
    ],
)
def test_refusals(fields: dict[str, object], reason: str):
    with pytest.raises(ModelError, match=reason):
        from_hf(**fields)


def test_all_faults_come_in_one_error():
    with pytest.raises(ModelError) as caught:
        from_hf(
            hidden_act="gelu",
            head_dim=3,
            num_key_value_heads=4,
            quantization_config={},
            rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        )
    for reason in ("hidden_act", "head_dim=3", "num_key_value_heads=4", "quantization_config", "'dynamic'"):
        assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError) as caught:
        from_hf(vocab_size=None, num_hidden_layers="two", hidden_size=None)
    for reason in ("vocab_size is missing", "num_hidden_layers='two'", "hidden_size is missing"):
        assert str(caught.value).count(reason) == 1


def test_json_round_trip(tmp_path: Path):
    config = from_hf(
        eos_token_id=[2, 3],
        bos_token_id=None,
        rope_scaling={"rope_type": "yarn", "factor": 4, "truncate": False, "mscale": 1.0},
    )
    assert read(tmp_path, config.to_json()) == config
    tabulated = dataclasses.replace(config, rope=RopeConfig(type="divisors", divisors=(1.0, 8.0)))
    assert read(tmp_path, tabulated.to_json()) == tabulated


def read(folder: Path, text: str) -> ModelConfig:
    (folder / "config.json").write_text(text)
    return ModelConfig.read(folder / "config.json")


def test_json_that_is_not_ours(tmp_path: Path):
    values = json.loads(from_hf().to_json())
    for text, reason in (
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, holds list"),
        (json.dumps(CONFIG), "reads 'jpaged-model', 1"),
        (json.dumps(values | {"version": 2}), "'version': 2"),
        (json.dumps(values | {"colour": "red"}), "colour is unknown"),
        (json.dumps(values | {"rope": values["rope"] | {"truncate": 1}}), "rope.truncate=1 must be true or false"),
        (json.dumps({k: v for k, v in values.items() if k != "head_dim"}), "head_dim is missing"),
        (json.dumps(values | {"head_dim": 5}), "head_dim=5 must be even"),
        (json.dumps(values | {"rope": 7}), "rope=7 must be an object"),
        (json.dumps(values | {"rope": values["rope"] | {"theta": -1}}), "rope theta=-1.0 must be positive"),
    ):
        with pytest.raises(ModelError, match=f"config.json .*{reason}.*; (convert|fetch) the (checkpoint|file) again"):
            read(tmp_path, text)
    with pytest.raises(ModelError, match=r"config.json is missing; give"):
        ModelConfig.read(tmp_path / "nowhere" / "config.json")


def test_gguf_says_what_it_says_and_the_rest_is_read_off_the_tensors():
    config = ModelConfig.from_gguf(GGUF, SHAPES)
    assert (config.vocab_size, config.num_kv_heads, config.head_dim) == (11, 6, 4)
    assert config.tie_word_embeddings and not config.attention_bias and not config.mlp_bias
    more = SHAPES | {"output.weight": (11, 24), "blk.0.attn_q.bias": (24,), "blk.0.ffn_up.bias": (10,)}
    config = ModelConfig.from_gguf(GGUF, more)
    assert not config.tie_word_embeddings and config.attention_bias and config.mlp_bias


def test_gguf_ends_of_text_are_all_that_are_named():
    tokens = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", 1), ("eos", 3), ("eot", 4), ("eom", 3))}
    config = ModelConfig.from_gguf(GGUF | tokens, SHAPES)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (3, 4))


def test_gguf_rope():
    def rope(*divisors: float, **fields: object) -> RopeConfig:
        found = {f"llama.rope.{name.replace('__', '.')}": value for name, value in fields.items()}
        return ModelConfig.from_gguf(GGUF | found, SHAPES, divisors).rope

    assert rope(freq_base=5e5) == RopeConfig(theta=5e5)
    assert rope(scaling__type="none") == RopeConfig()
    assert rope(scaling__type="linear", scaling__factor=2.0) == RopeConfig(type="linear", factor=2.0)
    assert rope(scale_linear=2.0) == RopeConfig(type="linear", factor=2.0)
    yarn = rope(
        scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=16, scaling__attn_factor=2.0
    )
    assert (yarn.type, yarn.original_max_position_embeddings) == ("yarn", 16)
    assert yarn.attention_factor == pytest.approx(2 * 1.1386294)  # 2 (0.1 ln 4 + 1)
    tabulated = rope(1.0, 8.0)
    assert tabulated.inverse_frequencies(4)[0].tolist() == pytest.approx([1.0, 0.01 / 8])
    with pytest.raises(ModelError, match=r"both rope_freqs.weight and"):
        rope(1.0, 8.0, scaling__type="linear", scaling__factor=2.0)
    with pytest.raises(ModelError, match=r"3 divisors where llama.attention.key_length=4"):
        rope(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture='qwen2' is not supported"),
        ({"llama.rope.dimension_count": 2}, r"only a full rotation \(4\)"),
        ({"llama.attention.value_length": 8}, "must equal the key length, 4"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama.attention.sliding_window": 8}, "sliding_window=8 is not supported"),
        ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv=\[2, 2\] must be an integer"),
        ({"split.count": 2}, "merge the parts"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "scaling.factor is missing"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1 is not supported"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"general.architecture": ["llama"]}, "must be a string"),
        ({"llama.block_count": -1}, "llama.block_count=-1 must be from 1 to"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id='2' must be an integer"),
        ({"tokenizer.ggml.bos_token_id": 11}, r"tokens \[11\] are outside of llama.vocab_size=11"),
    ],
)
def test_gguf_refusals(fields: dict[str, object], reason: str):
    with pytest.raises(ModelError, match=reason):
        ModelConfig.from_gguf(GGUF | fields, SHAPES)
