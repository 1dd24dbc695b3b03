"""Measures how many tokens a second the engine makes, beside a contiguous baseline and, if asked, another engine.

    python scripts/bench_throughput.py                                   64 requests of mixed lengths, 16 at once
    python scripts/bench_throughput.py --case=single,parallel16 --repeats=5
    python scripts/bench_throughput.py --case=mixed --peer=transformers --peer_python=other/bin/python
    python scripts/bench_throughput.py --case=context,sampling           what a long context and sampling cost
    python scripts/bench_throughput.py --prompts_file=prompts.txt --output_len=64 --json

Cases: single, one request of 64 tokens for 128 more; parallel16, sixteen of those; mixed, 64 requests of 16 to 512
tokens for 16 to 256 more; azure, 64 requests as long as real conversations (Azure LLM inference trace 2023), in the KV
memory of 8 requests of 2,048 tokens for either engine; sampling, parallel16 at temperature 0.8 and top-p 0.95 against
greedy; context, the time of a decode step of 16 sequences at 1,024 tokens against 16 (here --prompt_len says both
lengths, --slots how many sequences, and the greater --output_len how many steps are timed).

Every engine generates the same number of tokens for the same ids, EOS or not, and only those count. It runs once before
anything is timed, so nothing compiles in a timed run; then the engines take turns, --repeats times, and what is printed
are medians, with the least and the most. Ratios are taken within each turn. The baseline is this project's model over
a contiguous cache in static batches. The peer runs in a process of its own with the same weights and as many threads as
there are processors; it needs torch and transformers, or xllamacpp (or llama-cpp-python), which jpaged does not.

--json prints an object a line for each case, with the same keys for all; what a case does not have is null. Rates count
output tokens over the whole run, except prefill_tokens_per_s and decode_tokens_per_s (prompt tokens of the steps that
compute any, and tokens of the other steps) and total_tokens_per_s (prompt and output). gap_ms is the gap between two
arrivals of one request's tokens; itl_ms shares it out among the tokens that came together. ratio is to the peer's rate;
of context, the long step's time to the short one's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from benchmarks import case_flags, running, workload_flags
from common import command, model_flags
from common.progress import Progress

if TYPE_CHECKING:
    from benchmarks.results import Results
    from benchmarks.workloads import Case, Workload
    from jpaged.llm import LLM

_PEER = flags.DEFINE_enum("peer", None, ("transformers", "llama.cpp"), "Another engine to run beside ours.")
_PEER_PYTHON = flags.DEFINE_string("peer_python", None, "The Python that has the peer; without this flag, this one.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the rates into this file (.png, .svg, .pdf); needs matplotlib.")

GROUPS = {
    "Workload": ("case", *workload_flags.WORKLOAD, "seed"),
    "Comparison": ("repeats", "peer", "peer_python"),
    "Model": model_flags.MODEL,
    "Memory and batching": model_flags.ENGINE,
    "Output": ("json", "plot", "verbose"),
}


def main() -> int:
    cases = case_flags.chosen()
    if _PLOT.value is not None:
        from benchmarks import plot

        plot.check(_PLOT.value)
    running.given()  # before the model is loaded for nothing
    loaded, drawn = None, []
    for number, (name, case) in enumerate(cases):
        llm = running.engine(case, loaded)
        loaded = llm.engine.loaded
        text, record, results = {"sampling": sampling, "context": context}.get(name, throughput)(name, case, llm)
        del llm  # its KV makes room for the next case's
        if flags.FLAGS.json:
            print(json.dumps(record), flush=True)
        else:
            print(("\n" if number else "") + text, flush=True)
        if results is not None:
            drawn.append(results)
    if _PLOT.value is not None:
        from benchmarks import plot

        plot.rates(drawn, _PLOT.value)
    return command.OK


def throughput(name: str, case: Case, llm: LLM) -> tuple[str, dict[str, Any], Results]:
    """Paged engine, baseline and peer: for people, for programs, and for a plot."""
    from benchmarks import records, report, turns
    from benchmarks.results import TARGETS, Results

    workload, repeats = running.workload(case, llm), flags.FLAGS.repeats
    results = Results(running.setting(name, llm), workload)
    with peer_of(llm, workload) as peer:
        each = 3 if peer else 2
        with Progress(f"measuring {name}", 2 + repeats * each, "runs") as bar:
            results.peer = peer and (peer.name, peer.details)
            turns.throughput(results, llm, peer, repeats, running.counter(bar))
    target = TARGETS.get((name, _PEER.value or "", results.setting.dtype))
    text = report.throughput(results, f"{name}: {case.about}", target)
    return text, records.throughput(results, target), results


def sampling(name: str, case: Case, llm: LLM) -> tuple[str, dict[str, Any], Results]:
    """Sampled against greedy."""
    from benchmarks import records, report, turns
    from benchmarks.results import Results

    repeats = flags.FLAGS.repeats
    results = Results(running.setting(name, llm), running.workload(case, llm))
    with Progress(f"measuring {name}", 2 + repeats, "runs") as bar:
        sampled = turns.sampling(results, llm, repeats, running.counter(bar))
    text = report.sampling(results, sampled, f"{name}: {case.about}")
    return text, records.sampling(results, sampled), results


def context(name: str, case: Case, llm: LLM) -> tuple[str, dict[str, Any], None]:
    """A decode step at the case's shortest and longest prompt."""
    from benchmarks import records, report, turns, workloads

    repeats = flags.FLAGS.repeats
    full = dataclasses.replace(case, requests=case.slots, prompt_len=(case.prompt_len[1],) * 2)
    workload = workloads.synthetic(full, llm.engine.loaded.model.spec.vocab_size, flags.FLAGS.seed)
    with Progress(f"measuring {name}", 2 * (repeats + 1), "runs") as bar:
        counter = running.counter(bar)
        seconds = turns.contexts(llm, workload, case.prompt_len, case.output_len[1], repeats, counter)
    found = running.setting(name, llm), case.slots, case.prompt_len, seconds
    return report.context(*found, f"{name}: {case.about}"), records.context(*found), None


def peer_of(llm: LLM, workload: Workload) -> Any:
    """The peer that was asked for, as a context; a context of None without one."""
    if _PEER.value is None:
        return contextlib.nullcontext()
    from benchmarks import peers

    source = peers.gguf_source(flags.FLAGS.model) if _PEER.value == "llama.cpp" else None
    python = _PEER_PYTHON.value or sys.executable
    return peers.start(_PEER.value, python, llm.engine.loaded, source, llm.config.dtype, peers.processors(), workload)


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
