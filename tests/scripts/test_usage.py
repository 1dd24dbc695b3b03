"""The clock behind `--stats`, on an engine whose steps take as long as the test says."""

import types
from typing import Any

import jax
import pytest

from scripts.common import usage


class FakeEngine:
    """Each step: seconds in the call, seconds that the device still needs, whether it compiled, and what was read."""

    def __init__(self, steps: list[tuple[float, float, bool, tuple[int, int] | None]], monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        self.stats = types.SimpleNamespace(prefill_tokens=0, decode_tokens=0, steps=0)
        self._steps = iter(steps)
        self._left = 0.0
        monkeypatch.setattr(usage.time, "perf_counter", lambda: self.now)

    @property
    def state(self) -> None:
        """Asking for it stands for waiting until it is there."""
        self.now += self._left

    def step(self) -> list[int]:
        seconds, self._left, compiled, read = next(self._steps)
        self.now += seconds
        if compiled:
            jax.monitoring.record_event_duration_secs(usage.COMPILE_EVENT, 0.1)
        if read is None:
            return []
        self.stats.steps += 1
        self.stats.prefill_tokens += read[0]
        self.stats.decode_tokens += read[1]
        return [1] * 2


def test_compiling_is_not_counted(monkeypatch: pytest.MonkeyPatch):
    engine: Any = FakeEngine(
        [
            (9.0, 2.0, True, None),  # dispatches the prompt: 9 s to compile, 2 s to run
            (7.0, 0.5, True, (100, 1)),  # dispatches a decode: 7 s to compile, 0.5 s to run; reads the prompt
            (0.0, 0.0, False, (0, 8)),  # reads that decode, which is done
            (0.5, 0.0, False, (0, 8)),  # waits for the next
            (5.0, 0.5, True, (0, 8)),  # another bucket: what was read ran behind the compiler's back
            (0.0, 0.0, False, (0, 4)),
        ],
        monkeypatch,
    )
    clock = usage.Clock(engine)
    for _ in range(6):
        clock.step()
    assert clock.prefill_rate == 100 / 2.0
    assert clock.decode_rate == (8 + 8 + 4) / (0.5 + 0.5 + 0.5)
    assert clock.compiling == 9 + 7 + 5
    assert clock.first_token == 9 + 2 + 7 + 0.5


def test_nothing_timed_is_no_rate(monkeypatch: pytest.MonkeyPatch):
    clock = usage.Clock(FakeEngine([], monkeypatch))  # pyright: ignore[reportArgumentType] (all that it reads)
    assert clock.prefill_rate is None and clock.decode_rate is None


def test_a_table_is_aligned():
    assert usage.render([("a", "1"), ("long", "2")]) == "   a  1\nlong  2"
