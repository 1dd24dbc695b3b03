"""Compiles one named case for a GPU, on a machine that has none, and prints what came of it as a line of JSON.

    python scripts/inspection/gpu/compiling.py H200 FOLDER PARENT '{"case": "decode_bf16_b16"}'

The compilers dump into FOLDER, XLA beneath xla and Mosaic beneath mosaic. When the process PARENT has ended, this ends
and the folder goes. Run by `programs` in a process for each case and chip: Mosaic keeps what it compiled, and mixes up
chips in one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inspection import child, described
from inspection.gpu import target
from pallas_kernels import cases, tuning
from pallas_kernels.gpu.chips import GPUS
from pallas_kernels.gpu.tiling import Tiling


def compile_case(chip: str, case: cases.Case, tiling: Tiling | None, folder: str) -> dict[str, Any]:
    """Seconds and bytes of a case on a chip."""
    topology: Any = topologies.get_topology_desc(
        platform="cuda", target_config=target.described(GPUS[chip]), topology="1x1x1"
    )
    device = topology.devices[0]
    mesh = Mesh([device], ("one",))
    here = NamedSharding(mesh, PartitionSpec())
    trial = contextlib.nullcontext() if tiling is None else tuning.trying(tiling)
    with trial, jax.set_mesh(mesh), jax.default_device(device):
        attend, arguments = described.call(case, "gpu")
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
        began = time.perf_counter()
        lowered = jax.jit(attend, donate_argnums=0).trace(*placed).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile({"xla_dump_to": f"{folder}/xla"})
        seconds = time.perf_counter() - began
    memory: Any = compiled.memory_analysis()
    cache = arguments[0].data
    return {
        "compile_s": round(seconds, 2),
        "temp_bytes": memory.temp_size_in_bytes,
        "cache_bytes": cache.size * cache.dtype.itemsize,
    }


if __name__ == "__main__":
    chip, folder, parent, order = sys.argv[1:5]
    child.follow(int(parent), folder)
    os.environ["MOSAIC_GPU_DUMP_TO"] = f"{folder}/mosaic"
    Path(folder, "mosaic").mkdir()
    given = json.loads(order)
    case = given["case"]
    case = cases.CASES[case] if isinstance(case, str) else cases.Case(**case)
    tiling = Tiling(**given["tiling"]) if "tiling" in given else None
    try:
        answer = compile_case(chip, case, tiling, folder)
    except Exception as error:  # of whatever kind: the parent names the case, too
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    print(json.dumps(answer), flush=True)
