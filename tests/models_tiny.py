"""The small random checkpoints under tests/data/golden/tiny, loaded once a process, and their answers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import models
from jpaged import LLM
from jpaged.buckets import Buckets
from jpaged.config import DType
from jpaged.model import LoadedModel
from models import stacks
from models.llama import Llama
from tests.house.tree import ROOT

TINY = ROOT / "tests" / "data" / "golden" / "tiny"

# The engine that most tests share: its steps take seconds to compile, and are then found in the tests' cache.
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 4,
}


def few_shapes(llm: LLM) -> LLM:
    """The same, with one size of each step instead of several: for settings that only one test has."""
    buckets = llm.engine.buckets
    llm.engine.buckets = Buckets(buckets.rows[-1:], buckets.prefill_rows[-1:], buckets.tokens[-1:])
    return llm


def is_whole(llm: LLM) -> bool:
    """Whether an engine that is idle has all its blocks, and no copy of one."""
    engine = llm.engine
    free = int(engine.state.paged.pool.num_free) + engine.scheduler.idle_blocks
    copies = engine.prefix_cache.stored + len(engine.swapper._space)
    return not engine.has_work and free == llm.config.num_blocks and copies == 0


@functools.cache
def tiny(family: str, dtype: DType = "float32") -> LoadedModel:
    """A checkpoint, converted and loaded as a user would; it has no tokenizer."""
    return models.load(str(TINY / family), dtype=dtype)


def stacked(loaded: LoadedModel) -> LoadedModel:
    """The same model with its layers in one stack, as TPUs run it."""
    return loaded._replace(weights={**loaded.weights, "layers": stack(loaded.weights["layers"])})


def apart(loaded: LoadedModel) -> LoadedModel:
    """The same model with each layer's weights apart, as GPUs run it."""
    layers = jax.tree.map(jnp.copy, stack(loaded.weights["layers"]))  # what others hold too must stay
    return loaded._replace(weights={**loaded.weights, "layers": stacks.apart(layers)})


def stack(layers: Any) -> Any:
    """The inverse of `stacks.unstack`."""

    def join(leaf: Any) -> Any:
        return jnp.stack(leaf.of_layer) if isinstance(leaf, stacks.Matrices) else leaf

    return jax.tree.map(join, layers, is_leaf=lambda leaf: isinstance(leaf, stacks.Matrices))


def with_bfloat16_frequencies(loaded: LoadedModel) -> LoadedModel:
    """The same model with rotary frequencies rounded to bfloat16, as the reference behind golden.json had them."""

    class Rounded(Llama):
        def __init__(self, config):
            super().__init__(config)
            self._frequencies_C = self._frequencies_C.astype(ml_dtypes.bfloat16).astype(np.float32)

    return loaded._replace(model=Rounded(loaded.config))


@functools.cache
def golden(family: str, name: str = "golden") -> list[dict]:
    """The cases of a reference run; "golden_float32" is the one with exact frequencies."""
    return json.loads(Path(TINY / family / f"{name}.json").read_text())["cases"]
