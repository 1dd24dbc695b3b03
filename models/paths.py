"""Paths as people type them, and folders that somebody else is writing to. Knows nothing of what is in the files."""

import contextlib
import os
from pathlib import Path

from models.errors import ModelError


def expand_home(path: str) -> Path:
    """The path with `~` or `~somebody` at its start replaced by that home folder.

    Raises:
      ModelError: nobody knows where that home folder is.
    """
    expanded = os.path.expanduser(path)  # Path.expanduser does not know "./~" from "~"
    if expanded.startswith("~"):
        raise ModelError(
            f"{path!r} begins with a home folder that cannot be found; write that folder out, or './{path}' if its "
            "name really begins with a tilde."
        )
    return Path(expanded)


def sizes_below(folder: Path, suffix: str = "") -> list[int]:
    """Bytes of each file below a folder; what vanishes while one looks is left out.

    By os.walk, for on Python 3.11 Path.rglob raises when a folder vanishes.
    """
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it has vanished
                    sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return sizes
