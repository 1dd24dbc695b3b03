"""Ctrl-C, however deep in somebody else's code it arrives, and while there is something to save. Knows nothing of what
that is.

Python raises KeyboardInterrupt wherever it happens to be. In an extension module this may come back as any other error,
and in a callback it is dropped. So here an error after Ctrl-C is Ctrl-C, and one that was dropped is raised again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

STATUS = 130

_MOMENT = 0.02  # seconds, for a callback to be over


class Interrupt:
    """A context that Ctrl-C ends, without an error: `wanted` says whether it did. They may be nested.

    While something is `worth_saving`, the first Ctrl-C only sets `wanted`, for the work to end where it can; the second
    does not wait.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.worth_saving = False

    def __enter__(self) -> Interrupt:
        outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        if isinstance(outer, Interrupt) and outer.wanted:  # somebody has taken it for an error that can be got over
            raise KeyboardInterrupt
        self._before = signal.signal(signal.SIGINT, self._handle), sys.unraisablehook
        sys.unraisablehook = _insist
        return self

    def __exit__(self, *_: object) -> bool:
        signal.signal(signal.SIGINT, self._before[0])
        sys.unraisablehook = self._before[1]
        return self.wanted

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        hurried, self.wanted = self.wanted, True
        if hurried or not self.worth_saving:
            raise KeyboardInterrupt


def leave_at_once() -> None:
    """From here on, outside of every `Interrupt`, Ctrl-C ends the process: there is nothing to save or to clean up."""
    signal.signal(signal.SIGINT, _leave)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """The same for a while, for imports: extension modules print the error that they are interrupted with."""
    before = signal.signal(signal.SIGINT, _leave)
    yield
    signal.signal(signal.SIGINT, before)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(STATUS)


def _insist(dropped: sys.UnraisableHookArgs) -> None:
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        threading.Timer(_MOMENT, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)
