"""libtpu's own schedule of a case's kernels: instruction bundles, one a cycle where nothing stalls.

A bundle file lists for each bundle how many slots of each unit it uses, and a text file the regions, loops, memory and
copies. Both are written before delays are compressed. What a schedule cannot know: how long copies take, how often
loops run, and conflicts of memory banks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inspection.tpu import compiler

_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true "
    "--xla_jf_dump_llo_pass_label_regex=.*(post-bundle-packing-post-ra|pre-delay).*"
)
_ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel.

    Attributes:
      begin, end: Bundles of its body, inner loops' among them.
      matmuls: Products with the matrix unit in it, inner loops' included.
      busy: The share of the matrix unit's slots that are used.
      dmas: Copies that its body orders.
    """

    begin: int
    end: int
    matmuls: int
    busy: float
    dmas: int

    @property
    def bundles(self) -> int:
        return self.end - self.begin

    def holds(self, other: Loop) -> bool:
        return self != other and self.begin <= other.begin and other.end <= self.end


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as the compiler has scheduled it.

    Attributes:
      name: As `pallas_call` was given it.
      loops: In the order of the text, outer before inner.
      spills: Vector registers that are put away.
      vmem_bytes, smem_bytes: Of its scratch.
    """

    name: str
    loops: tuple[Loop, ...]
    spills: int
    vmem_bytes: int
    smem_bytes: int

    @property
    def whole(self) -> Loop:
        """The innermost of the loops that hold all products in loops: of trips, or of a trip's turns."""
        return min(self._doing(), key=lambda loop: (-loop.matmuls, loop.bundles))

    @property
    def inner(self) -> Loop:
        """The loop that does most products and holds none that does any. Of two alike, the shorter, without a mask."""
        doing = self._doing()
        inner = [loop for loop in doing if not any(loop.holds(other) for other in doing)]
        return max(inner, key=lambda loop: (loop.matmuls, -loop.bundles))

    def within(self, outer: Loop) -> list[Loop]:
        return [loop for loop in self.loops if outer.holds(loop)]

    def around(self, inner: Loop) -> Loop:
        """The loop whose body a loop stands in."""
        return min((loop for loop in self.loops if loop.holds(inner)), key=lambda loop: loop.bundles)

    def _doing(self) -> list[Loop]:
        return [loop for loop in self.loops if loop.matmuls]


@dataclasses.dataclass(frozen=True)
class Made:
    """A case as it was compiled.

    Attributes:
      compile_s: Seconds.
      temp_bytes: Of HBM, besides arguments and results.
      cache_bytes: Of the KV memory in the case.
      kernels: In the order in which they were compiled.
    """

    compile_s: float
    temp_bytes: int
    cache_bytes: int
    kernels: tuple[Kernel, ...]

    def kernel(self, name: str) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.name == name)


def compile_cases(chip: str, orders: Sequence[dict[str, Any]]) -> Iterator[Made | str]:
    """Compiles cases one after another; what comes of each is given out as it is done, or why nothing has.

    Args:
      chip: Its name.
      orders: For each "case", its name or the fields of a `Case`, and, to try one, "tiling", the fields of a `Tiling`.

    Raises:
      ValueError: libtpu is not installed, or the compiler has died.
    """
    with tempfile.TemporaryDirectory(prefix="jpaged-") as folder:
        for said in _compiled(chip, orders, folder):
            if "error" in said:
                yield said["error"]
                continue
            kernels = tuple(read(Path(folder), said.pop("begin"), said.pop("end")))
            yield Made(**said, kernels=kernels)


def compile_plainly(chip: str, orders: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As `compile_cases`, without a dump, which for a prefill takes ten times as long as to compile it.

    Returns:
      For each order "compile_s", "temp_bytes" and "cache_bytes", or "error".

    Raises:
      ValueError: libtpu is not installed, or the compiler has died.
    """
    return _compiled(chip, orders, "")


def _compiled(chip: str, orders: Sequence[dict[str, Any]], folder: str) -> Iterator[dict[str, Any]]:
    """What `compiling.py` says of each order; dumps go to the folder, if there is one."""
    told = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "scripts"), str(compiler.folder())]),
        **({"LIBTPU_INIT_ARGS": _FLAGS.format(folder=folder)} if folder else {}),
    }
    script = Path(__file__).with_name("compiling.py")
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            [sys.executable, str(script), chip, folder, str(os.getpid()), *map(json.dumps, orders)],
            env={**os.environ, **told},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        left = len(orders)
        try:
            for line in process.stdout:
                left -= 1
                yield json.loads(line)
        finally:
            process.kill()
        if left:
            complaints.seek(0)
            raise ValueError(f"the compiler for {chip} has died: {complaints.read()[-500:]}")


def read(folder: Path, begin: int, end: int) -> Iterator[Kernel]:
    """The Pallas kernels of a dump that were compiled between two moments, in nanoseconds since 1970, in order."""
    for text in sorted(folder.glob("*-paged_*post-bundle-packing-post-ra.txt")):
        stem, _, _ = text.name.partition("-00-")
        if begin <= int(stem.partition("-")[0]) <= end:
            (usage,) = folder.glob(f"{stem}-*pre-delay*utilization.txt")
            yield _kernel(re.sub(r"^\d+-|\.\d+$", "", stem), text.read_text(), usage.read_text())


def _kernel(name: str, text: str, usage: str) -> Kernel:
    lines = usage.splitlines()
    units, capacity = [unit.strip() for unit in lines[1].split(",")], [int(n) for n in lines[2].split()]
    rows = [[int(n) for n in line.split()] for line in lines[4:] if line.strip()]
    product, spill = units.index("MATMUL"), units.index("VSTORE:SPILL")
    regions, jumps = _regions(text)
    copies = [match.start() for match in re.finditer(r"= dma\.(?!done)", text)]
    loops = []
    for body, latch in jumps:
        first, end = regions[body].begin, regions[latch].end
        matmuls = sum(row[product] for row in rows[first:end])
        inside = sum(regions[body].at <= place < regions[latch].at for place in copies)
        loops.append(Loop(first, end, matmuls, matmuls / max(1, capacity[product] * (end - first)), inside))
    return Kernel(
        name=name,
        loops=tuple(sorted(loops, key=lambda loop: (loop.begin, -loop.bundles))),
        spills=sum(row[spill] for row in rows),
        vmem_bytes=_memory(text, "vmem"),
        smem_bytes=_memory(text, "smem"),
    )


@dataclasses.dataclass(frozen=True)
class _Region:
    kind: str
    begin: int
    end: int
    at: int  # where in the text


def _regions(text: str) -> tuple[dict[int, _Region], list[tuple[int, int]]]:
    """The regions of a kernel by number, and its loops: (body, the region that jumps back to it)."""
    regions, jumps, last = {}, [], -1
    opening = re.compile(
        r"\$region(\d+):.*?(?:// (\w+))?\s*\n\s*(?:#allocation.*\n\s*)*// region range: \[(\d+), (\d+)\)"
    )
    jump = re.compile(r"sbr\.rel .*?region = (\d+)")
    marks = sorted(
        [(m.start(), m) for m in opening.finditer(text)] + [(m.start(), m) for m in jump.finditer(text)],
        key=lambda mark: mark[0],
    )
    for at, match in marks:
        if match.re is opening:
            last = int(match[1])
            regions[last] = _Region(match[2] or "", int(match[3]), int(match[4]), at)
        elif regions.get(int(match[1])) and regions[int(match[1])].kind == "loop_body":
            jumps.append((int(match[1]), last))
    return regions, jumps


def _memory(text: str, space: str) -> int:
    """The end of the highest allocation of the kernel's own."""
    found = re.findall(rf"space={space}, size = (0x[0-9a-f]+|\d+), offset = (0x[0-9a-f]+|\d+), scoped(?!.*spill)", text)
    return max((int(size, 0) + int(offset, 0) for size, offset in found), default=0)
