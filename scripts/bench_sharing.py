"""Measures what sharing saves: samples of one prompt, beams, requests that begin alike.

    python scripts/bench_sharing.py                                    2, 4 and 6 samples and beams, a shared prefix
    python scripts/bench_sharing.py --case=beam --widths=4 --repeats=5
    python scripts/bench_sharing.py --case=parallel --prompt_len=161 --output_len=338 --json
    python scripts/bench_sharing.py --plot=saved.png

Cases: parallel, so many samples of each prompt, which share its blocks and copy a last one that is not full; beam, beam
searches of so many beams, which share all that they have in common; prefix, --prefix_requests requests of --prefix_len
equal tokens and --suffix_len of their own, of which the prefix cache computes the equal ones once.

KV saved is what the paper plots (PagedAttention, SOSP'23, section 6.3): blocks saved by sharing over the blocks that
there would be without, over all steps. Then runs with and without sharing take turns, --repeats times, after one of
each that warms up. Without sharing, samples are requests that may share nothing; a search is held against as many
greedy rows, which is what it costs to search. The paper's figures stand beside ours; they are of another model and
machine, and of other lengths.

--json prints an object a line. ratio is the time without sharing to that with it; prefill_share the prompt tokens
computed over those that cannot be done without; overhead, of beams, the time over that of as many greedy rows, less 1.
"""

from __future__ import annotations

import dataclasses
import json

from absl import flags

from benchmarks import running, workload_flags
from benchmarks.workloads import Case
from common import command, model_flags
from common.progress import Progress

CASES = ("parallel", "beam", "prefix")
SAMPLED = Case("samples and beams", 4, (64, 64), (128, 128), 16)

_CASE = flags.DEFINE_list("case", list(CASES), f"What to measure, of {', '.join(CASES)}.")
_WIDTHS = flags.DEFINE_list("widths", ["2", "4", "6"], "Samples and beams, one number or several.")
_PREFIX_REQUESTS = flags.DEFINE_integer("prefix_requests", 32, "Requests with a prefix in common.", lower_bound=1)
_PREFIX_LEN = flags.DEFINE_integer("prefix_len", 512, "Tokens of the prefix.", lower_bound=1)
_SUFFIX_LEN = flags.DEFINE_integer("suffix_len", 32, "Tokens behind it.", lower_bound=1)
_PREFIX_OUTPUT_LEN = flags.DEFINE_integer("prefix_output_len", 32, "Tokens that each generates.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw what was saved into this file (.png, .svg, .pdf); needs matplotlib.")

GROUPS = {
    "Workload": ("case", "widths", "requests", "prompt_len", "output_len", "slots", "seed"),
    "Shared prefix": ("prefix_requests", "prefix_len", "suffix_len", "prefix_output_len"),
    "Model": model_flags.MODEL,
    "Memory and batching": model_flags.ENGINE,
    "Output": ("repeats", "json", "plot", "verbose"),
}


def main() -> int:
    cases, widths = chosen()
    if _PLOT.value is not None:
        from benchmarks import plot

        plot.check(_PLOT.value)
    case = workload_flags.changed(SAMPLED)
    for name, ends in (("prompt_len", case.prompt_len), ("output_len", case.output_len)):
        if ends[0] != ends[1]:
            raise ValueError(f"{name}={ends[0]}:{ends[1]} must be one length here; try --{name}={ends[1]}")
    # As many as run together at the most: samples and beams of all prompts, or requests with a prefix in common.
    rows = max(case.requests * max(widths) if set(cases) != {"prefix"} else 1, case.slots if "prefix" in cases else 1)
    beams = max(widths) if "beam" in cases else 1
    llm = running.engine(dataclasses.replace(case, slots=rows), None, max_beam_width=beams)
    from benchmarks import sharing, sharing_report

    sampled = case.requests, case.prompt_len[0], case.output_len[0]
    asked = [sharing.Asked(kind, width, *sampled) for kind in cases if kind != "prefix" for width in widths]
    if "prefix" in cases:
        alike = _PREFIX_REQUESTS.value, _SUFFIX_LEN.value, _PREFIX_OUTPUT_LEN.value
        asked.append(sharing.Asked("prefix", 1, *alike, prefix_len=_PREFIX_LEN.value))
    repeats, found = flags.FLAGS.repeats, []
    setting = running.setting("sharing", llm)
    with Progress("measuring", len(asked) * (2 + repeats), "runs") as bar:
        counter = running.counter(bar)
        for each in asked:
            found.append(sharing.measure(llm, each, repeats, flags.FLAGS.seed, counter))
            if flags.FLAGS.json:
                print(json.dumps(sharing_report.record(found[-1], setting, llm.config.block_size)), flush=True)
    if not flags.FLAGS.json:
        print(sharing_report.text(found, setting, llm.config.block_size))
    if _PLOT.value is not None:
        from benchmarks import plot

        plot.saved(found, str(setting), _PLOT.value)
    return command.OK


def chosen() -> tuple[list[str], list[int]]:
    """Cases and widths.

    Raises:
      ValueError: there are none, or others.
    """
    cases, widths = list(dict.fromkeys(_CASE.value)), list(dict.fromkeys(_WIDTHS.value))
    unknown = [case for case in cases if case not in CASES]
    if unknown or not cases:
        raise ValueError(f"case={','.join(_CASE.value)!r} must be of {', '.join(CASES)}; try --case=beam")
    if not widths or not all(width.isdecimal() and int(width) for width in widths):
        raise ValueError(f"widths={','.join(_WIDTHS.value)!r} must be positive numbers; try --widths=2,4,6")
    if flags.FLAGS.prompts_file is not None:
        raise ValueError("prompts_file is for other benchmarks: here prompts are synthetic; try --prompt_len")
    return cases, [int(width) for width in widths]


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
