"""Measures how long people wait: for the first token, and between tokens, while requests come at some rate.

    python scripts/bench_latency.py                                  64 requests, all at once
    python scripts/bench_latency.py --rate=2                         two a second on average, at random (Poisson)
    python scripts/bench_latency.py --rate=2 --prompt_len=16:512 --output_len=16:256 --slots=16 --json
    python scripts/bench_latency.py --prompts_file=prompts.txt --rate=0.5

Requests stream, and what counts is when their tokens can be read. The first token is timed from the moment that its
request came, so time in the queue counts. Tokens come several at a time (--decode_steps): "between arrivals" is the
time from one arrival to the next, as a reader sees it, and "between tokens" shares it out among the tokens that came
together. The baseline is this project's model over a contiguous cache in static batches: whoever has come when a batch
is done makes the next one.

The engines take turns, --repeats times, with the same arrivals each time; figures are over all requests of all turns.
Everything is compiled before. --json prints one object; its keys are those of bench_throughput.py, and rate,
end_to_end_ms.
"""

from __future__ import annotations

import json

from absl import flags

from benchmarks import running, workload_flags
from common import command, model_flags
from common.progress import Progress

_CASE = flags.DEFINE_enum("case", "mixed", ("single", "parallel16", "mixed"), "The requests.")
_RATE = flags.DEFINE_float("rate", 0.0, "Requests a second, on average; 0 is all at once.", lower_bound=0.0)

GROUPS = {
    "Workload": ("case", *workload_flags.WORKLOAD, "rate", "seed"),
    "Model": model_flags.MODEL,
    "Memory and batching": model_flags.ENGINE,
    "Output": ("repeats", "json", "verbose"),
}


def main() -> int:
    case = workload_flags.case(_CASE.value)
    llm = running.engine(case, None)
    from benchmarks import report, turns, workloads
    from benchmarks.results import Results

    workload = running.workload(case, llm)
    arrivals = workloads.arrivals(len(workload.prompts), _RATE.value, flags.FLAGS.seed)
    results = Results(running.setting(_CASE.value, llm), workload)
    repeats = flags.FLAGS.repeats
    with Progress("measuring", 2 + 2 * repeats, "runs") as bar:
        turns.latency(results, llm, running.clock, arrivals, repeats, running.counter(bar))
    if flags.FLAGS.json:
        print(json.dumps(report.latency_json(results, _RATE.value)))
    else:
        print(report.latency_text(results, f"{_CASE.value}: {case.about}", _RATE.value))
    return command.OK


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
