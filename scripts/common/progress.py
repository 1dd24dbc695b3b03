"""A bar on standard error for whatever takes longer than two seconds; only on a terminal, and gone when it is over.

A thread draws it, because the main one may be deep in a compilation. Knows nothing of what is being waited for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

DELAY_SECONDS = 2.0
_REDRAW_SECONDS = 0.25
_COUNTED = "{desc} {n_fmt} of {total_fmt} {unit} |{bar}| {elapsed}, {remaining} left"
_UNCOUNTED = "{desc} {elapsed}"


class Progress:
    """Use as a context; `stop` may end it before.

    `done` and `what` may be set as the work goes on.

    Args:
      what: What is being done: "loading the model".
      total: How many of `unit` there are; None if nobody knows.
      unit: "prompts".
    """

    def __init__(self, what: str, total: int | None = None, unit: str = ""):
        self.done, self.what = 0, what
        self._total, self._unit = total, unit
        self._over = threading.Event()
        self._drawing = threading.Lock()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the bar away."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Takes the bar away while something is printed on the same terminal."""
        if not self._thread.is_alive():
            yield
            return
        from tqdm import tqdm

        with self._drawing, tqdm.external_write_mode(file=sys.stdout):
            yield

    def _draw(self) -> None:
        if self._over.wait(DELAY_SECONDS):
            return
        from tqdm import tqdm  # takes a tenth of a second, which a quick run need not spend

        form = _UNCOUNTED if self._total is None else _COUNTED
        options = {"total": self._total, "unit": self._unit, "bar_format": form, "leave": False}
        with tqdm(desc=self.what, **options) as bar:
            bar.start_t -= DELAY_SECONDS
            while True:
                with self._drawing:
                    bar.n, bar.desc = self.done, self.what
                    bar.refresh()
                if self._over.wait(_REDRAW_SECONDS):
                    return
