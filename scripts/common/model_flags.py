"""Flags that choose a model and size the engine, and the loading of both. Their defaults are `EngineConfig`'s."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, get_args

from absl import flags

from jpaged import config

from . import command, compile_cache, interrupt
from .progress import Progress

if TYPE_CHECKING:
    from jpaged.llm import LLM

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(config.EngineConfig)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def _define_integer(name: str, help: str) -> None:
    flags.DEFINE_integer(name, _DEFAULTS[name], help, lower_bound=1)


flags.DEFINE_string(
    "model",
    "default",
    "What to run: 'default' (SmolLM2-135M-Instruct, 98 MB, fetched once; with what is made of it, 600 MB are kept in "
    "~/.cache/jpaged), a Hugging Face directory, a GGUF file, a "
    "directory made by convert.py, or FAMILY:NAME of another package that is installed.",
)
flags.DEFINE_enum("dtype", _DEFAULTS["dtype"], get_args(config.DType), "Of weights, activations and KV.")
flags.DEFINE_enum(
    "backend",
    _DEFAULTS["backend"],
    get_args(config.Backend),
    "Attention backend; without this flag, the best for the machine. A backend that is named never falls back. "
    "tpu_interpret, for tests, runs the TPU's kernels on any machine, and is slow: try it with "
    "--max_num_seqs=1 --max_model_len=32 --max_num_batched_tokens=8 --decode_steps=1.",
)
_define_integer("block_size", "Tokens in a KV block.")
_define_integer("num_blocks", "Blocks in the pool; without this flag, by memory.")
flags.DEFINE_string("kv_cache_memory", None, "Memory for KV, another way to say --num_blocks: 512M, 2G.")
_define_integer("max_num_seqs", "Sequences that run at once; the others wait.")
_define_integer(
    "max_model_len", "The most tokens of a sequence, prompt and output; without this flag, the model's own."
)
_define_integer("max_num_batched_tokens", "The most tokens of one step; longer prompts are taken in chunks.")
_define_integer("decode_steps", "Tokens that each sequence gets from one dispatch.")
flags.DEFINE_boolean(
    "enable_prefix_caching",
    _DEFAULTS["enable_prefix_caching"],
    "Keep KV blocks for texts that begin in the same way; on unless --noenable_prefix_caching.",
)
flags.DEFINE_enum(
    "scheduling_policy",
    _DEFAULTS["scheduling_policy"],
    get_args(config.SchedulingPolicy),
    "Whom to serve first: whoever came first, or the requests of the lowest priority.",
)
flags.DEFINE_enum(
    "preemption_mode",
    _DEFAULTS["preemption_mode"],
    get_args(config.PreemptionMode),
    "When memory runs short and a request has to pause: compute its tokens again, or swap their KV to the host.",
)
flags.DEFINE_string("swap_space", "4G", "Memory of the host for that: 512M, 2G.")
flags.DEFINE_integer("seed", _DEFAULTS["seed"], "What sampling derives its randomness from.")

MODEL = ("model", "dtype", "backend")
ENGINE = (
    "block_size",
    "num_blocks",
    "kv_cache_memory",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "decode_steps",
    "enable_prefix_caching",
    "scheduling_policy",
    "preemption_mode",
    "swap_space",
)


def engine_config() -> config.EngineConfig:
    """The engine that the flags ask for.

    Raises:
      ValueError: naming every flag that is wrong.
    """
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in (*MODEL[1:], *ENGINE, "seed")}
    for name in ("kv_cache_memory", "swap_space"):
        given[name] = given[name] and parse_size(name, given[name])
    return config.EngineConfig(**given)


def parse_size(name: str, text: str) -> int:
    """The bytes that a flag asks for: "512M" is 512 · 2²⁰; so are "512MB" and "512MiB".

    Raises:
      ValueError: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{name}={text!r} must be a number of bytes, or one with K, M, G or T; try 512M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def load_llm(settings: config.EngineConfig) -> LLM:
    """The model that the flags name, in an engine, with the persistent compilation cache turned on.

    Raises:
      ValueError: there is no such model, or it or the machine cannot serve these settings.
    """
    with Progress("loading the model"):
        command.start_jax()
        with interrupt.leaving_at_once():
            from jpaged.llm import LLM
            from models.cache import default_cache_dir

        nothing_kept = compile_cache.enable(default_cache_dir() / "xla")
        llm = LLM(flags.FLAGS.model, **dataclasses.asdict(settings))
    if nothing_kept:
        command.complain(nothing_kept)
    return llm
