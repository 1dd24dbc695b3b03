"""Our weights as a Hugging Face directory, so that a peer runs the very same ones.

The conversion table of the family, read backwards. Everything is written as float32, which holds bfloat16 exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jpaged.model import LoadedModel
from models import stacks
from models.config import ModelConfig
from models.conversions import llama
from models.errors import ModelError
from models.llama import parameter_shapes


def export(loaded: LoadedModel, folder: Path) -> None:
    """Writes config.json and model.safetensors; the folder must exist.

    Raises:
      ModelError: the model has something that a Hugging Face config cannot say.
    """
    (folder / "config.json").write_text(json.dumps(hf_config(loaded.config), indent=2), encoding="utf-8")
    save_file(hf_tensors(loaded.config, loaded.weights), folder / "model.safetensors", metadata={"format": "pt"})


def hf_tensors(config: ModelConfig, weights: Any) -> dict[str, np.ndarray]:
    """Every tensor by its Hugging Face name, float32."""
    tensors, held = {}, parameter_shapes(config)
    for rule in llama.HF.rules:
        if rule.target not in held:
            continue
        path = rule.target.split(".")
        if path[0] == "layers":
            for layer in range(config.num_layers):
                whole = _layer(weights["layers"], path[1:], layer)
                tensors[rule.source.replace("{layer}", str(layer))] = _flat(whole[rule.part(config)], path[-1])
        else:
            tensors[rule.source] = _flat(_leaf(weights, path), path[-1])
    return tensors


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config as transformers reads it.

    Raises:
      ModelError: a rotary embedding of another type than default, linear and llama3.
    """
    if config.rope.type not in ("default", "linear", "llama3"):
        raise ModelError(
            f"rope type {config.rope.type!r} is not written to Hugging Face configs; try a model with another one"
        )
    rope = {"rope_type": config.rope.type, "rope_theta": config.rope.theta}
    for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if config.rope.type != "default" and getattr(config.rope, name) is not None:
            rope[name] = getattr(config.rope, name)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": config.hidden_act,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "dtype": "float32",
    }


def _layer(layers: Any, path: list[str], layer: int) -> np.ndarray:
    """One layer's array, however layers are held."""
    if isinstance(layers, tuple):
        return _leaf(layers[layer], path)
    for name in path:
        layers = layers[name]
    one = layers.of_layer[layer] if isinstance(layers, stacks.Matrices) else layers[layer]
    return np.asarray(jax.device_get(one)).astype(np.float32)


def _leaf(tree: Any, path: list[str]) -> np.ndarray:
    for name in path:
        tree = tree[name]
    return np.asarray(jax.device_get(tree)).astype(np.float32)


def _flat(part: np.ndarray, name: str) -> np.ndarray:
    """Leading axes as one: a matrix for a weight, a vector for the rest."""
    return np.ascontiguousarray(part.reshape(-1, part.shape[-1]) if name == "weight" else part.reshape(-1))
