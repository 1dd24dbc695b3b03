"""Llama: the tables that fill our parameters from Hugging Face and from GGUF tensors.

The parameters themselves are those of models/llama.py. Matrices are [out, in] everywhere, so nothing is transposed.
"""

import re
from dataclasses import replace

import numpy as np

from models.config import ModelConfig
from models.conversions.rules import Part, Rule, Table
from models.sources.base import Source

_HF_EMBED, _HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _heads(config: ModelConfig, first: int, count: int) -> Part:
    """Of each KV head's rows in qkv, which are G + 2 heads: `count` of them."""
    return (slice(None), slice(first * config.head_dim, (first + count) * config.head_dim))


def _group(config: ModelConfig) -> int:
    return config.num_heads // config.num_kv_heads


def queries(config: ModelConfig) -> Part:
    """Of qkv, the G query heads of each KV head."""
    return _heads(config, 0, _group(config))


def keys(config: ModelConfig) -> Part:
    """Of qkv, the key of each KV head."""
    return _heads(config, _group(config), 1)


def values(config: ModelConfig) -> Part:
    """Of qkv, the value of each KV head."""
    return _heads(config, _group(config) + 1, 1)


def gate(config: ModelConfig) -> Part:
    """Of gate_up, the gate."""
    return (0,)


def up(config: ModelConfig) -> Part:
    """Of gate_up, what the gate multiplies."""
    return (1,)


def rotate_half_rows(tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rows of each head from GGUF's order, where rotated pairs are neighbours, to ours, where they are D/2 apart."""
    heads = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
    return heads.swapaxes(1, 2).reshape(tensor.shape)


HF = Table(
    rules=(
        Rule(_HF_EMBED, "embed.weight"),
        Rule("model.layers.{layer}.input_layernorm.weight", "layers.attn_norm.scale"),
        Rule("model.layers.{layer}.self_attn.q_proj.weight", "layers.attn.qkv.weight", queries),
        Rule("model.layers.{layer}.self_attn.k_proj.weight", "layers.attn.qkv.weight", keys),
        Rule("model.layers.{layer}.self_attn.v_proj.weight", "layers.attn.qkv.weight", values),
        Rule("model.layers.{layer}.self_attn.q_proj.bias", "layers.attn.qkv.bias", queries),
        Rule("model.layers.{layer}.self_attn.k_proj.bias", "layers.attn.qkv.bias", keys),
        Rule("model.layers.{layer}.self_attn.v_proj.bias", "layers.attn.qkv.bias", values),
        Rule("model.layers.{layer}.self_attn.o_proj.weight", "layers.attn.out.weight"),
        Rule("model.layers.{layer}.self_attn.o_proj.bias", "layers.attn.out.bias"),
        Rule("model.layers.{layer}.post_attention_layernorm.weight", "layers.mlp_norm.scale"),
        Rule("model.layers.{layer}.mlp.gate_proj.weight", "layers.mlp.gate_up.weight", gate),
        Rule("model.layers.{layer}.mlp.up_proj.weight", "layers.mlp.gate_up.weight", up),
        Rule("model.layers.{layer}.mlp.gate_proj.bias", "layers.mlp.gate_up.bias", gate),
        Rule("model.layers.{layer}.mlp.up_proj.bias", "layers.mlp.gate_up.bias", up),
        Rule("model.layers.{layer}.mlp.down_proj.weight", "layers.mlp.down.weight"),
        Rule("model.layers.{layer}.mlp.down_proj.bias", "layers.mlp.down.bias"),
        Rule("model.norm.weight", "final_norm.scale"),
        Rule(_HF_HEAD, "lm_head.weight"),
    ),
    ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),  # the config says the same
)

GGUF = Table(
    rules=(
        Rule("token_embd.weight", "embed.weight"),
        Rule("blk.{layer}.attn_norm.weight", "layers.attn_norm.scale"),
        Rule("blk.{layer}.attn_q.weight", "layers.attn.qkv.weight", queries, rotate_half_rows),
        Rule("blk.{layer}.attn_k.weight", "layers.attn.qkv.weight", keys, rotate_half_rows),
        Rule("blk.{layer}.attn_v.weight", "layers.attn.qkv.weight", values),
        Rule("blk.{layer}.attn_q.bias", "layers.attn.qkv.bias", queries, rotate_half_rows),
        Rule("blk.{layer}.attn_k.bias", "layers.attn.qkv.bias", keys, rotate_half_rows),
        Rule("blk.{layer}.attn_v.bias", "layers.attn.qkv.bias", values),
        Rule("blk.{layer}.attn_output.weight", "layers.attn.out.weight"),
        Rule("blk.{layer}.attn_output.bias", "layers.attn.out.bias"),
        Rule("blk.{layer}.ffn_norm.weight", "layers.mlp_norm.scale"),
        Rule("blk.{layer}.ffn_gate.weight", "layers.mlp.gate_up.weight", gate),
        Rule("blk.{layer}.ffn_up.weight", "layers.mlp.gate_up.weight", up),
        Rule("blk.{layer}.ffn_gate.bias", "layers.mlp.gate_up.bias", gate),
        Rule("blk.{layer}.ffn_up.bias", "layers.mlp.gate_up.bias", up),
        Rule("blk.{layer}.ffn_down.weight", "layers.mlp.down.weight"),
        Rule("blk.{layer}.ffn_down.bias", "layers.mlp.down.bias"),
        Rule("output_norm.weight", "final_norm.scale"),
        Rule("output.weight", "lm_head.weight"),
    ),
    ignored=(r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd"),  # the config has them as its rope's divisors
)

TABLES = {"hf": HF, "gguf": GGUF}


def settle_tie(source: Source) -> tuple[ModelConfig, Table, str | None]:
    """The config and the table to convert with, and a note, once it is seen whether the output head is the embedding.

    A checkpoint that says "tied" and holds a head all the same means the tie if both are equal to the bit. If they
    differ, its config is wrong: as transformers does since version 5, the head that is there is used.
    """
    config, table = source.config, TABLES[source.form]
    head = source.tensors.get(_HF_HEAD)
    if not config.tie_word_embeddings or head is None:
        return config, table, None
    embed = source.tensors.get(_HF_EMBED)
    readable = embed is not None and None not in (embed.dtype, head.dtype)
    same = embed == head and (not readable or _equal_bits(source.read(_HF_EMBED), source.read(_HF_HEAD)))
    if same:
        return config, replace(table, ignored=(*table.ignored, re.escape(_HF_HEAD))), None
    note = f"{source.path} says tie_word_embeddings and holds an {_HF_HEAD} of its own; that one is used."
    return replace(config, tie_word_embeddings=False), table, note


def _equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    bits = f"u{a.dtype.itemsize}"
    return np.array_equal(a.view(bits), b.view(bits))
