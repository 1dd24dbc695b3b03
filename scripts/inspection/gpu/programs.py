"""A case's GPU programs: what ptxas and nvdisasm say of our kernels, and how many launches XLA makes of the whole.

All of it is static. Instructions are counted in the program's text, not as often as they run.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inspection.gpu import toolkit
from pallas_kernels.gpu.chips import Gpu
from pallas_kernels.gpu.tiling import RESERVED, THREADS

_ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel as it was compiled.

    Attributes:
      name: As `plgpu.kernel` was given it.
      registers: Of a thread.
      spills: Bytes that a thread puts away and fetches back.
      smem_bytes: Shared memory of a block of threads.
      instructions: How often each instruction stands in it, without its modifiers.
    """

    name: str
    registers: int
    spills: int
    smem_bytes: int
    instructions: dict[str, int]

    @property
    def local(self) -> int:
        """Instructions on local memory, which spills and indexed arrays use."""
        return sum(count for name, count in self.instructions.items() if name in ("LDL", "STL"))

    def blocks_per_core(self, gpu: Gpu) -> int:
        """Blocks of threads that a core holds at once."""
        by_registers = gpu.registers // (-(-self.registers // 8) * 8 * THREADS)  # given out by eights
        by_memory = gpu.smem // (self.smem_bytes + RESERVED)
        return min(by_registers, by_memory, gpu.threads // THREADS, gpu.blocks)


@dataclasses.dataclass(frozen=True)
class Made:
    """A case as it was compiled.

    Attributes:
      compile_s: Seconds.
      temp_bytes, cache_bytes: Of memory besides arguments and results, and of the KV memory in the case.
      programs: Our kernels, by name.
      launches: All that XLA starts, in order, each by its kind and name.
      at_once: Whether all of them are one command buffer: a CUDA graph, started as a whole.
    """

    compile_s: float
    temp_bytes: int
    cache_bytes: int
    programs: tuple[Program, ...]
    launches: tuple[str, ...]
    at_once: bool

    @property
    def attending(self) -> int:
        """Launches from our first kernel on: kernels, and what puts splits together and results where they belong."""
        ours = [n for n, name in enumerate(self.launches) if name.startswith("kCustomCall")]
        return len(self.launches) - ours[0]


def compile_case(chip: str, order: dict[str, Any]) -> Made | str:
    """Compiles a case for a chip; why it cannot be, if it cannot.

    Args:
      chip: Its name.
      order: "case": its name or the fields of a `Case`; to try one, "tiling", the fields of a `Tiling`.

    Raises:
      ValueError: the CUDA compiler is not installed.
    """
    script = Path(__file__).with_name("compiling.py")
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "scripts"), str(toolkit.folder())])
    with tempfile.TemporaryDirectory(prefix="jpaged-") as folder:
        done = subprocess.run(
            [sys.executable, str(script), chip, folder, str(os.getpid()), json.dumps(order)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines()
        if not lines:
            why = done.stderr[-500:] or f"exit status {done.returncode}, as of a process that is killed"
            return f"the compiler for {chip} has died: {why}; try --jobs=1 if memory is short"
        said = json.loads(lines[-1])
        if "error" in said:
            return said["error"]
        launches, at_once = _launches(Path(folder, "xla"))
        programs = tuple(_programs(Path(folder, "mosaic")))
        return Made(**said, programs=programs, launches=launches, at_once=at_once)


def _launches(folder: Path) -> tuple[tuple[str, ...], bool]:
    (before,) = folder.glob("*attend*.thunk_sequence.txt")
    after = list(folder.glob("*attend*.thunk_sequence_after_thunk_passes.txt"))  # none if all stays as it was
    names = re.findall(r"^\s*\d+: (k\w+).*?\] (\S+)", before.read_text(), re.M)
    outermost = [kind for path in after for kind in re.findall(r"^\d+: (k\w+)", path.read_text(), re.M)]
    return tuple(" ".join(name) for name in names), outermost == ["kCommandBuffer"]


def _programs(folder: Path) -> list[Program]:
    """Mosaic numbers what it dumps, anew when it hands over to ptxas: of each name, the nth of either is the same."""
    said, needed = (_by_name(folder.glob(f"*.{kind}")) for kind in ("ptxas", "resources.txt"))
    assert {name: len(paths) for name, paths in said.items()} == {name: len(paths) for name, paths in needed.items()}
    return [_program(name, *pair) for name in said for pair in zip(said[name], needed[name], strict=True)]


def _by_name(paths: Iterable[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in paths:
        name, _, number = path.name.partition(".")[0].rpartition("_")
        found.setdefault(name, []).append((int(number), path))
    return {name: [path for _, path in sorted(numbered)] for name, numbered in sorted(found.items())}


def _program(name: str, said: Path, needed: Path) -> Program:
    disassembled = said.with_suffix(".sass_ctrl")
    if not disassembled.exists():
        raise ValueError(f"nvdisasm, which reads {name}, is not installed; try pip install -e '.[inspect-gpu]'")
    text, code = said.read_text(), disassembled.read_text()
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    memory = re.search(r"smem_scratch_bytes=(\d+)", needed.read_text())
    assert registers and spills and memory, text
    # A line is waits and stalls, an address in a comment, perhaps a predicate, and the instruction.
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", code)
    return Program(
        name=name,
        registers=int(registers[1]),
        spills=sum(map(int, spills.groups())),
        smem_bytes=int(memory[1]),
        instructions=dict(collections.Counter(found)),
    )
