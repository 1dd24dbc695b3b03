"""What the benchmarks print: one JSON object, or small aligned tables. It measures nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .measure import Run, Spread, percentiles_ms, ratio, same_outputs
from .workloads import Workload

# What this project wants to reach, by case, peer and dtype: the least ratio of output tokens a second.
TARGETS = {
    ("single", "transformers", "float32"): 1.2,
    ("single", "transformers", "bfloat16"): 1.8,
    ("mixed", "transformers", "float32"): 1.5,
    ("mixed", "transformers", "bfloat16"): 1.8,
    ("single", "llama.cpp", "float32"): 0.8,
    ("single", "llama.cpp", "bfloat16"): 0.8,
    ("parallel16", "llama.cpp", "float32"): 2.0,
    ("parallel16", "llama.cpp", "bfloat16"): 2.0,
}
SAMPLING_TARGET = 0.7  # the rate when sampling, of the greedy rate
CONTEXT_TARGET = 3.0  # at the most: the time of a step at the long context, of that at the short one


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a benchmark ran on and with."""

    case: str
    model: str
    backend: str
    dtype: str
    jax: str
    device: str
    threads: int | None

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.model} in {self.dtype}, {self.backend} attention, jax {self.jax} on {self.device}{threads}"


@dataclasses.dataclass
class Results:
    """All repeats of one case; runs of the same repeat stand at the same place.

    Attributes:
      paged, baseline: Ours; ``baseline`` may be empty.
      peer: Its name and details; None without one.
      peer_seconds: Of each repeat.
      peer_outputs: Tokens of its last repeat, where it tells them.
    """

    setting: Setting
    workload: Workload
    paged: list[Run] = dataclasses.field(default_factory=list)
    baseline: list[Run] = dataclasses.field(default_factory=list)
    peer: tuple[str, str] | None = None
    peer_seconds: list[float] = dataclasses.field(default_factory=list)
    peer_outputs: list[list[int]] | None = None

    @property
    def rates(self) -> list[float]:
        return [run.tokens_per_s for run in self.paged]

    @property
    def peer_rates(self) -> list[float]:
        return [self.workload.output_tokens / seconds for seconds in self.peer_seconds]

    @property
    def median(self) -> Run:
        """The paged run whose time is the median (of an even number, the longer of the middle two)."""
        return sorted(self.paged, key=lambda run: run.seconds)[len(self.paged) // 2]


def as_json(results: Results, target: float | None = None) -> dict[str, Any]:
    """One JSON object of a case. Figures are of the median run; rates count output tokens unless they say otherwise."""
    run, workload = results.median, results.workload
    tokens = workload.prompt_tokens + workload.output_tokens
    record: dict[str, Any] = {
        **dataclasses.asdict(results.setting),
        "requests": len(workload.prompts),
        "slots": workload.slots,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "seconds": _round(run.seconds),
        "prefill_tokens_per_s": _round(run.prefill_rate),
        "decode_tokens_per_s": _round(run.decode_rate),
        "output_tokens_per_s": _round(run.tokens_per_s),
        "total_tokens_per_s": _round(tokens / run.seconds),
        "ttft_ms": percentiles_ms(run.ttft),
        "itl_ms": percentiles_ms(run.itl),
        "gap_ms": percentiles_ms(run.gaps),
        "blocks_peak": run.blocks_peak,
        "kv_share": _round(run.kv_share),
        "baseline": None,
        "peer": None,
        "peer_details": None,
        "peer_tokens_per_s": None,
        "peer_same_outputs": None,
        "ratio": None,
        "ratio_range": None,
        "target": target,
        "runs": _repeats(results),
    }
    if results.baseline:
        base = sorted(results.baseline, key=lambda run: run.seconds)[len(results.baseline) // 2]
        record["baseline"] = {
            "name": "static batches, contiguous KV",
            "seconds": _round(base.seconds),
            "prefill_tokens_per_s": _round(base.prefill_rate),
            "decode_tokens_per_s": _round(base.decode_rate),
            "output_tokens_per_s": _round(base.tokens_per_s),
            "ttft_ms": percentiles_ms(base.ttft),
            "itl_ms": percentiles_ms(base.itl),
            "gap_ms": percentiles_ms(base.gaps),
            **_ratio(ratio(results.rates, [run.tokens_per_s for run in results.baseline])),
            "same_outputs": same_outputs(_tokens(results.paged[-1]), _tokens(results.baseline[-1])),
        }
    if results.peer is not None:
        record["peer"], record["peer_details"] = results.peer
        record["peer_tokens_per_s"] = _round(Spread.of(results.peer_rates).median)
        record |= _ratio(ratio(results.rates, results.peer_rates))
        if results.peer_outputs is not None:
            record["peer_same_outputs"] = same_outputs(_tokens(results.paged[-1]), results.peer_outputs)
    return record


def as_text(results: Results, title: str, target: float | None = None) -> str:
    """The same for people: who ran at which rate, and the ratios."""
    workload = results.workload
    lens = sorted(map(len, workload.prompts))
    outs = sorted(workload.outputs)
    rows = [("", "tokens/s", "(least - most)", "seconds", "first token", "between tokens")]
    rows.append(_row("paged engine", results.paged))
    if results.baseline:
        rows.append(_row("static batches, contiguous KV", results.baseline))
    if results.peer is not None:
        rate, seconds = Spread.of(results.peer_rates), Spread.of(results.peer_seconds)
        rows.append((results.peer[0], f"{rate.median:.1f}", _range(rate), f"{seconds.median:.2f}", "", ""))
    lines = [
        title,
        f"{len(workload.prompts)} requests, prompts {_span(lens)}, outputs {_span(outs)} tokens, {workload.slots}; "
        f"medians of {len(results.paged)} runs",
        str(results.setting),
        "",
        table(rows),
        "",
    ]
    if results.baseline:
        lines.append(_versus("static batches", ratio(results.rates, [run.tokens_per_s for run in results.baseline])))
    if results.peer is not None:
        lines.append(_versus(results.peer[0].split(",")[0], ratio(results.rates, results.peer_rates), target))
    run = results.median
    if run.blocks_peak is not None and run.kv_share is not None:
        lines.append(f"{run.blocks_peak} KV blocks at peak, {run.kv_share:.1%} of their places held tokens")
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def verdict(value: float, target: float | None, *, at_most: bool = False) -> str:
    """ ", target ≥ 1.5: reached"; nothing without a target."""
    if target is None:
        return ""
    reached = value <= target if at_most else value >= target
    return f", target {'≤' if at_most else '≥'} {target:g}: {'reached' if reached else 'missed'}"


def _row(name: str, runs: list[Run]) -> tuple[str, ...]:
    rate, seconds = Spread.of(run.tokens_per_s for run in runs), Spread.of(run.seconds for run in runs)
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    first, between = percentiles_ms(middle.ttft), percentiles_ms(middle.itl)
    return (
        name,
        f"{rate.median:.1f}",
        _range(rate),
        f"{seconds.median:.2f}",
        f"{first['p50']:.0f} ms" if first else "",
        f"{between['p50']:.1f} ms" if between else "",
    )


def _versus(name: str, found: Spread, target: float | None = None) -> str:
    return f"{found.median:.2f} times as fast as {name} ({_range(found, 2)}{verdict(found.median, target)})"


def _range(found: Spread, digits: int = 1) -> str:
    return f"{found.least:.{digits}f} - {found.most:.{digits}f}"


def _span(values: Sequence[int]) -> str:
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]}-{values[-1]}"


def _repeats(results: Results) -> list[dict[str, float | None]]:
    """The seconds of each repeat, side by side."""
    columns = {
        "seconds": [run.seconds for run in results.paged],
        "baseline_seconds": [run.seconds for run in results.baseline],
        "peer_seconds": results.peer_seconds,
    }
    return [{name: _round(values[i]) for name, values in columns.items() if values} for i in range(len(results.paged))]


def _tokens(run: Run) -> list[list[int]]:
    return [one.tokens for one in run.served]


def _ratio(found: Spread) -> dict[str, Any]:
    return {"ratio": _round(found.median), "ratio_range": [_round(found.least), _round(found.most)]}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
