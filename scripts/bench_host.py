"""Measures what the host does in each step, and what the allocator takes on the device.

    python scripts/bench_host.py
    python scripts/bench_host.py --slots=64 --decode_steps=1,8 --json

Host work is scheduling, packing the plan, and handing the tokens of the step before to the requests. It is timed with a
device that answers at once, so nothing of a model is in it, nor of moving plans and tokens to and from a device; text
is timed apart, with a tokenizer of bytes. The allocator's functions are timed alone, with every slot taking part and
crossing a block border. The scheduler is timed alone, too, with --slots sequences decoding and --waiting more in the
queue, and the prefix cache with a prompt of --lookup_len tokens that it has. Figures are medians.

--json prints one object: slots, host (for each number of decode steps in a dispatch, microseconds of a dispatch, of a
decode step, of a dispatch that starts sequences, and of text), waiting, scheduler_us, lookup_len, lookup_ms,
num_blocks, allocator_slots, allocator_ms, and targets.
"""

from __future__ import annotations

import json
from typing import Any

from absl import flags

from common import command
from jpaged.config import EngineConfig

STEP_TARGET_US = 300.0  # of host work in a step, at 256 slots, text apart
APPEND_TARGET_MS = 2.0  # at 65,536 blocks and 512 slots
SCHEDULER_TARGET_US = 1000.0  # with 256 that run and 1,000 that wait
LOOKUP_TARGET_MS = 5.0  # of 32,768 tokens

_SLOTS = flags.DEFINE_integer("slots", 256, "Sequences at once.", lower_bound=1)
_DECODE_STEPS = flags.DEFINE_list("decode_steps", ["1", "8"], "Decode steps in a dispatch, one number or several.")
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 256, "Tokens that each sequence generates.", lower_bound=2)
_WAITING = flags.DEFINE_integer("waiting", 1000, "Sequences that wait.", lower_bound=0)
_LOOKUP_LEN = flags.DEFINE_integer("lookup_len", 32768, "Tokens of a prompt that is looked up.", lower_bound=16)
_NUM_BLOCKS = flags.DEFINE_integer("num_blocks", 65536, "Blocks of the allocator's pool.", lower_bound=4)
_ALLOCATOR_SLOTS = flags.DEFINE_integer("allocator_slots", 512, "Slots of the allocator.", lower_bound=1)
_REPEATS = flags.DEFINE_integer(
    "repeats", 50, "Calls of each of the allocator's functions, and as many steps and look-ups.", lower_bound=1
)
_JSON = flags.DEFINE_boolean("json", False, "Print JSON.")

GROUPS = {
    "What to measure": (
        "slots",
        "decode_steps",
        "output_len",
        "waiting",
        "lookup_len",
        "num_blocks",
        "allocator_slots",
        "repeats",
    ),
    "Output": ("json", "verbose"),
}


def main() -> int:
    counts = decode_steps()
    check_blocks()
    command.start_jax()
    check_output_len(max(counts))
    from benchmarks import allocator, host_report, planning

    host = {str(steps): host_us(steps) for steps in counts}
    seconds = allocator.call_seconds(_NUM_BLOCKS.value, _ALLOCATOR_SLOTS.value, _REPEATS.value)
    record: dict[str, Any] = {
        "slots": _SLOTS.value,
        "host": host,
        "waiting": _WAITING.value,
        "scheduler_us": round(1e6 * planning.schedule_seconds(_SLOTS.value, _WAITING.value, _REPEATS.value), 1),
        "lookup_len": _LOOKUP_LEN.value,
        "lookup_ms": round(1e3 * planning.lookup_seconds(_LOOKUP_LEN.value, _REPEATS.value), 3),
        "num_blocks": _NUM_BLOCKS.value,
        "allocator_slots": _ALLOCATOR_SLOTS.value,
        "allocator_ms": {name: round(1e3 * each, 4) for name, each in seconds.items()},
        "targets": {
            "step_us": STEP_TARGET_US,
            "append_ms": APPEND_TARGET_MS,
            "scheduler_us": SCHEDULER_TARGET_US,
            "lookup_ms": LOOKUP_TARGET_MS,
        },
    }
    print(json.dumps(record) if _JSON.value else host_report.text(record))
    return command.OK


def decode_steps() -> list[int]:
    """The numbers of --decode_steps.

    Raises:
      ValueError: some of them are none, or more than an engine makes.
    """
    wrong = [given for given in _DECODE_STEPS.value if not (given.isdecimal() and int(given))]
    if wrong or not _DECODE_STEPS.value:
        raise ValueError(f"decode_steps={','.join(_DECODE_STEPS.value)!r} must be positive numbers; try 1,8")
    counts = [int(given) for given in _DECODE_STEPS.value]
    EngineConfig(decode_steps=max(counts))  # refuses what is too much, and names the flag
    return counts


def check_blocks() -> None:
    """Before anything is measured.

    Raises:
      ValueError: the pool is too small for every slot to cross a block border.
    """
    blocks, slots = _NUM_BLOCKS.value, _ALLOCATOR_SLOTS.value
    if blocks < 2 * slots:
        raise ValueError(
            f"num_blocks={blocks} must be two for each of the {slots} slots; "
            f"try --num_blocks={2 * slots} or --allocator_slots={blocks // 2}"
        )


def check_output_len(steps: int) -> None:
    """Before anything is measured.

    Args:
      steps: The most decode steps of a dispatch.

    Raises:
      ValueError: the first sequences would be over before the last have started, or there is no room for all.
    """
    from benchmarks import host

    slots, given = _SLOTS.value, _OUTPUT_LEN.value
    least, most = host.output_lens(slots, steps)
    setting = f"--slots={slots} and --decode_steps={steps}"
    if least > most:
        raise ValueError(
            f"{setting} want at least {least} tokens of each sequence, and the benchmark has room for {max(0, most)}; "
            "try fewer --slots or --decode_steps"
        )
    if not least <= given <= most:
        raise ValueError(
            f"output_len={given} must be from {least} to {most} with {setting}, so that all sequences decode together "
            f"and have room; try --output_len={min(max(given, least), most)}, or other --slots or --decode_steps"
        )


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


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
