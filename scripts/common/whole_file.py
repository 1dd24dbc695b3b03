"""Files that are replaced whole or not at all. It knows nothing of what is in them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check(path: Path) -> None:
    """Whether it could be written; before the work whose result it is to hold.

    Raises:
      ValueError: it is a folder, or in none that can be written to.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{path} is in a folder that does not exist; make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{path} is in a folder that cannot be written to ({error.strerror}); name another") from error


def write(path: Path, data: bytes) -> None:
    """Replaces the file; whoever is stopped half-way, or finds the disk full, leaves the old one.

    Raises:
      OSError: the disk is full, say.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's are for their owner alone
        os.replace(name, path)
    except BaseException:  # Ctrl-C, too: it is raised again, and nothing is left behind
        os.unlink(name)
        raise
