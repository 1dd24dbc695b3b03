"""What the benchmarks print for people: small aligned tables, and who was how much faster. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Run, Spread, percentiles_ms, ratio, waits_ms
from .results import CONTEXT_TARGET, SAMPLING_TARGET, Results, Setting

WAITS = {
    "ttft_ms": "first token",
    "itl_ms": "between tokens",
    "gap_ms": "between arrivals",
    "end_to_end_ms": "end to end",
}


def throughput(results: Results, title: str, target: float | None = None) -> str:
    """Who ran at which rate, and the ratios."""
    rows: list[tuple[str, ...]] = [("", "tokens/s", "(least - most)", "seconds", "first token", "between tokens")]
    rows.append(_row("paged engine", results.paged))
    if results.baseline:
        rows.append(_row("static batches, contiguous KV", results.baseline))
    if results.peer is not None:
        rate, seconds = Spread.of(results.peer_rates), Spread.of(results.peer_seconds)
        rows.append((results.peer[0], f"{rate.median:.1f}", _range(rate), f"{seconds.median:.2f}", "", ""))
    lines = [
        title,
        _described(results, "medians of "),
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


def sampling(results: Results, sampled: Sequence[Run], title: str) -> str:
    """Greedy runs, and sampled ones of the same repeats."""
    rates = [run.tokens_per_s for run in sampled]
    found, rate = ratio(rates, results.rates), Spread.of(rates)
    return "\n".join(
        [
            throughput(results, title),
            f"sampled: {rate.median:.1f} tokens/s ({_range(rate)}), {found.median:.2f} of the greedy rate "
            f"({_range(found, 2)}{verdict(found.median, SAMPLING_TARGET)})",
        ]
    )


def context(
    setting: Setting, requests: int, lengths: tuple[int, int], seconds: tuple[list[float], list[float]], title: str
) -> str:
    """Seconds of a decode step at a short and at a long context, repeat by repeat."""
    found = ratio(seconds[1], seconds[0])
    rows: list[tuple[str, ...]] = [("context", "ms a step")]
    for length, each in zip(lengths, seconds, strict=True):
        rows.append((f"{length:,} tokens", f"{1e3 * Spread.of(each).median:.1f}"))
    return "\n".join(
        [
            title,
            f"{requests} sequences; medians of {len(seconds[0])} runs",
            str(setting),
            "",
            table(rows),
            "",
            f"{found.median:.2f} times as long ({_range(found, 2)}"
            f"{verdict(found.median, CONTEXT_TARGET, at_most=True)})",
        ]
    )


def latency(results: Results, title: str, rate: float) -> str:
    """What requests waited, over all repeats."""
    rows: list[tuple[str, ...]] = [("ms", "", "p50", "p90", "p99")]
    for name, runs in (("paged engine", results.paged), ("static batches, contiguous KV", results.baseline)):
        for key, found in waits_ms(runs).items():
            figures = [f"{found[p]:,.1f}" if found else "" for p in ("p50", "p90", "p99")]
            rows.append((name, WAITS[key], *figures))
            name = ""
    coming = f"{rate:g} requests/s" if rate else "all requests at once"
    return "\n".join([title, _described(results, f"{coming}, "), str(results.setting), "", table(rows)])


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


def _described(results: Results, how: str) -> str:
    """The workload in a line."""
    workload, repeats = results.workload, len(results.paged)
    lens, outs = sorted(map(len, workload.prompts)), sorted(workload.outputs)
    return (
        f"{len(lens)} requests, prompts {_span(lens)}, outputs {_span(outs)} tokens, {workload.slots} at once; "
        f"{how}{repeats} run{'s' * (repeats > 1)}"
    )


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
