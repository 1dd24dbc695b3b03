"""The Llama family: what its decoder layer computes, and the whole as a `Model`.

Layers run under `lax.scan`, each taking its weights from all layers', or one after another where each has its own
(`stacks`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jpaged.model import AttentionView, ModelSpec, Weights
from jpaged.weights import shapes
from models import stacks
from models.config import ModelConfig
from models.layers import Embedding, GatedMLP, Linear, Norm, rotate, rotations


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions, through the view.

    Query, key and value weights are one matrix, per KV head its G queries, its key and its value: one product, one
    rotation, and a shard by KV heads keeps what belongs together.
    """

    def __init__(self, config: ModelConfig, dtype: str):
        group = config.num_heads // config.num_kv_heads
        bias = config.attention_bias
        self.qkv = Linear((config.num_kv_heads, (group + 2) * config.head_dim, config.hidden_size), bias, dtype)
        self.out = Linear((config.hidden_size, config.num_heads * config.head_dim), bias, dtype)
        self.head_dim = config.head_dim

    def __call__(
        self, x_TE: Float[Array, "T E"], layer: Any, turns: tuple[Array, Array], view: AttentionView
    ) -> tuple[Float[Array, "T E"], AttentionView]:
        qkv_TKI = self.qkv(x_TE)
        num_tokens, num_kv_heads = qkv_TKI.shape[:2]
        qkv_TKID = qkv_TKI.reshape(num_tokens, num_kv_heads, -1, self.head_dim)
        qk_TKID = rotate(qkv_TKID[:, :, :-1], *turns)
        q_THD = qk_TKID[:, :, :-1].reshape(num_tokens, -1, self.head_dim)
        out_THD, view = view.attend(layer, q_THD, qk_TKID[:, :, -1], qkv_TKID[:, :, -1])
        return self.out(out_THD.reshape(num_tokens, -1)), view


class Layer(nnx.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self, config: ModelConfig, dtype: str):
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, dtype)
        self.mlp_norm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, dtype)

    def __call__(
        self, x_TE: Float[Array, "T E"], layer: Any, turns: tuple[Array, Array], view: AttentionView
    ) -> tuple[Float[Array, "T E"], AttentionView]:
        attended_TE, view = self.attn(self.attn_norm(x_TE), layer, turns, view)
        x_TE = x_TE + attended_TE
        return x_TE + self.mlp(self.mlp_norm(x_TE)), view


class Outer(nnx.Module):
    """What stands around the layers."""

    def __init__(self, config: ModelConfig, dtype: str):
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.final_norm = Norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear((config.vocab_size, config.hidden_size), False, dtype)
        )


class Llama:
    """The family as a `Model`: pure functions of weights, nested dicts (docs/architecture.md, parameter tree).

    Args:
      config: Its numbers.
      name: For messages and reports.
    """

    def __init__(self, config: ModelConfig, name: str = "llama"):
        self.config = config
        self.spec = ModelSpec(
            name=name,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
        )
        self._layer, _ = nnx.split(nnx.eval_shape(functools.partial(Layer, config, "float32")))
        self._outer, _ = nnx.split(nnx.eval_shape(functools.partial(Outer, config, "float32")))
        self._frequencies_C, self._attention_factor = config.rope.inverse_frequencies(config.head_dim)

    def abstract_weights(self, dtype: str = "float32") -> Weights:
        """Shapes and dtypes of the weights, layers stacked: what a checkpoint holds."""
        outer = nnx.to_pure_dict(nnx.split(nnx.eval_shape(functools.partial(Outer, self.config, dtype)))[1])
        layer = nnx.to_pure_dict(nnx.split(nnx.eval_shape(functools.partial(Layer, self.config, dtype)))[1])
        stack = functools.partial(_stacked, self.config.num_layers)
        return {**outer, "layers": jax.tree.map(stack, layer)}

    def hidden(
        self, weights: Weights, tokens_T: Int32[Array, " T"], positions_T: Int32[Array, " T"], view: AttentionView
    ) -> tuple[Float[Array, "T E"], AttentionView]:
        """See `Model.hidden`."""
        outer, layers = self._merged_outer(weights), weights["layers"]
        turns = rotations(positions_T, self._frequencies_C, self._attention_factor)
        x_TE = outer.embed(tokens_T)
        if isinstance(layers, tuple):
            for index, one in enumerate(layers):
                x_TE, view = nnx.merge(self._layer, one)(x_TE, index, turns, view)
        else:

            def body(carry: tuple[Array, AttentionView], index: Int32[Array, ""]) -> tuple[tuple, None]:
                one = nnx.merge(self._layer, stacks.layer(layers, index))
                return one(carry[0], index, turns, carry[1]), None

            (x_TE, view), _ = lax.scan(body, (x_TE, view), jnp.arange(self.config.num_layers, dtype=jnp.int32))
        return outer.final_norm(x_TE), view

    def logits(self, weights: Weights, hidden_RE: Float[Array, "R E"]) -> Float32[Array, "R V"]:
        """See `Model.logits`."""
        outer = self._merged_outer(weights)
        if outer.lm_head is None:
            return outer.embed.attend(hidden_RE)
        return stacks.multiply(hidden_RE, outer.lm_head.weight.get_value(), "float32")

    def _merged_outer(self, weights: Weights) -> Outer:
        return nnx.merge(self._outer, {name: part for name, part in weights.items() if name != "layers"})


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Dotted name → shape of every parameter, layers stacked on axis 0: what a conversion has to fill."""
    return shapes(Llama(config).abstract_weights())


def _stacked(num_layers: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype)
