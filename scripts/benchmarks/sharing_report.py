"""What bench_sharing.py prints, for people and for programs. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .measure import Spread, ratio
from .report import table, verdict
from .results import Setting
from .sharing import PAPER, Found

SAVED_TARGET = 0.5  # of width 4, at least: blocks saved by a beam search over those without sharing
OVERHEAD_TARGET = 0.25  # at most: the time of a search over that of as many greedy rows
PREFILL_TARGET = 1.1  # at most: prompt tokens computed over those that no request can do without


def record(found: Found, setting: Setting, block_size: int) -> dict[str, Any]:
    """One line of --json."""
    asked, speed = found.asked, ratio(found.apart_seconds, found.seconds)
    return {
        "case": asked.case,
        "width": asked.width,
        "model": setting.model,
        "backend": setting.backend,
        "dtype": setting.dtype,
        "jax": setting.jax,
        "device": setting.device,
        "threads": setting.threads,
        "requests": asked.requests,
        "prefix_len": asked.prefix_len,
        "prompt_len": asked.prompt_len,
        "output_len": asked.output_len,
        "block_size": block_size,
        "blocks_peak": found.peak,
        "unshared_blocks_peak": found.unshared_peak,
        "kv_saved": round(found.saved, 4),
        "paper_kv_saved": {name: list(each) for name, each in PAPER[asked.case].items()}
        if asked.case in PAPER
        else None,
        "prefill_tokens": found.prefill_tokens,
        "prefill_share": round(prefill_share(found), 4),
        "output_tokens": found.output_tokens,
        "output_tokens_per_s": round(found.output_tokens / Spread.of(found.seconds).median, 2),
        "ratio": round(speed.median, 4),
        "ratio_range": [round(speed.least, 4), round(speed.most, 4)],
        "overhead": round(1 / speed.median - 1, 4) if asked.case == "beam" else None,
        "seconds": [round(each, 4) for each in found.seconds],
        "apart_seconds": [round(each, 4) for each in found.apart_seconds],
    }


def prefill_share(found: Found) -> float:
    """Prompt tokens computed, over the prefix once and every prompt's own once."""
    asked = found.asked
    return found.prefill_tokens / (asked.prefix_len + asked.requests * asked.prompt_len)


def text(every: Sequence[Found], setting: Setting, block_size: int) -> str:
    """A table, what the paper found, and verdicts."""
    rows: list[tuple[str, ...]] = [("", "KV saved", "paper", "blocks at peak", "tokens/s", "without sharing")]
    rows += [_row(found) for found in every]
    first = every[0].asked
    lines = [
        f"{first.requests} requests of {first.prompt_len} tokens for {first.output_len} more, blocks of {block_size}",
        str(setting),
        "",
        table(rows),
        "",
        "KV saved: blocks saved by sharing over blocks without it, as in the paper (SOSP'23, section 6.3: OPT-13B on",
        "an A100, 2 to 6 sequences; Alpaca's prompts are about 19 tokens for 58 more, ShareGPT's 161 for 338).",
    ]
    return "\n".join([*lines, *(line for found in every for line in _verdicts(found))])


def _row(found: Found) -> tuple[str, ...]:
    asked, speed = found.asked, ratio(found.apart_seconds, found.seconds)
    paper = PAPER.get(asked.case)
    told = (
        ", ".join(f"{name} {100 * low:.0f}-{100 * high:.0f} %" for name, (low, high) in paper.items()) if paper else ""
    )
    against = "as many greedy rows" if asked.case == "beam" else "without"
    return (
        _name(found),
        f"{100 * found.saved:.1f} %",
        told,
        f"{found.peak} for {found.unshared_peak}",
        f"{found.output_tokens / Spread.of(found.seconds).median:.1f}",
        f"{speed.median:.2f} times {against}",
    )


def _name(found: Found) -> str:
    asked = found.asked
    if asked.case == "prefix":
        return f"prefix of {asked.prefix_len} tokens, {asked.requests} requests"
    return f"{asked.width} samples" if asked.case == "parallel" else f"{asked.width} beams"


def _verdicts(found: Found) -> list[str]:
    asked = found.asked
    if asked.case == "prefix":
        share = prefill_share(found)
        return [f"prefill: {share:.3f} of the least{verdict(share, PREFILL_TARGET, at_most=True)}"]
    if asked.case == "beam" and asked.width == 4:
        overhead = 1 / ratio(found.apart_seconds, found.seconds).median - 1
        return [
            f"4 beams save {found.saved:.2f}{verdict(found.saved, SAVED_TARGET)}",
            f"4 beams take {overhead:.2f} longer than greedy{verdict(overhead, OVERHEAD_TARGET, at_most=True)}",
        ]
    return []
