"""Other engines on the same requests, each in a Python process of its own that waits between its turns.

A peer is not a dependency: it runs where a Python has it, with our weights, written for it into a temporary folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from jpaged.model import LoadedModel
from models import default
from models.cache import default_cache_dir
from models.errors import ModelError
from models.paths import expand_home

from . import export_gguf, export_hf
from .workloads import Workload

NAMES = ("transformers", "llama.cpp")
PROGRAMS = {"transformers": "peer_transformers.py", "llama.cpp": "peer_llamacpp.py"}
NEEDS = {"transformers": "torch and transformers", "llama.cpp": "xllamacpp or llama-cpp-python"}
GGUF_KINDS = {"float32": (np.float32, "f32"), "bfloat16": (np.float16, "f16")}


class PeerError(ValueError):
    """A peer cannot run; the message says why and what to do."""


@dataclasses.dataclass
class Peer:
    """A peer that is ready to run.

    Attributes:
      name: With versions and dtype.
      details: What it says of the processor it was built for.
      kind: One of `NAMES`.
    """

    name: str
    details: str
    kind: str
    _process: subprocess.Popen[str]
    _log: Path
    _workload: Workload

    def run(self) -> tuple[float, list[list[int]] | None]:
        """Seconds that the workload took, and the tokens where the peer tells them.

        Raises:
          PeerError: it ended, or made another number of tokens than it was asked for.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `_answer` says how
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        answer = _answer(self._process, self._log, self.kind)
        counts = answer["counts"] if "counts" in answer else [len(tokens) for tokens in answer["outputs"]]
        if counts != list(self._workload.outputs):
            raise PeerError(
                f"{self.name} made {sum(counts)} tokens instead of {self._workload.output_tokens}, so its time says "
                "nothing; try a Python with another version of it (--peer_python), or leave --peer out"
            )
        return answer["seconds"], answer.get("outputs")


@contextlib.contextmanager
def start(
    name: str, python: str, loaded: LoadedModel, source: Path | None, dtype: str, threads: int, workload: Workload
) -> Iterator[Peer]:
    """A peer with the model loaded and warm; its process ends with the context.

    Args:
      name: One of `NAMES`.
      python: The interpreter that has it.
      loaded: Our model, for transformers.
      source: The GGUF file that it came from, for llama.cpp; None if it came from none.
      dtype: "float32" or "bfloat16"; llama.cpp gets float16 for the latter.
      threads: Processors to use.
      workload: What each run serves.

    Raises:
      PeerError: it cannot run, for whatever reason.
      ModelError: the model cannot be written for it.
    """
    with tempfile.TemporaryDirectory(prefix="jpaged-peer-") as folder:
        spec = {
            "dtype": dtype,
            "threads": threads,
            "prompts": workload.prompts,
            "outputs": workload.outputs,
            "slots": workload.slots,
            **_model(name, loaded, source, dtype, Path(folder)),
        }
        (Path(folder) / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        log = Path(folder) / "log"
        with open(log, "w") as errors, _process(python, name, Path(folder) / "spec.json", errors) as process:
            try:
                ready = _answer(process, log, name)
                yield Peer(ready["name"], ready["details"], name, process, log, workload)
            finally:
                process.kill()


def _model(name: str, loaded: LoadedModel, source: Path | None, dtype: str, folder: Path) -> dict[str, Any]:
    if name == "transformers":
        model = folder / "model"
        model.mkdir()
        export_hf.export(loaded, model)
        return {"model": str(model)}
    if source is None:
        raise ModelError("--peer=llama.cpp needs a model that came from a GGUF file; try --model=default")
    kind, label = GGUF_KINDS[dtype]
    export_gguf.export(source, folder / "model.gguf", kind)
    return {"model": str(folder / "model.gguf"), "kind": label}


def _process(python: str, name: str, spec: Path, errors: IO[str]) -> subprocess.Popen[str]:
    program = Path(__file__).parent / PROGRAMS[name]
    try:
        return subprocess.Popen(
            [python, str(program), str(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    except OSError as error:
        raise PeerError(f"--peer_python={python} does not run ({error.strerror}); give the path of a python") from error


def _answer(process: subprocess.Popen[str], log: Path, kind: str) -> dict[str, Any]:
    """The next line that the process prints.

    Raises:
      PeerError: it has ended instead.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if line:
        return json.loads(line)
    process.wait()
    said = log.read_text(errors="replace").strip().splitlines()
    reason = said[-1] if said else f"exit status {process.returncode}"
    raise PeerError(f"{kind} ended early: {reason}; --peer_python must name a Python that has {NEEDS[kind]}")


def gguf_source(model: str) -> Path | None:
    """The GGUF file that a model of this name comes from, if it comes from one."""
    if model == "default":
        return default.fetch(default_cache_dir(), progress=False)
    path = expand_home(model)
    return path if path.suffix == ".gguf" else None


def processors() -> int:
    """Processors that this process may use, which is how many threads XLA takes."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
