"""Ctrl-C, however deep in somebody else's code it arrives, and while there is something to save. Knows nothing of what
that is.

Python raises KeyboardInterrupt wherever it happens to be. In an extension module this may come back as any other error;
in a callback it is dropped, and a bare `except:` (JAX has some, where it names functions) swallows it. So here an error
after Ctrl-C is Ctrl-C, and it is raised again until somebody is seen to deal with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

STATUS = 130

_MOMENT = 0.05  # seconds, for an interrupt to show that it was heard


class Interrupt:
    """A context that Ctrl-C ends, without an error: `wanted` says whether it did. They may be nested.

    While something is `worth_saving`, the first Ctrl-C only sets `wanted`, for the work to end where it can; the second
    does not wait. It uses SIGALRM besides, and only the main thread may enter it.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.worth_saving = False

    def __enter__(self) -> Interrupt:
        outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        if isinstance(outer, Interrupt) and outer.wanted:  # somebody has taken it for an error that can be got over
            raise KeyboardInterrupt
        self._signals = [
            (number, signal.signal(number, handler))
            for number, handler in ((signal.SIGALRM, self._insist), (signal.SIGINT, self._handle))
        ]
        self._hooks = sys.unraisablehook, threading.excepthook
        self._silence = logging.root.manager.disable
        sys.unraisablehook, threading.excepthook = self._report_dropped, self._report_thread
        return self

    def __exit__(self, *_: object) -> bool:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._signals:
            signal.signal(number, before)
        sys.unraisablehook, threading.excepthook = self._hooks
        logging.disable(self._silence)
        return self.wanted

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        hurried, self.wanted = self.wanted, True
        if hurried or not self.worth_saving:
            signal.setitimer(signal.ITIMER_REAL, _MOMENT, _MOMENT)
            logging.disable()  # what the work's threads fail with once it is given up (their files go) concerns nobody
            raise KeyboardInterrupt

    def _insist(self, signum: int, frame: FrameType | None) -> None:
        """After a moment somebody is still at work: either he is cleaning up, or the interrupt was lost."""
        handled = sys.exception()
        while handled is not None and not isinstance(handled, KeyboardInterrupt):
            handled = handled.__context__
        ending = frame is not None and frame.f_code is Interrupt.__exit__.__code__
        if handled is None and not ending:
            raise KeyboardInterrupt

    def _report_dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if not self.wanted:
            self._hooks[0](dropped)

    def _report_thread(self, failed: threading.ExceptHookArgs) -> None:
        if not self.wanted:
            self._hooks[1](failed)


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
