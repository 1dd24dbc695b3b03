"""Measures what the host does in each step, and what the allocator takes on the device.

    python scripts/bench_host.py
    python scripts/bench_host.py --slots=64 --decode_steps=1,8 --json

Host work is scheduling, packing the plan, sending it, reading the step before and handing its tokens to the requests.
It is timed with a device that answers at once, so nothing of a model is in it; text is timed apart, with a tokenizer of
bytes. The allocator's functions are timed alone, with every slot taking part and crossing a block border. Figures are
medians.

--json prints one object: slots, host (for each number of decode steps in a dispatch, microseconds of a dispatch, of a
decode step, of a dispatch that starts sequences, and of text), num_blocks, allocator_slots, allocator_ms, and targets.
"""

from __future__ import annotations

import json
from typing import Any

from absl import flags

from common import command

STEP_TARGET_US = 300.0  # of host work in a step, at 256 slots, text apart
APPEND_TARGET_MS = 2.0  # at 65,536 blocks and 512 slots

_SLOTS = flags.DEFINE_integer("slots", 256, "Sequences at once.", lower_bound=1)
_DECODE_STEPS = flags.DEFINE_list("decode_steps", ["1", "8"], "Decode steps in a dispatch, one number or several.")
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 256, "Tokens that each sequence generates.", lower_bound=2)
_NUM_BLOCKS = flags.DEFINE_integer("num_blocks", 65536, "Blocks of the allocator's pool.", lower_bound=4)
_ALLOCATOR_SLOTS = flags.DEFINE_integer("allocator_slots", 512, "Slots of the allocator.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 50, "Calls of each of the allocator's functions.", lower_bound=1)
_JSON = flags.DEFINE_boolean("json", False, "Print JSON.")

GROUPS = {
    "What to measure": ("slots", "decode_steps", "output_len", "num_blocks", "allocator_slots", "repeats"),
    "Output": ("json", "verbose"),
}


def main() -> int:
    counts = decode_steps()
    if _NUM_BLOCKS.value < 2 * _ALLOCATOR_SLOTS.value:
        raise ValueError(f"num_blocks={_NUM_BLOCKS.value} must be two for each of the {_ALLOCATOR_SLOTS.value} slots")
    from benchmarks import host

    record: dict[str, Any] = {
        "slots": _SLOTS.value,
        "host": {str(steps): host_us(steps) for steps in counts},
        "num_blocks": _NUM_BLOCKS.value,
        "allocator_slots": _ALLOCATOR_SLOTS.value,
        "allocator_ms": {
            name: round(1e3 * seconds, 4)
            for name, seconds in host.allocator_seconds(
                _NUM_BLOCKS.value, _ALLOCATOR_SLOTS.value, _REPEATS.value
            ).items()
        },
        "targets": {"step_us": STEP_TARGET_US, "append_ms": APPEND_TARGET_MS},
    }
    print(json.dumps(record) if _JSON.value else text(record))
    return command.OK


def decode_steps() -> list[int]:
    """The numbers of --decode_steps.

    Raises:
      ValueError: some of them are none.
    """
    wrong = [given for given in _DECODE_STEPS.value if not (given.isdecimal() and int(given))]
    if wrong or not _DECODE_STEPS.value:
        raise ValueError(f"decode_steps={','.join(_DECODE_STEPS.value)!r} must be positive numbers; try 1,8")
    return [int(given) for given in _DECODE_STEPS.value]


def host_us(steps: int) -> dict[str, float]:
    """Microseconds of one dispatch of so many decode steps."""
    from benchmarks import host
    from jpaged.tokenizer import ByteTokenizer

    plain = host.step_seconds(_SLOTS.value, steps, _OUTPUT_LEN.value, None)
    with_text = host.step_seconds(_SLOTS.value, steps, _OUTPUT_LEN.value, ByteTokenizer())
    return {
        "dispatch": round(1e6 * plain["decode"], 1),
        "step": round(1e6 * plain["decode"] / steps, 1),
        "admitting": round(1e6 * plain["admit"], 1),
        "text": round(1e6 * (with_text["decode"] - plain["decode"]), 1),
    }


def text(record: dict[str, Any]) -> str:
    """The same for people."""
    from benchmarks.report import table, verdict

    rows: list[tuple[str, ...]] = [
        ("decode steps a dispatch", "dispatch", "a step", "dispatch that starts sequences", "text of a dispatch")
    ]
    for steps, found in record["host"].items():
        rows.append((steps, *(f"{found[kind]:,.0f} µs" for kind in ("dispatch", "step", "admitting", "text"))))
    least = min(found["step"] for found in record["host"].values())
    append = record["allocator_ms"]["append"]
    calls = [("allocator", "a call"), *((name, f"{ms:.2f} ms") for name, ms in record["allocator_ms"].items())]
    return "\n".join(
        [
            f"host work, {record['slots']} sequences decoding",
            table(rows),
            f"{least:,.0f} µs a step{verdict(least, STEP_TARGET_US, at_most=True)}",
            "",
            f"{record['num_blocks']:,} blocks, {record['allocator_slots']} slots",
            table(calls),
            f"append {append:.2f} ms{verdict(append, APPEND_TARGET_MS, at_most=True)}",
        ]
    )


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
