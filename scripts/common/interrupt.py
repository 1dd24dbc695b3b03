"""Ctrl-C while there is something to save. Knows nothing of what that is."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupt:
    """A context in which Ctrl-C asks politely: `wanted` turns True, and the work ends where it can.

    A second Ctrl-C raises KeyboardInterrupt, and so does the first while nothing is `worth_saving`.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.worth_saving = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> bool:
        signal.signal(signal.SIGINT, self._before)
        if kind is KeyboardInterrupt:
            self.wanted = True
        return kind is KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        hurried, self.wanted = self.wanted, True
        if hurried or not self.worth_saving:
            raise KeyboardInterrupt
