"""One run's figures: when which tokens of which request came, and what follows from that. Pure arithmetic.

Tokens may come several at a time. A gap is the time between two arrivals of one request, as its reader sees it; the
inter-token latency (itl) shares each gap out among the tokens that came at its end.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass
class Served:
    """A request as it was served. Times are seconds since the run began.

    Attributes:
      arrival: When it was asked for.
      tokens: What was generated.
      deltas: When tokens came, and how many at once.
    """

    arrival: float = 0.0
    tokens: list[int] = dataclasses.field(default_factory=list)
    deltas: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def receive(self, now: float, tokens: Sequence[int]) -> None:
        if tokens:
            self.tokens += tokens
            self.deltas.append((now, len(tokens)))


@dataclasses.dataclass
class Run:
    """One run of a workload.

    Attributes:
      served: Its requests.
      seconds: From start to last token.
      prefill_rate: Prompt tokens a second of the steps that computed any; None if there were none.
      decode_rate: Tokens a second of the steps without prompts; None if there were none.
      blocks_peak, kv_share: Of the paged engine; None for others.
    """

    served: list[Served]
    seconds: float
    prefill_rate: float | None
    decode_rate: float | None
    blocks_peak: int | None = None
    kv_share: float | None = None

    @property
    def output_tokens(self) -> int:
        return sum(len(one.tokens) for one in self.served)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, prefill included."""
        return self.output_tokens / self.seconds

    @property
    def ttft(self) -> list[float]:
        return [one.deltas[0][0] - one.arrival for one in self.served]

    @property
    def end_to_end(self) -> list[float]:
        return [one.deltas[-1][0] - one.arrival for one in self.served]

    @property
    def gaps(self) -> list[float]:
        return [gap for one in self.served for gap, _ in _gaps(one)]

    @property
    def itl(self) -> list[float]:
        return [gap / count for one in self.served for gap, count in _gaps(one) for _ in range(count)]


def _gaps(one: Served) -> Iterable[tuple[float, int]]:
    for (before, _), (now, count) in zip(one.deltas, one.deltas[1:], strict=False):
        yield now - before, count


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds; None of nothing."""
    values = np.fromiter(seconds, float)
    if not len(values):
        return None
    return {f"p{p}": round(float(np.percentile(values, p)) * 1e3, 3) for p in (50, 90, 99)}


def waits_ms(runs: Sequence[Run]) -> dict[str, dict[str, float] | None]:
    """Percentiles of what requests waited for, over all of these runs."""
    return {
        "ttft_ms": percentiles_ms(wait for run in runs for wait in run.ttft),
        "itl_ms": percentiles_ms(wait for run in runs for wait in run.itl),
        "gap_ms": percentiles_ms(wait for run in runs for wait in run.gaps),
        "end_to_end_ms": percentiles_ms(wait for run in runs for wait in run.end_to_end),
    }


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of repeats, and their least and greatest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ratios repeat by repeat: both halves of one met the same machine, so they bear its moods better than medians."""
    return Spread.of(a / b for a, b in zip(ours, theirs, strict=True))


def same_outputs(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """The share of requests that got the same tokens."""
    return sum(list(x) == list(y) for x, y in zip(a, b, strict=True)) / len(a)
