"""Flags that choose a workload, and the workload that they choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import flags

from . import workloads
from .workloads import CASES, Case, Workload

_REQUESTS = flags.DEFINE_integer("requests", None, "Requests; without this flag, the case's own.", lower_bound=1)
_PROMPT_LEN = flags.DEFINE_string("prompt_len", None, "Tokens of a synthetic prompt, 64 or a range 16:512.")
_OUTPUT_LEN = flags.DEFINE_string("output_len", None, "Tokens that a request generates, 128 or a range 16:256.")
_SLOTS = flags.DEFINE_integer(
    "slots", None, "Requests at once: the engine's slots, and the size of a static batch.", lower_bound=1
)
flags.DEFINE_string(
    "prompts_file", None, "Prompts instead of synthetic ones: a text a line, or FILE.jsonl as for decode.py."
)
flags.DEFINE_integer("repeats", 3, "Timed runs of each engine.", lower_bound=1)
flags.DEFINE_boolean("json", False, "Print JSON.")

WORKLOAD = ("requests", "prompt_len", "output_len", "slots", "prompts_file")


def case(name: str) -> Case:
    """A named case, with what the flags change of it.

    Raises:
      ValueError: a range is none.
    """
    return changed(CASES[name])


def changed(case: Case) -> Case:
    """A case, with what the flags change of it.

    Raises:
      ValueError: a range is none.
    """
    wanted = {
        "requests": _REQUESTS.value,
        "slots": _SLOTS.value,
        "prompt_len": _PROMPT_LEN.value and workloads.parse_range(_PROMPT_LEN.value),
        "output_len": _OUTPUT_LEN.value and workloads.parse_range(_OUTPUT_LEN.value),
    }
    return dataclasses.replace(case, **{key: value for key, value in wanted.items() if value})


def workload(case: Case, vocab_size: int, seed: int, prompts: Sequence[Sequence[int]] | None) -> Workload:
    """Its requests: with these prompts, or with synthetic ones."""
    if prompts is None:
        return workloads.synthetic(case, vocab_size, seed)
    return workloads.given(case, prompts[: _REQUESTS.value], seed)
