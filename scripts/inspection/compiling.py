"""Compiles named cases for a TPU, on a machine that has none, and prints what came of each as a line of JSON.

    python scripts/inspection/compiling.py v6e FOLDER PARENT '{"case": "decode_bf16_b16"}' '{"case": …, "tiling": {…}}'

FOLDER is where the compiler dumps, or "" if it does not. When the process PARENT has ended, this ends and the folder
goes.
Run by `schedules` in a process of its own, because libtpu reads its flags once. What is compiled is what
`jpaged.paged_attention` calls, fused write and all, with the cache donated.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from jpaged import attention
from jpaged.cache import KVLayout, create
from pallas_kernels import cases, tuning
from pallas_kernels.tpu.tiling import Tiling

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
LAYERS, LAYER = 2, 1


def compile_case(chip: str, case: cases.Case, tiling: Tiling | None) -> dict[str, Any]:
    """Seconds and bytes of a case on a chip, and when it began and was done, for its files to be known."""
    device: Any = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    there = AbstractMesh((), (), abstract_device=AbstractDevice(device.device_kind, 1, "tpu"))
    trial = contextlib.nullcontext() if tiling is None else tuning.trying(tiling)
    with trial, jax.sharding.use_abstract_mesh(there):
        call, arguments = described(case)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)), arguments
        )
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


def described(case: cases.Case) -> tuple[Any, tuple[Any, ...]]:
    """The call of a case, and its arguments as shapes."""
    columns = -(-case.context // case.block_size)
    layout = KVLayout(
        LAYERS, case.rows * columns, case.block_size, case.num_kv_heads, case.head_dim, case.dtype, attention.WORDS
    )
    num_tokens = case.rows * case.queries
    activation = "float32" if case.dtype == "float32" else "bfloat16"
    shapes = {
        "cache": jax.eval_shape(lambda: create(layout)),
        "q": jax.ShapeDtypeStruct((num_tokens, case.num_heads, case.head_dim), activation),
        "kv": jax.ShapeDtypeStruct((num_tokens, case.num_kv_heads, case.head_dim), activation),
        "tables": jax.ShapeDtypeStruct((case.rows, columns), jnp.int32),
        "lens": jax.ShapeDtypeStruct((case.rows,), jnp.int32),
        "starts": jax.ShapeDtypeStruct((case.rows + 1,), jnp.int32),
        "extra": {
            **({"sinks": jax.ShapeDtypeStruct((case.num_heads,), jnp.float32)} if case.sinks else {}),
            **({"tree_mask": jax.ShapeDtypeStruct((num_tokens, case.queries), jnp.bool_)} if case.tree else {}),
            **({"sliding_window": jax.ShapeDtypeStruct((), jnp.int32)} if case.sliding_window else {}),
            **({name: jax.ShapeDtypeStruct((), jnp.float32) for name in _SCALES} if case.scales else {}),
        },
    }

    def call(cache, q, kv, tables, lens, starts, extra):
        return attention.paged_attention(
            q,
            kv,
            kv,
            cache,
            LAYER,
            tables,
            lens,
            starts,
            soft_cap=case.soft_cap,
            max_q_len=case.queries,
            backend="tpu",
            **extra,
        )

    return call, tuple(shapes.values())


_SCALES = ("k_scale", "v_scale")


def _leave_with_parent(parent: int, folder: str) -> None:
    """Ends this process when its parent has ended, however that came about; it would compile on for nobody."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if folder:  # another removes it, for the compiler's own threads write to it until the end
        subprocess.Popen([sys.executable, "-c", _REMOVE, folder], start_new_session=True)
    os._exit(1)


_REMOVE = "import shutil, sys, time; time.sleep(1); shutil.rmtree(sys.argv[1], ignore_errors=True)"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this one follows it
    chip, dump, parent = sys.argv[1:4]
    threading.Thread(target=_leave_with_parent, args=(int(parent), dump), daemon=True).start()
    for order in map(json.loads, sys.argv[4:]):
        tiling = Tiling(**order["tiling"]) if "tiling" in order else None
        case = order["case"]
        case = cases.CASES[case] if isinstance(case, str) else cases.Case(**case)
        try:
            answer = compile_case(chip, case, tiling)
        except Exception as error:  # of whatever kind: the next is compiled all the same
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        print(json.dumps(answer), flush=True)
