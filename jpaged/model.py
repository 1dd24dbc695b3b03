"""What the engine asks of a model, and what it hands to one.

Knows no family: `models` implements the `Model` protocol, and other packages can. A model computes; it never sees a
request, a slot or the allocator, only an `AttentionView` through which its layers attend.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from jpaged.attention import Rows, paged_attention, prepare, token_rows
from jpaged.cache import KVCache, Scalar
from jpaged.tokenizer.protocol import Tokenizer

Weights: TypeAlias = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The numbers of a model that memory, batching and sampling depend on.

    Attributes:
      name: For messages and reports.
      num_layers, num_kv_heads, head_dim: Of the KV cache: L, K, D.
      num_heads: Query heads: H.
      vocab_size: Ids that the logits cover, V.
      max_model_len: Positions that the model was trained for.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int


class AttentionView(struct.PyTreeNode):
    """A ragged batch as a model's layers see it: attend, and take the view that comes back.

    Attributes:
      cache: The KV memory of all layers.
      block_tables_RM, kv_lens_R, cu_q_lens_R1: See `paged_attention`.
      backend: Static.
      max_q_len: Static; see `paged_attention`.
      work: What `prepared` adds.
    """

    cache: KVCache
    block_tables_RM: Int32[Array, "R M"]
    kv_lens_R: Int32[Array, " R"]
    cu_q_lens_R1: Int32[Array, " R1"]
    backend: str | None = struct.field(pytree_node=False, default=None)
    max_q_len: int | None = struct.field(pytree_node=False, default=None)
    work: Any = None

    def prepared(self, spec: ModelSpec, num_tokens: int) -> AttentionView:
        """The same with what the layers of ``num_tokens`` queries share computed: once, outside of a scan over them."""
        work = prepare(
            self.cache.layout,
            self.block_tables_RM,
            self.kv_lens_R,
            self.cu_q_lens_R1,
            num_heads=spec.num_heads,
            num_tokens=num_tokens,
            max_q_len=self.max_q_len,
            backend=self.backend,
        )
        return self.replace(work=work)

    def attend(
        self,
        layer: Scalar,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        **options: Any,
    ) -> tuple[Float[Array, "T H D"], AttentionView]:
        """`paged_attention` of this batch in one layer; ``options`` are its keywords, such as the window."""
        out, cache = paged_attention(
            q,
            k,
            v,
            self.cache,
            layer,
            self.block_tables_RM,
            self.kv_lens_R,
            self.cu_q_lens_R1,
            max_q_len=self.max_q_len,
            backend=self.backend,
            work=self.work,
            **options,
        )
        return out, self.replace(cache=cache)

    def rows(self, num_tokens: int) -> Rows:
        """The row and position of each of the batch's ``num_tokens`` query tokens."""
        return token_rows(self.kv_lens_R, self.cu_q_lens_R1, num_tokens)


@runtime_checkable
class Model(Protocol):
    """A decoder: pure functions of its weights."""

    @property
    def spec(self) -> ModelSpec: ...

    def hidden(
        self, weights: Weights, tokens_T: Int32[Array, " T"], positions_T: Int32[Array, " T"], view: AttentionView
    ) -> tuple[Float[Array, "T E"], AttentionView]:
        """The last hidden state of each token, ready for `logits`; the view's cache then holds the tokens' KV."""
        ...

    def logits(self, weights: Weights, hidden_RE: Float[Array, "R E"]) -> Float32[Array, "R V"]:
        """Scores of the next token after each hidden state."""
        ...


class LoadedModel(NamedTuple):
    """A model with all that running it takes.

    Attributes:
      model: Computes.
      weights: What it computes with, on the device, in the form that suits the platform.
      tokenizer: None for a model that runs on ids alone.
      config: The family's own configuration.
    """

    model: Model
    weights: Weights
    tokenizer: Tokenizer | None
    config: Any

    @property
    def sampled_vocab(self) -> int:
        """Ids from here on are never sampled: the tokenizer does not know them."""
        vocab = self.model.spec.vocab_size
        return vocab if self.tokenizer is None else min(vocab, self.tokenizer.vocab_size)
