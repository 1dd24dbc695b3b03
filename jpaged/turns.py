"""Callers of one engine take turns, each with its own requests: whoever waits for a step makes it, for all.

It knows threads, requests and that there are steps. It knows neither prompts nor what a step does.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from jpaged.engine import Engine
from jpaged.intake import AnyRequest, AnySample

T = TypeVar("T")


class Turns:
    """Runs requests for several callers, in threads or in turn.

    Args:
      engine: That nobody else steps meanwhile.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock = threading.RLock()  # of all that follows and of the engine
        self._turn = _Turn()
        self._inboxes: dict[AnyRequest, dict[AnySample, None]] = {}  # what changed, for whoever runs the request
        self._abandoned: collections.deque[Sequence[AnyRequest]] = collections.deque()

    def alone(self, do: Callable[[], T]) -> T:
        """Does something while nobody steps."""
        try:
            with self._lock, self._turn:
                return do()
        finally:
            if self._abandoned:
                self._tidy()

    def run(self, requests: Sequence[AnyRequest], tell: Callable[[Any], T]) -> Generator[T, None, None]:
        """Yields what ``tell`` says of each sample that a step changed. It is asked while nobody steps, so that no step
        of another thread comes between. Whatever is left is aborted when the caller turns away."""
        inbox: dict[AnySample, None] = {}
        try:
            with self._lock, self._turn:
                self._inboxes |= dict.fromkeys(requests, inbox)
                self._engine.add(*requests)
            left = {request for request in requests if not request.finished}
            while left or inbox:  # the last step may have ended several samples
                with self._lock, self._turn:
                    if not inbox:  # nobody has stepped for us, so we step for all
                        self._end_abandoned()
                        for sample in self._engine.step():
                            self._inboxes.get(sample.request, {})[sample] = None
                    if not inbox:  # somebody else may have aborted what is waited for
                        left = {request for request in left if not request.finished}
                        continue
                    del inbox[sample := next(iter(inbox))]
                    if sample.request.finished:
                        left.discard(sample.request)
                    told = tell(sample)
                yield told
        finally:
            self._abandoned.append(requests)
            self._tidy()

    def _tidy(self) -> None:
        """Ends what nobody waits for, unless it is called in the middle of a turn: a generator that nobody closes is
        closed by whatever thread collects garbage, and be it within a step. Whose turn that is does it afterwards."""
        if self._turn.is_mine:
            return
        with self._lock, self._turn:
            self._end_abandoned()
            while not self._inboxes and self._engine.has_work:
                self._engine.step()
                self._end_abandoned()

    def _end_abandoned(self) -> None:
        """Aborts what is left of requests for which nobody waits any more."""
        while self._abandoned:
            requests = self._abandoned[0]
            for request in requests:
                self._inboxes.pop(request, None)
            self._engine.abort(*requests)
            self._abandoned.popleft()


class _Turn:
    """Which thread uses the engine, inside the lock."""

    def __init__(self) -> None:
        self._thread: int | None = None

    @property
    def is_mine(self) -> bool:
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None
