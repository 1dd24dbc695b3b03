"""What a decoder model is made of, in numbers: one frozen, self-validating dataclass.

Read from a Hugging Face config.json, from GGUF metadata, or from our own JSON. Knows neither weights nor JAX. Whatever
would make a model compute something else than was trained is refused here, all faults in one error.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.rope_config import RopeConfig, rope_from_gguf, rope_from_hf
from models.sources.fields import Faults, Fields, read_json

FAMILIES = ("llama",)
FORMAT, VERSION = "jpaged-model", 1  # what our own JSON says of itself
_WHAT = "The model's config"
_WAY_OUT = "correct it or fetch it again; for what is not supported, try another model"
_MOST_IDS = 2**31 - 1  # ids and positions are int32 on the device
_MOST_WIDE = 2**24  # other sizes: more than any model has, and few enough that a damaged config fills no memory

# What the sources call our fields, where they differ.
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
_GGUF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the constants of one model. Letters as in jpaged/types.py.

    Attributes:
      vocab_size: V. hidden_size: E. intermediate_size: F. num_layers: L. num_heads: H. num_kv_heads: K, a divisor
        of H. head_dim: D, even; H * D need not be E.
      rms_norm_eps: added to the mean square.
      rope: the rotary embedding.
      max_position_embeddings: tokens that the model was trained to attend over.
      family: which of `models`' families computes it.
      tie_word_embeddings: the output head is the embedding.
      attention_bias: query, key, value and output projections have biases.
      mlp_bias: gate, up and down projections have biases.
      hidden_act: the gate's activation.
      bos_token_id: the token that starts a sequence, if any.
      eos_token_ids: the tokens that end one.

    Raises:
      ModelError: values that fit no model, all named.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    family: str = "llama"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        faults = self._faults()
        if faults:
            raise Faults(_WHAT, faults, _WAY_OUT)

    def _faults(self) -> list[str]:
        ids = dict.fromkeys(("vocab_size", "max_position_embeddings"), _MOST_IDS)
        widths = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        faults = [
            f"{name}={getattr(self, name)} must be from 1 to {most}"
            for name, most in (ids | dict.fromkeys(widths, _MOST_WIDE)).items()
            if not 1 <= getattr(self, name) <= most
        ]
        if not faults:
            if self.num_heads % self.num_kv_heads:
                faults.append(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
            if self.head_dim % 2:
                faults.append(f"head_dim={self.head_dim} must be even, since rotation works on pairs")
            if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
                faults.append(
                    f"rope has {len(self.rope.divisors)} divisors where head_dim={self.head_dim} needs half as many"
                )
            tokens = (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id]))
            outside = sorted({token for token in tokens if not 0 <= token < self.vocab_size})
            if outside:
                faults.append(f"bos or eos tokens {outside} are outside of vocab_size={self.vocab_size}")
        if not self.rms_norm_eps > 0:
            faults.append(f"rms_norm_eps={self.rms_norm_eps} must be positive")
        if self.family not in FAMILIES:
            faults.append(f"family={self.family!r} is not one of {', '.join(FAMILIES)}")
        if self.hidden_act != "silu":
            faults.append(f"hidden_act={self.hidden_act!r} is not supported; only silu is")
        return faults

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, what: str = _WHAT) -> "ModelConfig":
        """From a parsed Hugging Face config.json; defaults are those of its LlamaConfig.

        Args:
          config: the object in it.
          what: names it in errors.

        Raises:
          ModelError: fields that are missing, malformed, or ask for what is not supported, all named.
        """
        f = Fields(config, [])
        if f.text("model_type", None) not in FAMILIES:
            f.reject("model_type", f"is not supported; supported are {', '.join(FAMILIES)}")
            raise Faults(what, f.problems, _WAY_OUT)  # the fields of another family would only add noise
        _reject_unsupported_hf(f)
        hidden_size, num_heads = f.integer("hidden_size"), f.integer("num_attention_heads")
        head_dim = f.integer("head_dim", None)
        if head_dim is None:
            head_dim = hidden_size // max(num_heads, 1)
            if head_dim * num_heads != hidden_size and not f.problems:
                f.reject("hidden_size", f"must be a multiple of num_attention_heads={num_heads}, or head_dim be given")
        return _built(
            cls,
            f,
            what,
            _HF_NAMES,
            vocab_size=f.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=f.integer("intermediate_size"),
            num_layers=f.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=f.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rms_norm_eps=f.number("rms_norm_eps", 1e-6),
            max_position_embeddings=f.integer("max_position_embeddings", 2048),
            rope=rope_from_hf(f),
            tie_word_embeddings=f.flag("tie_word_embeddings", False),
            attention_bias=f.flag("attention_bias", False),
            mlp_bias=f.flag("mlp_bias", False),
            hidden_act=f.text("hidden_act", "silu"),
            bos_token_id=f.integer("bos_token_id", None),
            eos_token_ids=f.integers("eos_token_id"),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        rope_divisors: Sequence[float] = (),
        *,
        what: str = _WHAT,
    ) -> "ModelConfig":
        """From a GGUF file's metadata; what it leaves unsaid is read off the tensors that are there.

        Args:
          metadata: key → value.
          shapes: tensor name → shape, slowest axis first.
          rope_divisors: the values of `rope_freqs.weight`, where the file has that tensor.
          what: names the file in errors.

        Raises:
          ModelError: fields that are missing, malformed, or ask for what is not supported, all named.
        """
        f = Fields(metadata, [])
        family = f.text("general.architecture", None)
        if family not in FAMILIES:
            f.reject("general.architecture", f"is not supported; supported are {', '.join(FAMILIES)}")
            raise Faults(what, f.problems, _WAY_OUT)
        hidden_size = f.integer(f"{family}.embedding_length")
        num_heads = f.integer(f"{family}.attention.head_count")
        head_dim = f.integer(f"{family}.attention.key_length", hidden_size // max(num_heads, 1))
        if f.integer(f"{family}.attention.value_length", head_dim) != head_dim:
            f.reject(f"{family}.attention.value_length", f"must equal the key length, {head_dim}")
        if f.integer(f"{family}.rope.dimension_count", head_dim) != head_dim:
            f.reject(f"{family}.rope.dimension_count", f"is not supported; only a full rotation ({head_dim}) is")
        if f.integer("split.count", 1) > 1:
            f.reject("split.count", "is not supported; merge the parts into one file first")
        for name in (f"{family}.expert_count", f"{family}.attention.sliding_window"):
            if f.integer(name, 0):
                f.reject(name, "is not supported")
        ends = [f.integer(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
        return _built(
            cls,
            f,
            what,
            {field: f"{family}.{key}" for field, key in _GGUF_NAMES.items()},
            family=family,
            vocab_size=f.integer(f"{family}.vocab_size", next(iter(shapes.get("token_embd.weight", ())), 0)),
            hidden_size=hidden_size,
            intermediate_size=f.integer(f"{family}.feed_forward_length"),
            num_layers=f.integer(f"{family}.block_count"),
            num_heads=num_heads,
            num_kv_heads=f.integer(f"{family}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=f.number(f"{family}.attention.layer_norm_rms_epsilon"),
            max_position_embeddings=f.integer(f"{family}.context_length"),
            rope=rope_from_gguf(f, family, rope_divisors),
            tie_word_embeddings="output.weight" not in shapes,
            attention_bias=any(".attn_" in name and name.endswith(".bias") for name in shapes),
            mlp_bias=any(".ffn_" in name and name.endswith(".bias") for name in shapes),
            bos_token_id=f.integer("tokenizer.ggml.bos_token_id", None),
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        )

    def to_json(self) -> str:
        """Format, version and every field, as an indented JSON object; of a file that holds it, `read` makes an equal
        value."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def read(cls, path: Path) -> "ModelConfig":
        """What `to_json` gave and somebody wrote into a file.

        Raises:
          ModelError: no such file, not such an object, of another version, or with fields missing, unknown or
            malformed, all named.
        """
        values = read_json(path)
        origin = {name: values.pop(name, None) for name in ("format", "version")}
        if origin != {"format": FORMAT, "version": VERSION}:
            fault = f"it says {origin}, and this version of jpaged reads {FORMAT!r}, {VERSION}"
            raise Faults(f"{path}", [fault], "convert the checkpoint again")
        f = Fields(values, [])
        rope = f.inner("rope")
        settings = {name: value for name, value in _own_fields(cls, f).items() if name != "rope"}
        rope_settings = _own_fields(RopeConfig, rope)
        problems = f.problems
        if not problems:
            try:
                return cls(rope=RopeConfig(**rope_settings), **settings)
            except Faults as error:
                problems = list(error.faults)
        raise Faults(f"{path}", problems, "convert the checkpoint again")


def _reject_unsupported_hf(f: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if f.has(name):
            f.note(f"{name} is present, and quantised Hugging Face checkpoints are not supported")
    if f.flag("rope_interleaved", False):
        f.reject("rope_interleaved", "is not supported")
    architectures = f.texts("architectures") or ("LlamaForCausalLM",)
    if not any(name.lower() == "llamaforcausallm" for name in architectures):
        f.reject("architectures", "is not supported; only LlamaForCausalLM is")


def _own_fields(cls: type, f: Fields) -> dict[str, Any]:
    """The fields of one of our dataclasses as our own JSON spells them; missing and unknown ones become problems."""
    readers = {
        int: f.integer,
        float: f.number,
        str: f.text,
        bool: f.flag,
        int | None: lambda name: f.integer(name, None),
        float | None: lambda name: f.number(name, None),
        tuple[int, ...]: f.integers,
        tuple[float, ...]: f.numbers,
        RopeConfig: f.mapping,
    }
    types = typing.get_type_hints(cls)
    f.reject_others(types)
    return {name: readers[kind](name) for name, kind in types.items()}


def _built(cls: type[ModelConfig], f: Fields, what: str, spelling: Mapping[str, str], **settings: Any) -> Any:
    """The config, or one error that names the problems met in reading it and those that its own validation finds, by
    the names that the source's own `spelling` has for our fields."""
    problems = list(f.problems)
    if f.readable:
        try:
            config = cls(**settings)
        except Faults as error:
            problems += [re.sub(r"\w+(?==)", lambda own: spelling.get(own[0], own[0]), fault) for fault in error.faults]
        else:
            if not problems:
                return config
    raise Faults(what, problems, _WAY_OUT)
