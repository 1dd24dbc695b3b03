"""Work in several threads, whose results come as they are there. It knows nothing of the work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def merged(parts: Sequence[Callable[[], Iterable[Any]]], jobs: int) -> Iterator[Any]:
    """What the parts give out, in whatever order it comes; ``jobs`` of them run at once.

    The threads are daemons: whoever is interrupted while waiting leaves without them. What a part raises, this raises,
    and the other parts go on unheard until the process ends.
    """
    waiting: queue.SimpleQueue[Callable[[], Iterable[Any]]] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[Any, BaseException | None, bool]] = queue.SimpleQueue()
    for part in parts:
        waiting.put(part)

    def work() -> None:
        while True:
            try:
                part = waiting.get_nowait()
            except queue.Empty:
                return
            error = None
            try:
                for one in part():
                    found.put((one, None, False))
            except BaseException as raised:  # the waiting thread is told, whatever it is
                error = raised
            found.put((None, error, True))

    for _ in range(min(jobs, len(parts))):
        threading.Thread(target=work, daemon=True).start()
    left = len(parts)
    while left:
        one, error, over = found.get()
        if error is not None:
            raise error
        if over:
            left -= 1
        else:
            yield one
