"""What --json prints: for every case an object with the same keys, null where the case has nothing to say.

A case may add keys of its own. Figures are of the median run; rates count output tokens unless they say otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .measure import Run, Spread, percentiles_ms, ratio, same_outputs, waits_ms
from .results import CONTEXT_TARGET, SAMPLING_TARGET, Results, Setting

KEYS = (
    "case",
    "model",
    "backend",
    "dtype",
    "jax",
    "device",
    "threads",
    "requests",
    "slots",
    "prompt_tokens",
    "output_tokens",
    "seconds",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "gap_ms",
    "blocks_peak",
    "kv_share",
    "baseline",
    "peer",
    "peer_details",
    "peer_tokens_per_s",
    "peer_same_outputs",
    "ratio",
    "ratio_range",
    "target",
    "runs",
)


def throughput(results: Results, target: float | None = None) -> dict[str, Any]:
    """Paged engine, baseline and peer; the ratio is to the peer."""
    run, workload = results.median, results.workload
    tokens = workload.prompt_tokens + workload.output_tokens
    return _record(
        results.setting,
        requests=len(workload.prompts),
        slots=workload.slots,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        **_figures(run),
        total_tokens_per_s=_round(tokens / run.seconds),
        blocks_peak=run.blocks_peak,
        kv_share=_round(run.kv_share),
        baseline=_baseline(results) if results.baseline else None,
        **(_peer(results) if results.peer is not None else {}),
        target=target,
        runs=_repeats(results),
    )


def sampling(results: Results, sampled: Sequence[Run]) -> dict[str, Any]:
    """Greedy runs, and under "sampled" those of the same repeats that sample."""
    rates = [run.tokens_per_s for run in sampled]
    found = {"output_tokens_per_s": _round(Spread.of(rates).median), **_ratio(ratio(rates, results.rates))}
    return throughput(results) | {"sampled": found | {"target": SAMPLING_TARGET}}


def context(
    setting: Setting, requests: int, lengths: tuple[int, int], seconds: tuple[list[float], list[float]]
) -> dict[str, Any]:
    """Seconds of a decode step at a short and at a long context, repeat by repeat; the ratio is long to short."""
    step_ms = {str(n): _round(1e3 * Spread.of(each).median) for n, each in zip(lengths, seconds, strict=True)}
    return _record(
        setting,
        requests=requests,
        slots=requests,
        step_ms=step_ms,
        **_ratio(ratio(seconds[1], seconds[0])),
        target=CONTEXT_TARGET,
        runs=[{"short_ms": _round(1e3 * a), "long_ms": _round(1e3 * b)} for a, b in zip(*seconds, strict=True)],
    )


def latency(results: Results, rate: float) -> dict[str, Any]:
    """As `throughput`, with waits over all repeats in place of the median run's."""
    record = throughput(results)
    baseline = record["baseline"] | waits_ms(results.baseline)
    return record | {"rate": rate, **waits_ms(results.paged), "baseline": baseline}


def _record(setting: Setting, **found: Any) -> dict[str, Any]:
    return dict.fromkeys(KEYS) | dataclasses.asdict(setting) | found


def _baseline(results: Results) -> dict[str, Any]:
    base = sorted(results.baseline, key=lambda run: run.seconds)[len(results.baseline) // 2]
    return {
        "name": "static batches, contiguous KV",
        **_figures(base),
        **_ratio(ratio(results.rates, [run.tokens_per_s for run in results.baseline])),
        "same_outputs": same_outputs(_tokens(results.paged[-1]), _tokens(results.baseline[-1])),
    }


def _peer(results: Results) -> dict[str, Any]:
    assert results.peer is not None
    name, details = results.peer
    told = results.peer_outputs
    return {
        "peer": name,
        "peer_details": details,
        "peer_tokens_per_s": _round(Spread.of(results.peer_rates).median),
        "peer_same_outputs": None if told is None else same_outputs(_tokens(results.paged[-1]), told),
        **_ratio(ratio(results.rates, results.peer_rates)),
    }


def _figures(run: Run) -> dict[str, Any]:
    return {
        "seconds": _round(run.seconds),
        "prefill_tokens_per_s": _round(run.prefill_rate),
        "decode_tokens_per_s": _round(run.decode_rate),
        "output_tokens_per_s": _round(run.tokens_per_s),
        "ttft_ms": percentiles_ms(run.ttft),
        "itl_ms": percentiles_ms(run.itl),
        "gap_ms": percentiles_ms(run.gaps),
    }


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
