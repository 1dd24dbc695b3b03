"""Files stay small, and name no place of one machine."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT, files

MOST_LINES = 400  # most files are under 150: a file is one idea
MOST_BYTES = 5 * 10**6

# Absolute paths of one machine: home and work folders. URLs, relative paths and /home/somebody are fine.
SOMEBODYS = re.compile(r"(?<![\w.:/~*-])/(?:(?:root|work|opt/dev)/|(?:home|Users)/(?!somebody\b)\w)|\.\./shared\b")


def somebodys_paths(text: str) -> list[str]:
    return [f"{number}: {line}" for number, line in enumerate(text.splitlines(), 1) if SOMEBODYS.search(line)]


def text_of(path: Path) -> str:
    """The text of a file, or nothing if it is not text."""
    content = (ROOT / path).read_bytes()
    return "" if b"\0" in content else content.decode(errors="replace")


def test_there_is_something_to_check():
    assert {Path("setup.cfg"), Path("tests/house/test_size.py")} <= set(files())


def test_python_files_are_one_idea_long():
    lines = {path: len(text_of(path).splitlines()) for path in files() if path.suffix == ".py"}
    long = {str(path): count for path, count in lines.items() if count > MOST_LINES}
    assert not long, f"over {MOST_LINES} lines; give the second idea a file of its own"


def test_no_file_is_heavy():
    heavy = [str(path) for path in files() if (ROOT / path).stat().st_size > MOST_BYTES]
    assert not heavy, f"over {MOST_BYTES} bytes: make it smaller, or make it when it is needed"


def test_no_path_of_one_machine():
    found = {str(path): somebodys_paths(text_of(path)) for path in files()}
    assert not {path: lines for path, lines in found.items() if lines}


# Examples name their folders by letters, or this file would be the one that the test above finds.
FOLDERS = {"R": "root", "W": "work", "S": "shared", "H": "home", "U": "Users"}


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("cd /{R}/jpaged", True),
        ('open("/{H}/ann/x")', True),
        ("--out=/{W}/x", True),
        ("see ../{S}/x", True),
        ("/{U}/bob/x", True),
        ("/{H}/somebody/x", False),
        ("https://example.org/{W}/x", False),
        ("src/{R}/x and ~/{W}/x", False),
        ("/tmp/x, /etc/os-release, /{H}{W}", False),
    ],
)
def test_what_counts_as_one_machine(text: str, caught: bool):
    assert bool(somebodys_paths(text.format(**FOLDERS))) is caught
