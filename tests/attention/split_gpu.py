"""Compiles attention whose heads are split over two H200 that are not here, and prints what it takes, as JSON.

Run by test_gpu_programs.py in a process of its own, with the compiler on its path.
"""

import json
import re
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpaged import paged_attention
from jpaged.cache import HEADS, KVCache, KVLayout, copy_blocks
from pallas_kernels.gpu.chips import GPUS
from scripts.inspection.gpu import target

LAYOUT = KVLayout(2, 512, 16, 8, 128, "bfloat16", HEADS, axis="heads", num_ranks=2)


def call(cache, q, kv, tables, lens, starts, src, dst):
    out, cache = paged_attention(q, kv, kv, cache, 1, tables, lens, starts, max_q_len=1, backend="gpu")
    return out, copy_blocks(cache, src, dst)


if __name__ == "__main__":
    topology: Any = topologies.get_topology_desc(
        platform="cuda", target_config=target.described(GPUS["H200"]), topology="1x2x1"
    )
    mesh = Mesh(topology.devices, ("heads",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), jax.default_device(topology.devices[0]):

        def shaped(shape: tuple[int, ...], dtype: str, spec: Any = None) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))

        tokens = [shaped((8, heads, 128), "bfloat16") for heads in (32, 8)]
        rows = [shaped(shape, "int32") for shape in ((8, 64), (8,), (9,), (4,), (4,))]
        cache = KVCache(shaped(LAYOUT.shape, LAYOUT.stored_dtype, LAYOUT.partition), LAYOUT)
        traced = jax.jit(call, donate_argnums=0).trace(cache, *tokens, *rows)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    memory: Any = compiled.memory_analysis()
    size = LAYOUT.bytes_per_block * LAYOUT.num_blocks // LAYOUT.num_ranks
    traffic = re.findall(r"(all-\w+|collective-permute|reduce-scatter)", compiled.as_text() or "")
    print(json.dumps({"temp_bytes": memory.temp_size_in_bytes, "cache_bytes": size, "traffic": traffic}))
