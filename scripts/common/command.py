"""A script's outside: `--help`, exit statuses, and errors as one line on standard error instead of a traceback.

Knows nothing of what a script does. Exit statuses: 0, all went well; 2, something asked for was wrong or cannot be had;
130, Ctrl-C; 141, whoever read our output has gone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence

from absl import app, flags
from absl import logging as absl_logging

from . import interrupt
from .help import render

OK, FAULT, INTERRUPTED, READER_GONE = 0, 2, interrupt.STATUS, 141

_WAYS_OUT = {
    errno.EMFILE: "; raise the limit of open files (`ulimit -n`)",
    errno.ENOSPC: "; free some room there",
}

_VERBOSE = flags.DEFINE_boolean("verbose", False, "Log what is chosen and why, on standard error.")


def run(main: Callable[[], int], doc: str, groups: dict[str, Sequence[str]]) -> None:
    """Parses the flags, runs `main`, and exits with the status that it returns.

    What is wrong with the request or the machine (ValueError, OSError, MemoryError, a device's own errors) becomes one
    line. Any other exception is a bug and keeps its traceback; with --verbose they all do.

    Args:
      main: The script.
      doc: Its docstring, the first part of `--help`.
      groups: For `--help`: titles, and the names of the flags beneath them.
    """
    interrupt.leave_at_once()
    _keep_streams_usable()
    try:
        status: str | int | None = _guarded(
            lambda: app.run(lambda given: _body(main, given), flags_parser=lambda argv: _parse(argv, doc, groups))
        )
    except SystemExit as done:
        status = done.code
    if status in (INTERRUPTED, READER_GONE):
        # The device may be at work still, and Python, tidying up, would take its memory away under it: a crash.
        _let_go_of_output()
        with contextlib.suppress(OSError):  # nobody reads it
            sys.stderr.flush()
        os._exit(int(status))
    sys.exit(status)


def say(message: str) -> None:
    """Tells the person something; standard output stays free for results."""
    with contextlib.suppress(OSError):  # nobody reads it
        print(message, file=sys.stderr, flush=True)


def complain(problem: object) -> None:
    """As `say`, on one line."""
    say("; ".join(filter(None, map(str.strip, str(problem).splitlines()))))


def chosen(flag: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names that a flag lists; all that are known if it says "all".

    Raises:
      ValueError: one of them is not known.
    """
    given: tuple[str, ...] = tuple(flags.FLAGS[flag].value or ())
    if not given:
        raise ValueError(f"--{flag}= names nothing; try all, or some of {', '.join(known)}")
    if given == ("all",):
        return tuple(known)
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"--{flag}={unknown[0]} must be among {', '.join(known)}, or be all")
    return given


def start_jax() -> None:
    """Imports JAX and meets the devices.

    Raises:
      ValueError: JAX was told (JAX_PLATFORMS) to use a device that is not there, or the device refuses.
    """
    with interrupt.leaving_at_once():
        import jax

    try:
        jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX has no device to run on: {error}") from error


def _parse(argv: Sequence[str], doc: str, groups: dict[str, Sequence[str]]) -> list[str]:
    given = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if not {"-h", "--h", "-help", "--help", "--helpshort", "-?"}.isdisjoint(given):
        print(render(doc, groups), flush=True)
        sys.exit(OK)
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise ValueError(f"{str(error).replace(' ?', '?')}; try --help") from error
    if rest[1:]:
        raise ValueError(f"{rest[1]!r} is no flag, and only flags are taken; try --help")
    return rest


def _body(main: Callable[[], int], _: Sequence[str]) -> int:
    absl_logging.set_verbosity(absl_logging.WARNING)  # of everybody's
    logging.getLogger("jpaged").setLevel(logging.INFO if _VERBOSE.value else logging.WARNING)
    status = main()
    sys.stdout.flush()
    return status


def _guarded(script: Callable[[], None]) -> int:
    """Runs what exits by itself when all goes well; the status otherwise."""
    with interrupt.Interrupt() as asked:
        try:
            script()
        except BrokenPipeError:
            _let_go_of_output()
            return READER_GONE
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            # A device's error is named, for naming its class would import jax. Other RuntimeErrors are bugs.
            is_bug = isinstance(error, RuntimeError) and type(error).__name__ != "JaxRuntimeError"
            if is_bug or asked.wanted:
                raise
            return _report(error)
    _let_go_of_output()
    return INTERRUPTED


def _report(error: BaseException) -> int:
    if flags.FLAGS.is_parsed() and _VERBOSE.value:
        logging.exception("the traceback, for --verbose:")
    problem: object = error if str(error) else "out of memory"
    if isinstance(error, OSError) and error.strerror and error.filename:
        problem = f"{error.strerror}: {error.filename}{_WAYS_OUT.get(error.errno or 0, '')}"
    if "out of memory" in str(problem).lower():
        problem = f"{problem} Try fewer blocks (num_blocks, kv_cache_memory) or a smaller model."
    complain(f"{os.path.basename(sys.argv[0])}: {problem}")
    _let_go_of_output()
    return FAULT


def _keep_streams_usable() -> None:
    """Text that a stream's encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process ends)
        getattr(sys, name).reconfigure(errors="backslashreplace")


def _let_go_of_output() -> None:
    """Flushes what can be; what cannot must not become a second error when Python exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
