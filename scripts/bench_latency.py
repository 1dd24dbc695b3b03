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
import math

from absl import flags

from benchmarks import running, workload_flags
from common import command, model_flags
from common.progress import Progress

LEAST_RATE = 0.001  # with which a request comes every quarter of an hour; with less, one waits for nothing

_CASE = flags.DEFINE_enum("case", "mixed", ("single", "parallel16", "mixed"), "The requests.")
_RATE = flags.DEFINE_float(
    "rate", 0.0, f"Requests a second, on average: 0 is all at once, else at least {LEAST_RATE:g}."
)

GROUPS = {
    "Workload": ("case", *workload_flags.WORKLOAD, "rate", "seed"),
    "Model": model_flags.MODEL,
    "Memory and batching": model_flags.ENGINE,
    "Output": ("repeats", "json", "verbose"),
}


def main() -> int:
    case = workload_flags.case(_CASE.value)
    requested = rate()
    running.given()  # before the model is loaded for nothing
    llm = running.engine(case, None)
    from benchmarks import records, report, turns, workloads
    from benchmarks.results import Results

    workload = running.workload(case, llm)
    arrivals = workloads.arrivals(len(workload.prompts), requested, flags.FLAGS.seed)
    results = Results(running.setting(_CASE.value, llm), workload)
    repeats = flags.FLAGS.repeats
    with Progress("measuring", 2 + 2 * repeats, "runs") as bar:
        turns.latency(results, llm, arrivals, repeats, running.counter(bar))
    if flags.FLAGS.json:
        print(json.dumps(records.latency(results, requested)))
    else:
        print(report.latency(results, f"{_CASE.value}: {case.about}", requested))
    return command.OK


def rate() -> float:
    """The value of --rate.

    Raises:
      ValueError: it is none, or requests would come for ever.
    """
    given = _RATE.value
    if given != 0 and not LEAST_RATE <= given < math.inf:
        raise ValueError(
            f"rate={given:g} must be a finite number of requests a second, at least {LEAST_RATE:g}; "
            "try --rate=2, or --rate=0 for all at once"
        )
    return given


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
