"""What bench_host.py prints for people: its record in tables, and a verdict for each target. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .report import table, verdict


def text(record: dict[str, Any]) -> str:
    """The record of --json, as lines."""
    steps: list[tuple[str, ...]] = [
        ("decode steps a dispatch", "dispatch", "a step", "dispatch that starts sequences", "text of a dispatch")
    ]
    for count, found in record["host"].items():
        steps.append((count, *(f"{found[kind]:,.0f} µs" for kind in ("dispatch", "step", "admitting", "text"))))
    append = record["allocator_ms"]["append"]
    calls = [("allocator", "a call"), *((name, f"{ms:.2f} ms") for name, ms in record["allocator_ms"].items())]
    return "\n".join(
        [
            f"host work, {record['slots']} sequences decoding",
            table(steps),
            *_verdicts(record),
            f"scheduler with {record['waiting']:,} more waiting: {record['scheduler_us']:,.0f} µs a step"
            f"{verdict(record['scheduler_us'], record['targets']['scheduler_us'], at_most=True)}",
            f"prefix of {record['lookup_len']:,} tokens looked up in {record['lookup_ms']:.1f} ms"
            f"{verdict(record['lookup_ms'], record['targets']['lookup_ms'], at_most=True)}",
            "",
            f"{record['num_blocks']:,} blocks, {record['allocator_slots']} slots",
            table(calls),
            f"append {append:.2f} ms{verdict(append, record['targets']['append_ms'], at_most=True)}",
        ]
    )


def _verdicts(record: dict[str, Any]) -> Iterator[str]:
    """One for each number of decode steps: the best of them says nothing about the others."""
    for count, found in record["host"].items():
        judged = verdict(found["step"], record["targets"]["step_us"], at_most=True)
        yield f"{count} decode step{'s' * (count != '1')} a dispatch: {found['step']:,.0f} µs a step{judged}"
