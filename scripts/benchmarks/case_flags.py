"""The flag that names the cases of bench_throughput.py, and whether they can use the other flags that were given."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from . import workload_flags
from .workloads import CASES, Case

_CASE = flags.DEFINE_list("case", ["mixed"], f"What to measure: {', '.join(CASES)}, or several with commas.")

# Flags that a case has no use for; a case that is not here uses all of them.
NO_USE = {
    "azure": ("prompt_len", "output_len", "prompts_file"),
    "sampling": ("peer", "peer_python"),
    "context": ("requests", "prompts_file", "peer", "peer_python", "plot"),
}


def chosen() -> list[tuple[str, Case]]:
    """The cases by name, with what the flags change of them.

    Raises:
      ValueError: a case is none, or none of them can use a flag that was given.
    """
    names = _CASE.value
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise ValueError(f"case={','.join(unknown)!r} must be of {', '.join(CASES)}; try --case=mixed")
    if idle := [f"--{flag}" for flag in _of_no_use(names) if flags.FLAGS[flag].present]:
        asked = f"--case={','.join(names)}"
        raise ValueError(f"{asked} has no use for {', '.join(idle)}; leave that out, or try {asked},mixed")
    cases = [(name, workload_flags.case(name)) for name in names]
    for name, case in cases:
        if name == "context" and case.prompt_len[0] == case.prompt_len[1]:
            raise ValueError(
                f"prompt_len={case.prompt_len[0]} is one length and --case=context compares two; "
                "try --prompt_len=16:1024"
            )
    return cases


def _of_no_use(names: Sequence[str]) -> list[str]:
    """The flags that none of these cases can use."""
    known = dict.fromkeys(flag for unused in NO_USE.values() for flag in unused)
    return [flag for flag in known if all(flag in NO_USE.get(name, ()) for name in names)]
