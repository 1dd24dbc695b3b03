"""Compiles a decode step of Llama 3 8B for eight v6e chips that are not here, and prints what it takes, as JSON.

Run by test_sharding.py in a process of its own, with libtpu on its path. Weights, state and cache are shapes only:
the engine's own jitted step, with the allocator and the sampler in it, heads and weights split over the chips.
"""

import collections
import functools
import json
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpaged import sampling, state
from jpaged.attention import WORDS
from jpaged.cache import KVLayout
from jpaged.config import EngineConfig
from jpaged.plan import PlanShape
from jpaged.step import Steps
from models import partition
from models.config import ModelConfig
from models.llama import Llama

CONFIG = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
)
RANKS, SEQUENCES, LENGTH, BLOCK = 8, 64, 4096, 16


def step() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The jitted step, and its arguments as shapes on the mesh in use."""
    model, settings = Llama(CONFIG), EngineConfig(max_num_seqs=SEQUENCES, decode_steps=8)
    rows = sampling.RowLayout.of(settings, CONFIG.vocab_size)
    layout = KVLayout(
        CONFIG.num_layers,
        SEQUENCES * LENGTH // BLOCK,
        BLOCK,
        CONFIG.num_kv_heads,
        CONFIG.head_dim,
        "bfloat16",
        WORDS,
        axis="heads",
        num_ranks=RANKS,
    )
    make = functools.partial(
        state.create, layout, max_num_seqs=SEQUENCES, max_model_len=LENGTH, max_beam_width=settings.max_beam_width
    )
    held = jax.eval_shape(lambda: make(samplers=sampling.create(rows, SEQUENCES)))
    held = _placed(held, PartitionSpec())
    held = held.replace(cache=_placed(held.cache, layout.partition))
    weights = jax.tree.map_with_path(_split, model.abstract_weights("bfloat16"))
    shape = PlanShape(
        slots=SEQUENCES, rows=SEQUENCES, tokens=0, admissions=0, sampler_width=rows.width, known=0, keeps=0,
        block_size=BLOCK,
    )  # fmt: skip
    packed = _placed(jax.ShapeDtypeStruct((shape.size,), jnp.int32), PartitionSpec())
    steps = Steps(model, backend="tpu", vocab_limit=CONFIG.vocab_size, max_steps=8, rows=rows)
    return steps.decode, (weights, held, packed), {"shape": shape}


def _placed(tree: Any, spec: PartitionSpec) -> Any:
    where = NamedSharding(jax.sharding.get_mesh(), spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _split(path: Any, leaf: Any) -> Any:
    name = ".".join(str(key.key) for key in path)
    return _placed(leaf, partition.of(name, leaf.shape, axis="heads", num_ranks=RANKS))


def _collectives(hlo: str) -> dict[str, int]:
    """How often each kind of traffic between chips stands in a program, by operation and what comes out of it."""
    found = re.findall(r"= (\w+\[[\d,]*\])\S* (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", hlo)
    return collections.Counter(f"{operation} {result}" for result, operation in found)


if __name__ == "__main__":
    devices: Any = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices
    # A second axis, if only of one: kernels must be told what to do along every axis of a mesh.
    mesh = Mesh([devices], ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        call, arguments, static = step()
        began = time.perf_counter()
        compiled = call.trace(*arguments, **static).lower(lowering_platforms=("tpu",)).compile()
        seconds = time.perf_counter() - began
    memory: Any = compiled.memory_analysis()
    cache = arguments[1].cache.data
    print(
        json.dumps(
            {
                "compile_s": round(seconds, 1),
                "temp_bytes": memory.temp_size_in_bytes,
                "cache_bytes": math.prod(cache.shape) * cache.dtype.itemsize // RANKS,
                "argument_bytes": memory.argument_size_in_bytes,
                "collectives": _collectives(compiled.as_text()),
            }
        )
    )
