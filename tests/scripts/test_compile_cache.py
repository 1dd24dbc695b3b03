"""What a killed process leaves in the compilation cache does not keep the next ones from using it."""

from pathlib import Path

import filelock
import pytest

from scripts.common import compile_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One executable that is whole, and one whose process was killed."""
    for name in ("jit_a-cache", "jit_a-atime", "jit_b-cache"):
        (tmp_path / name).write_bytes(b"12345678")
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lockfile"}


def test_what_is_half_written_goes_and_the_rest_stays(folder: Path):
    compile_cache.mend(folder)
    assert names(folder) == {"jit_a-cache", "jit_a-atime"}


def test_nothing_is_touched_while_somebody_writes(folder: Path):
    with filelock.FileLock(folder / ".lockfile"):
        compile_cache.mend(folder)
    assert names(folder) == {"jit_a-cache", "jit_a-atime", "jit_b-cache"}


def test_a_folder_that_is_not_there_is_no_fault(tmp_path: Path):
    compile_cache.mend(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere" / "jit_b-cache").exists()
