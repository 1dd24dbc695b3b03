"""The sampling settings of slots: one row of arrays each, and the packed form in which the host sends them.

It knows names, shapes and neutral values. What the settings do is in the other files of this package; how a request's
parameters become a row is in `packing`. Here E counts stop ids, W bad words and L the tokens of one.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.config import INT32_MAX, NO_TOKEN, EngineConfig
from jpaged.types import AnyArray


class SamplerRows(struct.PyTreeNode):
    """What R rows ask of the sampler. The state of an engine has one such row for each slot, idle slots included.

    Attributes:
      temperature_R: Divides the logits; under 1e-5 the row is greedy.
      top_p_R: The mass to keep; 1 keeps all.
      min_p_R: The least probability to keep, relative to the greatest; 0 keeps all.
      presence_R, frequency_R, repetition_R: Penalties as vLLM defines them; 0, 0 and 1 change nothing.
      top_k_R: Tokens to keep; 0 keeps all.
      logprobs_R: Alternatives to list with the sampled token's logprob, -1 for no logprobs at all.
      prompt_logprobs_R: The same for the tokens of the prompt.
      prompt_len_R: Tokens of the prompt.
      min_len_R: While a sequence is shorter than this, prompt included, its stop ids cannot be sampled.
      limit_R: A sequence of this many tokens, prompt included, is over.
      stream_R: Which of the continuations of its prompt the row is; each has a random stream of its own.
      seed_R2: The 64-bit seed, high word first: the data of a threefry key.
      stop_ids_RE: Token ids that end the sequence.
      bias_ids_RJ: Token ids to bias ...
      bias_RJ: ... and what to add to their logits.
      bad_words_RWL: Token sequences that the output must not have, right-aligned: the last id is the one to ban where
        those before it stand at the end of the output.
      max_logprobs: Static: how many alternatives `Sampled` has room for.

    Lists of ids are padded with NO_TOKEN.
    """

    temperature_R: Float32[Array, " R"]
    top_p_R: Float32[Array, " R"]
    min_p_R: Float32[Array, " R"]
    presence_R: Float32[Array, " R"]
    frequency_R: Float32[Array, " R"]
    repetition_R: Float32[Array, " R"]
    top_k_R: Int32[Array, " R"]
    logprobs_R: Int32[Array, " R"]
    prompt_logprobs_R: Int32[Array, " R"]
    prompt_len_R: Int32[Array, " R"]
    min_len_R: Int32[Array, " R"]
    limit_R: Int32[Array, " R"]
    stream_R: Int32[Array, " R"]
    seed_R2: UInt32[Array, "R 2"]
    stop_ids_RE: Int32[Array, "R E"]
    bias_ids_RJ: Int32[Array, "R J"]
    bias_RJ: Float32[Array, "R J"]
    bad_words_RWL: Int32[Array, "R W L"]
    max_logprobs: int = struct.field(pytree_node=False)


# A row with these values is greedy, changes no logit and never ends: idle slots and padding rows.
_NEUTRAL = {
    "temperature_R": np.float32(0),
    "top_p_R": np.float32(1),
    "min_p_R": np.float32(0),
    "presence_R": np.float32(0),
    "frequency_R": np.float32(0),
    "repetition_R": np.float32(1),
    "top_k_R": np.int32(0),
    "logprobs_R": np.int32(-1),
    "prompt_logprobs_R": np.int32(-1),
    "prompt_len_R": np.int32(0),
    "min_len_R": np.int32(0),
    "limit_R": np.int32(INT32_MAX),
    "stream_R": np.int32(0),
    "seed_R2": np.uint32(0),
    "stop_ids_RE": np.int32(NO_TOKEN),
    "bias_ids_RJ": np.int32(NO_TOKEN),
    "bias_RJ": np.float32(0),
    "bad_words_RWL": np.int32(NO_TOKEN),
}


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How a row is laid out in one vector of int32, so that a row costs one transfer; floats go by their bits.

    Attributes:
      max_logprobs: Alternatives that can be listed with a token.
      stop_ids: E, the most stop ids.
      biases: J, the most biased ids.
      bad_words: W, the most bad words, as token sequences.
      bad_word_tokens: L, the most tokens of one.
    """

    max_logprobs: int
    stop_ids: int
    biases: int
    bad_words: int
    bad_word_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int) -> "RowLayout":
        """The layout for an engine's settings. No token has more alternatives than the vocabulary has entries."""
        return cls(
            max_logprobs=min(config.max_logprobs, vocab_size),
            stop_ids=config.max_stop_token_ids,
            biases=config.max_logit_bias,
            bad_words=config.max_bad_words,
            bad_word_tokens=config.max_bad_word_tokens,
        )

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each field's shape in one row, in the order of the vector."""
        lists = {
            "seed_R2": (2,),
            "stop_ids_RE": (self.stop_ids,),
            "bias_ids_RJ": (self.biases,),
            "bias_RJ": (self.biases,),
            "bad_words_RWL": (self.bad_words, self.bad_word_tokens),
        }
        return {name: lists.get(name, ()) for name in _NEUTRAL}

    @functools.cached_property
    def width(self) -> int:
        """Length of the vector."""
        return sum(map(math.prod, self.shapes.values()))

    def pack(self, values: Mapping[str, np.ndarray | np.generic]) -> Int32[np.ndarray, " width"]:
        """One row as a vector, on the host. Fields that `values` does not name are neutral."""
        parts = []
        for name, shape in self.shapes.items():
            filled = np.full(shape, _NEUTRAL[name])
            filled[...] = values.get(name, filled)
            parts.append(filled.reshape(-1).view(np.int32))
        return np.concatenate(parts)

    def unpack(self, packed_RX: Int32[AnyArray, "R width"]) -> SamplerRows:
        """Rows from their vectors, on the device."""
        packed_RX = jnp.asarray(packed_RX)
        fields, start = {}, 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape)
            field = packed_RX[:, start:stop].reshape(packed_RX.shape[0], *shape)
            fields[name] = lax.bitcast_convert_type(field, _NEUTRAL[name].dtype)
            start = stop
        return SamplerRows(**fields, max_logprobs=self.max_logprobs)


def create(layout: RowLayout, num_slots: int) -> SamplerRows:
    """Neutral rows for `num_slots` idle slots."""
    return SamplerRows(
        **{name: jnp.full((num_slots, *shape), _NEUTRAL[name]) for name, shape in layout.shapes.items()},
        max_logprobs=layout.max_logprobs,
    )


def set_rows(slots: SamplerRows, rows: SamplerRows, slots_R: Int32[AnyArray, " R"]) -> SamplerRows:
    """Writes each row into the slot that `slots_R` names; a row for slot S, one past the end, is dropped."""
    changed = {name: getattr(slots, name).at[slots_R].set(getattr(rows, name), mode="drop") for name in _NEUTRAL}
    return slots.replace(**changed)


def gather(slots: SamplerRows, slots_R: Int32[AnyArray, " R"]) -> SamplerRows:
    """The rows of the slots that `slots_R` names; for slot S, one past the end, a neutral row."""
    taken = {
        name: getattr(slots, name).at[slots_R].get(mode="fill", fill_value=value) for name, value in _NEUTRAL.items()
    }
    return slots.replace(**taken)


def wants_prompt_logprobs(rows: SamplerRows) -> Bool[Array, " R"]:
    """Which rows ask for the logprobs of their prompt."""
    return jnp.asarray(rows.prompt_logprobs_R) >= 0
