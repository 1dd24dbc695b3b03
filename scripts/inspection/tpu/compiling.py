"""Compiles named cases for a TPU, on a machine that has none, and prints what came of each as a line of JSON.

    python scripts/inspection/tpu/compiling.py v6e FOLDER PARENT '{"case": "decode_bf16_b16"}' '{"case": …}'

FOLDER is where the compiler dumps, or "" if it does not. When the process PARENT has ended, this ends and the folder
goes.
Run by `schedules` in a process of its own, because libtpu reads its flags once.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, make_single_device_sharding

from inspection import child, described
from pallas_kernels import cases, tuning
from pallas_kernels.tpu.tiling import Tiling

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def compile_case(chip: str, case: cases.Case, tiling: Tiling | None) -> dict[str, Any]:
    """Seconds and bytes of a case on a chip, and when it began and was done, for its files to be known."""
    device: Any = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    there = AbstractMesh((), (), abstract_device=AbstractDevice(device.device_kind, 1, "tpu"))
    trial = contextlib.nullcontext() if tiling is None else tuning.trying(tiling)
    with trial, jax.sharding.use_abstract_mesh(there):
        call, arguments = described.call(case, "tpu")
        on_it = make_single_device_sharding(device)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_it), arguments)
        begin, began = time.time_ns(), time.perf_counter()
        lowered = jax.jit(call, donate_argnums=0).trace(*placed).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
        seconds = time.perf_counter() - began
    memory: Any = compiled.memory_analysis()
    cache_bytes = arguments[0].data.size * 4
    return {
        "begin": begin,
        "end": time.time_ns(),
        "compile_s": round(seconds, 2),
        "temp_bytes": memory.temp_size_in_bytes,
        "cache_bytes": cache_bytes,
    }


if __name__ == "__main__":
    chip, dump, parent = sys.argv[1:4]
    child.follow(int(parent), dump)
    for order in map(json.loads, sys.argv[4:]):
        tiling = Tiling(**order["tiling"]) if "tiling" in order else None
        case = order["case"]
        case = cases.CASES[case] if isinstance(case, str) else cases.Case(**case)
        try:
            answer = compile_case(chip, case, tiling)
        except Exception as error:  # of whatever kind: the parent says it, and the next is compiled
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        print(json.dumps(answer), flush=True)
