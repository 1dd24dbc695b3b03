"""Runs scripts as people do: another process, the checkout's file, nothing imported."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from tests.house.tree import ROOT

GOLDEN = ROOT / "tests" / "data" / "golden"

# The tiny model in an engine that all tests share, so that three steps are compiled in all.
TINY = (
    f"--model={GOLDEN / 'tiny' / 'llama'}",
    "--dtype=float32",
    "--num_blocks=16",
    "--max_num_seqs=2",
    "--max_num_batched_tokens=64",
    "--decode_steps=4",
)

SECONDS = 300  # far more than any run takes; a hang still ends


@dataclasses.dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    def __post_init__(self) -> None:
        assert "Traceback" not in self.err, self.err

    @property
    def complaints(self) -> list[str]:
        return self.err.splitlines()


@dataclasses.dataclass(frozen=True)
class Script:
    """A script, and what of the environment is not this process's."""

    name: str
    environment: dict[str, str]

    def start(
        self,
        *arguments: str | Path,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / self.name), *map(str, arguments)],
            bufsize=0,  # else a line that is read takes others with it
            cwd=ROOT.parent,  # a script does not care where it is run from
            env={**os.environ, **self.environment, **environment},
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )

    def run(
        self,
        *arguments: str | Path,
        stdin: bytes | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Done:
        source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
        return finish(self.start(*arguments, stdin=source, environment=environment), stdin)


def finish(process: subprocess.Popen[bytes], stdin: bytes | None = None) -> Done:
    try:
        out, err = process.communicate(stdin, timeout=SECONDS)
    finally:
        process.kill()
    return Done(process.returncode, (out or b"").decode(), err.decode())


def abandon(process: subprocess.Popen[bytes]) -> Done:
    """Stops reading what it prints, as `head` does."""
    assert process.stdout is not None
    process.stdout.close()
    try:
        _, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return Done(process.returncode, "", err.decode())
