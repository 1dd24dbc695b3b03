"""What the benchmarks print: one JSON object, or small aligned tables. It measures nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .measure import Run, Spread, percentiles_ms, ratio, same_outputs
from .results import CONTEXT_TARGET, SAMPLING_TARGET, Results, Setting


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


def sampling(results: Results, sampled: Sequence[Run], title: str) -> tuple[str, dict[str, Any]]:
    """For people and as JSON: greedy runs, and sampled ones of the same repeats."""
    rates = [run.tokens_per_s for run in sampled]
    found, rate = ratio(rates, results.rates), Spread.of(rates)
    text = "\n".join(
        [
            as_text(results, title),
            f"sampled: {rate.median:.1f} tokens/s ({_range(rate)}), {found.median:.2f} of the greedy rate "
            f"({_range(found, 2)}{verdict(found.median, SAMPLING_TARGET)})",
        ]
    )
    record = {"output_tokens_per_s": _round(rate.median), **_ratio(found), "target": SAMPLING_TARGET}
    return text, {**as_json(results), "sampled": record}


def context(
    setting: Setting, requests: int, lengths: tuple[int, int], seconds: tuple[list[float], list[float]], title: str
) -> tuple[str, dict[str, Any]]:
    """For people and as JSON: seconds of a decode step at a short and at a long context, repeat by repeat."""
    found = ratio(seconds[1], seconds[0])
    step_ms = {n: 1e3 * Spread.of(each).median for n, each in zip(lengths, seconds, strict=True)}
    rows: list[tuple[str, ...]] = [
        ("context", "ms a step"),
        *((f"{n:,} tokens", f"{ms:.1f}") for n, ms in step_ms.items()),
    ]
    text = "\n".join(
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
    record = {
        **dataclasses.asdict(setting),
        "requests": requests,
        "step_ms": {str(n): _round(ms) for n, ms in step_ms.items()},
        **_ratio(found),
        "target": CONTEXT_TARGET,
        "runs": [{"short_ms": _round(1e3 * a), "long_ms": _round(1e3 * b)} for a, b in zip(*seconds, strict=True)],
    }
    return text, record


def latency_text(results: Results, title: str, rate: float) -> str:
    """For people: what requests waited, over all repeats."""
    rows: list[tuple[str, ...]] = [("ms", "", "p50", "p90", "p99")]
    for name, runs in (("paged engine", results.paged), ("static batches, contiguous KV", results.baseline)):
        for label, found in _waits(runs).items():
            figures = [f"{found[p]:,.1f}" if found else "" for p in ("p50", "p90", "p99")]
            rows.append((name, label, *figures))
            name = ""
    coming = f"{rate:g} requests/s" if rate else "all requests at once"
    return "\n".join([title, _described(results, f"{coming}, "), str(results.setting), "", table(rows)])


def latency_json(results: Results, rate: float) -> dict[str, Any]:
    """`as_json`, with waits over all repeats in place of the median run's."""
    record = as_json(results)
    return (
        record
        | {"rate": rate, **_waits_json(results.paged)}
        | {"baseline": record["baseline"] | _waits_json(results.baseline)}
    )


def _waits(runs: Sequence[Run]) -> dict[str, dict[str, float] | None]:
    return {
        "first token": percentiles_ms(wait for run in runs for wait in run.ttft),
        "between tokens": percentiles_ms(wait for run in runs for wait in run.itl),
        "between arrivals": percentiles_ms(wait for run in runs for wait in run.gaps),
        "end to end": percentiles_ms(wait for run in runs for wait in run.end_to_end),
    }


def _waits_json(runs: Sequence[Run]) -> dict[str, dict[str, float] | None]:
    return dict(zip(("ttft_ms", "itl_ms", "gap_ms", "end_to_end_ms"), _waits(runs).values(), strict=True))


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
