"""JAX's persistent compilation cache for scripts: the second run starts from executables that the first one made."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

MOST_BYTES = 4 << 30  # the least recently used make room


def enable(folder: Path) -> str | None:
    """Keeps executables in `folder`, unless the person's JAX_COMPILATION_CACHE_DIR says otherwise.

    To be called before anything is compiled: JAX decides then whether it has a cache.

    Returns:
      Why nothing is kept, which costs time and nothing else; None if all is well.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        return f"{folder} cannot be written, so nothing compiled is kept; set XDG_CACHE_HOME to a folder that can be"
    mend(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # With a limit, JAX locks the folder (by filelock), so that no process reads what another is writing.
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    # A full disk is no reason to stop; JAX says so once for each executable.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    return None


def mend(folder: Path) -> None:
    """Removes executables whose process was killed before it had written the time beside them.

    JAX 0.10 fails to keep anything at all while one of them is there. Nobody writes meanwhile: it is done under the
    lock that JAX takes. If that cannot be had, all stays as it is.
    """
    import filelock

    lock = filelock.FileLock(folder / ".lockfile", timeout=2)
    with contextlib.suppress(OSError, filelock.Timeout), lock:  # somebody has it, or it is read-only
        for executable in folder.glob("*-cache"):
            if not executable.with_name(executable.name.removesuffix("-cache") + "-atime").exists():
                executable.unlink(missing_ok=True)
