"""Folders that are made once and appear whole: downloads and converted checkpoints.

Knows how to let one process build while others wait, and how to leave nothing half-made behind. Does not know what is
built. This file alone reads the environment, for where the cache is and for what a child process inherits.

A target `DIR/name`, with links followed, has two hidden neighbours: `.name.lock`, held (flock) by whoever builds, and
`.name.tmp-*`, the builder's working folder. Because only the holder of the lock may own a working folder, one that is
found while holding the lock belongs to a process that was killed, and is removed. The holder also removes the lock file
when it is done, so whoever gets a lock looks whether the file that it locked is still the one of that name.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from models.errors import ModelError

CACHE_ELSEWHERE = "set XDG_CACHE_HOME to a folder that can be written and has room"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCK = (errno.ENOLCK, errno.EOPNOTSUPP)  # refusals that name no file
_NO_FILES = (errno.EMFILE, errno.ENFILE)  # of the process or the machine: no other folder helps
_PATIENCE_SECONDS, _QUIET_SECONDS, _POLL_SECONDS = 5, 0.2, 0.02


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/jpaged`, or `~/.cache/jpaged`; a relative XDG_CACHE_HOME counts for nothing, as XDG asks."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if root.is_absolute():
        return root / "jpaged"
    try:
        return Path.home() / ".cache" / "jpaged"
    except RuntimeError as error:
        raise ModelError("There is no home folder to keep models in; set XDG_CACHE_HOME to a folder.") from error


def environment_with(**changes: str) -> dict[str, str]:
    """This process's environment variables for a child process, with some of them changed."""
    return {**os.environ, **changes}


def say(message: str) -> None:
    """One line to the person who waits; standard output stays free for results."""
    print(message, file=sys.stderr, flush=True)


def build_once(
    target: Path,
    build: Callable[[Path], None],
    *,
    what: str,
    fault: Callable[[Path], str | None] = lambda _: None,
    way_out: str = CACHE_ELSEWHERE,
    notify: Callable[[str], None] = say,
) -> Path:
    """The folder `target`, built by `build` if it is not there yet; it appears whole or not at all.

    Args:
      target: the folder to have. Its parents are made. If it is a link, the folder is made where that points.
      build: fills an empty working folder (on the same file system), which then becomes `target`. Whatever it raises,
        KeyboardInterrupt included, passes through once the working folder is removed.
      what: names the thing in messages, such as "the download of SmolLM2".
      fault: says what is wrong with an existing target, or None. A faulty one is built anew, with a note.
      way_out: what to do where the folder cannot be written or is full.
      notify: takes those notes, and the one that another process is being waited for.

    Returns:
      `target`.

    Raises:
      ModelError: the folder cannot be written or is full, or is one that cannot be replaced. An existing sound target
        needs no writing at all.
    """
    place = Path(os.path.realpath(target))  # neighbours of "." are those of the folder that it is
    if _sound(place, fault):
        return target
    _refuse_irreplaceable(place)
    with _naming_the_folder(place, way_out):
        place.parent.mkdir(parents=True, exist_ok=True)
        with _lock(place, what, notify):
            _remove_leftovers(place)
            if _sound(place, fault, notify):
                return target
            in_the_way = os.path.lexists(place) and not _is_empty_folder(place)
            work = _new_work_folder(place)
            try:
                build(work)
                if in_the_way:
                    _discard(place)
                work.replace(place)  # over an empty folder at most: what came there meanwhile is somebody else's
            except BaseException:  # Ctrl-C, too: it is raised again, and nothing is left behind
                _remove(work)
                raise
    return target


def _sound(target: Path, fault: Callable[[Path], str | None], notify: Callable[[str], None] | None = None) -> bool:
    if not os.path.lexists(target):
        return False
    reason = fault(target) if target.is_dir() else "it is not a folder"
    if reason and notify:
        notify(f"{target} cannot be used ({reason}); making it anew.")
    return reason is None


def _refuse_irreplaceable(target: Path) -> None:
    """Before the work, for it would be lost: a mount point cannot be replaced, and who stands in a folder that was
    replaced stands in one that is gone."""
    if target.is_dir() and (target.is_mount() or target.samefile(os.curdir)):
        kind = "a mount point" if target.is_mount() else "the current folder"
        raise ModelError(f"{target} is {kind} and cannot be replaced; name a folder in it that does not exist yet.")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _work_prefix(target: Path) -> str:
    return f".{target.name}.tmp-"


def _new_work_folder(target: Path) -> Path:
    """Open to whom the person's umask says, unlike tempfile's, so that a cache can be shared."""
    folder = target.parent / f"{_work_prefix(target)}{secrets.token_hex(4)}"
    folder.mkdir()
    return folder


def _remove(work: Path) -> None:
    """Until it stays away: threads of a build that failed may write for a moment yet, and so make it again."""
    begin = gone = time.monotonic()
    while time.monotonic() < min(gone + _QUIET_SECONDS, begin + _PATIENCE_SECONDS):
        if work.exists():
            shutil.rmtree(work, ignore_errors=True)
            gone = time.monotonic()
        time.sleep(_POLL_SECONDS)


def _remove_leftovers(target: Path) -> None:
    """The caller holds the lock, so no living builder owns what is found. A killed download's child process may
    still be writing there for a moment; then a later run removes the rest."""
    for path in target.parent.iterdir():
        if path.name.startswith(_work_prefix(target)):
            shutil.rmtree(path, ignore_errors=True)


def _discard(target: Path) -> None:
    """Moved aside before it is removed, so that no moment shows half of it under its name."""
    if os.path.lexists(target):
        aside = _new_work_folder(target)
        try:
            target.replace(aside / target.name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _lock_path(target: Path) -> Path:
    return target.parent / f".{target.name}.lock"


@contextlib.contextmanager
def _lock(target: Path, what: str, notify: Callable[[str], None]) -> Iterator[None]:
    path = _lock_path(target)
    while True:
        with open(path, "a") as file:  # closing the file, or dying, releases the lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                notify(f"Waiting for another process to finish {what} in {target.parent}.")
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_the_file(path, file.fileno()):
                continue  # the last holder has removed it: somebody may hold a new one by now
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_the_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _naming_the_folder(target: Path, way_out: str) -> Iterator[None]:
    """Turns the operating system's refusals about this target and its neighbours into an error that says what to do."""
    folder = target.parent
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ModelError(f"No room left in {folder} ({error.strerror}); free some, or {way_out}.") from error
        if error.errno in _NO_FILES:
            raise
        if error.errno in _NO_LOCK if error.filename is None else _concerns(target, Path(error.filename)):
            where = f"{error.filename}: " if error.filename == str(_lock_path(target)) else ""
            raise ModelError(f"The folder {folder} cannot be written ({where}{error.strerror}); {way_out}.") from error
        raise


def _concerns(target: Path, path: Path) -> bool:
    """Whether that is the target, a neighbour or a folder above; what else is in its folder may be the source."""
    if not path.is_relative_to(target.parent) or path == target.parent:
        return target.is_relative_to(path)
    name = path.relative_to(target.parent).parts[0]
    return name == target.name or name.startswith(f".{target.name}.")
