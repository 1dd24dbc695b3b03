"""What the README tells people to type works.

- A `python` block is run whole, on its own; those of docs/, too.
- In a `bash` block, `python scripts/…` is run; `make …` and `pip install …` name targets and extras that exist (this
  test itself runs inside what they set up). Any other command fails the test.
- A `console` block is for what does not end or needs other hardware (a server, a TPU): only its scripts must exist.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.declared import extras, make_targets
from tests.house.readme import Block, blocks, commands
from tests.house.tree import ROOT

README = ROOT / "README.md"
SECONDS = 600  # far more than any block needs on two cores; a hang still ends
BLOCKS = blocks(README.read_text()) if README.exists() else []
SCRIPT = re.compile(r"(?:\w+=\S+ )*python (scripts/\S+\.py)\b")


IN_DOCS = [
    pytest.param(block, id=f"{path.name} line {block.line}")
    for path in sorted((ROOT / "docs").glob("*.md"))
    for block in blocks(path.read_text())
    if block.language == "python"
]


def of(language: str) -> list:
    return [pytest.param(block, id=f"line {block.line}") for block in BLOCKS if block.language == language]


def run(arguments: list[str] | str, folder: Path = ROOT) -> None:
    """Runs a command as a reader would, with this test's Python first on PATH; fails with what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        arguments,
        shell=isinstance(arguments, str),
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout[-4000:]}"


def problem(command: str) -> str:
    """Why a command of a `bash` block that is not run cannot be right, or nothing."""
    words = shlex.split(command)
    if "make" in words:
        goals = [word for word in words[words.index("make") + 1 :] if "=" not in word and not word.startswith("-")]
        unknown = set(goals) - make_targets()
        return f"the Makefile has no {unknown}" if unknown else ""
    if words[:2] == ["pip", "install"] or words[:4] == ["python", "-m", "pip", "install"]:
        named = [word for word in words if re.fullmatch(r"(jpaged|\.)(\[.*\])?", word)]
        wanted = {extra for word in named for extra in re.findall(r"[\w-]+", word.partition("[")[2])}
        if not named:
            return "it does not install jpaged"
        return f"setup.cfg has no extras {wanted - extras()}" if wanted - extras() else ""
    return (
        "only `python scripts/…`, `make …` and `pip install …` are checked; what is not to be run is a `console` block"
    )


def test_there_is_something_to_run():
    assert README.exists(), "README.md is missing"
    languages = {block.language for block in BLOCKS}
    assert "python" in languages, "README.md has no ```python block: show how jpaged is used"
    assert "bash" in languages, "README.md has no ```bash block: show how to begin"
    assert {"make decode", "make test"} <= {command for block in BLOCKS for command in commands(block)}


@pytest.mark.one_python
@pytest.mark.parametrize("block", [*of("python"), *IN_DOCS])
def test_python_block_runs(block: Block):
    run([sys.executable, "-c", block.body])


@pytest.mark.one_python
@pytest.mark.parametrize("block", of("bash"))
def test_bash_block_runs(block: Block):
    for command in commands(block):
        if SCRIPT.match(command):
            run(command)
        else:
            assert not problem(command), command


def test_console_blocks_name_scripts_that_exist():
    for block in BLOCKS:
        for script in re.findall(r"\bscripts/[\w/]+\.py\b", block.body):
            assert (ROOT / script).is_file(), f"line {block.line}: {script}"


# What follows tests the tests above.

SAMPLE = """
# Title
```python
import x
```
1. first
   ```bash
   make decode  # a comment
   python scripts/decode.py \\
       --prompt='a b'
   ```
"""


def test_blocks_and_commands_are_read():
    first, second = blocks(SAMPLE)
    assert first == Block("python", 3, "import x\n")
    assert second.line == 7
    assert list(commands(second)) == ["make decode", "python scripts/decode.py --prompt='a b'"]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("make decode", ""),
        ("make test PYTHON=python3.12", ""),
        ("make coffee", "no {'coffee'}"),
        ("pip install -e '.[tpu]'", ""),
        ("pip install 'jpaged[abacus]'", "no extras {'abacus'}"),
        ("pip install numpy", "does not install jpaged"),
        ("curl localhost", "only `python scripts/…`"),
    ],
)
def test_commands_that_are_not_run_are_checked(command: str, why: str):
    assert problem(command) == "" if why == "" else why in problem(command)


def test_a_failing_command_fails():
    run([sys.executable, "-c", "pass"])
    with pytest.raises(AssertionError, match="out of the window"):
        run([sys.executable, "-c", "raise SystemExit('out of the window')"])
