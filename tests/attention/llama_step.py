"""Compiles a decode step of Llama 3 8B for chips that are not here, and prints what it takes, as JSON.

    python tests/attention/llama_step.py v6e FOLDER     eight of them, heads and weights split over them
    python tests/attention/llama_step.py H200 FOLDER    one, or another GPU by its name

Run by tests in a process of its own, with the compiler on its path, which dumps what it did into FOLDER. Weights, state
and cache are shapes only: the engine's own jitted step, with the allocator and the sampler in it.
"""

import collections
import functools
import json
import math
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpaged import sampling, state
from jpaged.attention import ORDERS
from jpaged.cache import KVLayout
from jpaged.config import EngineConfig
from jpaged.plan import PlanShape
from jpaged.step import Steps
from models import partition
from models.config import ModelConfig
from models.llama import Llama
from pallas_kernels.gpu.chips import GPUS
from scripts.inspection.gpu import target

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
SEQUENCES, LENGTH, BLOCK = 64, 4096, 16


def step(backend: str, ranks: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
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
        ORDERS[backend],
        axis="heads" if ranks > 1 else None,
        num_ranks=ranks,
    )
    make = functools.partial(
        state.create, layout, max_num_seqs=SEQUENCES, max_model_len=LENGTH, max_beam_width=settings.max_beam_width
    )
    held = jax.eval_shape(lambda: make(samplers=sampling.create(rows, SEQUENCES)))
    held = _placed(held, PartitionSpec())
    held = held.replace(cache=_placed(held.cache, layout.partition))
    weights = jax.tree.map_with_path(functools.partial(_split, ranks), model.abstract_weights("bfloat16"))
    if backend == "gpu":  # as `models.load` gives them there
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), weights["layers"])
        weights["layers"] = (_placed(layer, PartitionSpec()),) * CONFIG.num_layers
    shape = PlanShape(
        slots=SEQUENCES, rows=SEQUENCES, tokens=0, admissions=0, sampler_width=rows.width, known=0, keeps=0,
        block_size=BLOCK,
    )  # fmt: skip
    packed = _placed(jax.ShapeDtypeStruct((shape.size,), jnp.int32), PartitionSpec())
    steps = Steps(model, backend=backend, vocab_limit=CONFIG.vocab_size, max_steps=8, rows=rows)
    return steps.decode, (weights, held, packed), {"shape": shape}


def _placed(tree: Any, spec: PartitionSpec) -> Any:
    where = NamedSharding(jax.sharding.get_mesh(), spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _split(ranks: int, path: Any, leaf: Any) -> Any:
    name = ".".join(str(key.key) for key in path)
    return _placed(leaf, partition.of(name, leaf.shape, axis="heads", num_ranks=ranks))


def _collectives(hlo: str) -> dict[str, int]:
    """How often each kind of traffic between chips stands in a program, by operation and what comes out of it."""
    found = re.findall(r"= (\w+\[[\d,]*\])\S* (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", hlo)
    return collections.Counter(f"{operation} {result}" for result, operation in found)


def _topology(chip: str) -> Any:
    if chip in GPUS:
        described = target.described(GPUS[chip])
        return topologies.get_topology_desc(platform="cuda", target_config=described, topology="1x1x1")
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:2x4")


if __name__ == "__main__":
    chip, folder = sys.argv[1:3]
    devices: Any = _topology(chip).devices
    # A second axis, if only of one: kernels must be told what to do along every axis of a mesh.
    mesh = Mesh([devices], ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    backend, platform = ("gpu", "cuda") if chip in GPUS else ("tpu", "tpu")
    with jax.set_mesh(mesh), jax.default_device(devices[0]):
        call, arguments, static = step(backend, len(devices))
        began = time.perf_counter()
        lowered = call.trace(*arguments, **static).lower(lowering_platforms=(platform,))
        compiled = lowered.compile({"xla_dump_to": folder} if folder else {})
        seconds = time.perf_counter() - began
    memory: Any = compiled.memory_analysis()
    cache = arguments[1].cache.data
    print(
        json.dumps(
            {
                "compile_s": round(seconds, 1),
                "temp_bytes": memory.temp_size_in_bytes,
                "cache_bytes": math.prod(cache.shape) * cache.dtype.itemsize // len(devices),
                "argument_bytes": memory.argument_size_in_bytes,
                # jaxlib 0.10 cannot read the text of what libtpu has compiled.
                "collectives": _collectives(compiled.as_text()) if jax.__version_info__ >= (0, 11) else None,
            }
        )
    )
