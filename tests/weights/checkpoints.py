"""Writes small checkpoints in the forms that exist outside, with whatever is to be wrong with them.

Every number of every tensor is another one and a small integer, so that one that went astray shows, in bfloat16 too
where the tensor is small enough (integers up to 256 are exact there).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.conversions import llama
from models.conversions.rules import array_dtypes, convert_tensors, plan
from models.convert import open_source
from models.llama import parameter_shapes

# H = 6 query heads on K = 2 KV heads, so G = 3; H * D = 24 is not E.
V, E, F, L, K, G, D = 11, 12, 10, 2, 2, 3, 4
H = K * G

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": D,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tensors(config: Mapping[str, Any] = CONFIG, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The tensors that a Hugging Face checkpoint of this config has, lm_head and biases included where it says so."""
    e, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    h, k, v = config["num_attention_heads"], config.get("num_key_value_heads", H), config["vocab_size"]
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (e,), at + "post_attention_layernorm.weight": (e,)}
        matrices = {"q": (h * d, e), "k": (k * d, e), "v": (k * d, e), "o": (e, h * d)}
        shapes |= {f"{at}self_attn.{name}_proj.weight": shape for name, shape in matrices.items()}
        if attention_bias:
            shapes |= {f"{at}self_attn.{name}_proj.bias": shape[:1] for name, shape in matrices.items()}
        matrices = {"gate": (f, e), "up": (f, e), "down": (e, f)}
        shapes |= {f"{at}mlp.{name}_proj.weight": shape for name, shape in matrices.items()}
        if mlp_bias:
            shapes |= {f"{at}mlp.{name}_proj.bias": shape[:1] for name, shape in matrices.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, e)
    return {
        name: (np.arange(np.prod(shape)) + 1000 * index).reshape(shape).astype(dtype)
        for index, (name, shape) in enumerate(shapes.items())
    }


def write_hf(
    folder: Path,
    config: Mapping[str, Any] = CONFIG,
    held: Mapping[str, np.ndarray] | None = None,
    *,
    shards: int = 1,
) -> Path:
    """A Hugging Face directory; `held` is what its weight files hold, if not what the config asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    held = dict(tensors(config) if held is None else held)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(held, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    home = {name: names[i % shards] for i, name in enumerate(held)}
    for shard in names:
        save_file({name: held[name] for name in held if home[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Of D = 4 rows of a head, (0, 2) and (1, 3) rotate together; GGUF has such rows side by side.
GGUF_ROWS = [0, 2, 1, 3]


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def as_gguf(held: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face tensors with heads of D = 4 rows, under GGUF's names and in GGUF's order of rows."""
    found = {}
    for name, tensor in held.items():
        if "q_proj" in name or "k_proj" in name:
            order = [4 * head + row for head in range(len(tensor) // 4) for row in GGUF_ROWS]
            tensor = np.ascontiguousarray(tensor[order])
        found[gguf_name(name)] = tensor
    return found


def write_gguf(
    path: Path,
    config: Mapping[str, Any] = CONFIG,
    held: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF file without a tokenizer; a tensor may be given as bytes and their type. `extra` metadata goes on top."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    for name, tensor in (as_gguf(tensors(config)) if held is None else held).items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """What a conversion of the checkpoint would store: the config, and the arrays by dotted path."""
    source = open_source(path)
    config, table, _ = llama.settle_tie(source)
    shapes = parameter_shapes(config)
    steps = plan(source, table, shapes, config)
    return config, flat(convert_tensors(source, steps, shapes, array_dtypes(steps, source), config))


def flat(tree: Mapping[str, Any], above: Sequence[str] = ()) -> dict[str, Any]:
    """Dotted path → leaf of nested dicts."""
    found = {}
    for name, node in tree.items():
        found |= flat(node, (*above, name)) if isinstance(node, Mapping) else {".".join((*above, name)): node}
    return found
