"""Measures how many tokens a second the engine makes, beside a contiguous baseline and, if asked, another engine.

    python scripts/bench_throughput.py                                   64 requests of mixed lengths, 16 at once
    python scripts/bench_throughput.py --case=single,parallel16 --repeats=5
    python scripts/bench_throughput.py --case=mixed --peer=transformers --peer_python=other/bin/python
    python scripts/bench_throughput.py --case=context,sampling           what a long context and sampling cost
    python scripts/bench_throughput.py --prompts_file=prompts.txt --output_len=64 --json

Cases: single, one request of 64 tokens for 128 more; parallel16, sixteen of those; mixed, 64 requests of 16 to 512
tokens for 16 to 256 more; sampling, parallel16 at temperature 0.8 and top-p 0.95 against greedy; context, the time of a
decode step of 16 sequences at 1,024 tokens against 16.

Every engine generates the same number of tokens for the same ids, EOS or not, and only those count. It runs once before
anything is timed, so nothing compiles in a timed run; then the engines take turns, --repeats times, and what is printed
are medians, with the least and the most. Ratios are taken within each turn. The baseline is this project's model over
a contiguous cache in static batches. The peer runs in a process of its own with the same weights and as many threads as
there are processors; it needs torch and transformers, or xllamacpp (or llama-cpp-python), which jpaged does not.

--json prints an object a line for each case. Rates count output tokens over the whole run, except prefill_tokens_per_s
and decode_tokens_per_s (prompt tokens of the steps that compute any, and tokens of the other steps) and
total_tokens_per_s (prompt and output). gap_ms is the gap between two arrivals of one request's tokens; itl_ms shares it
out among the tokens that came together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from absl import flags
from benchmarks import workload_flags
from benchmarks.workloads import CASES
from common import command, model_flags, prompts, usage
from common.progress import Progress

if TYPE_CHECKING:
    from benchmarks.workloads import Workload

    from jpaged.llm import LLM

_CASE = flags.DEFINE_list("case", ["mixed"], f"What to measure: {', '.join(CASES)}, or several with commas.")
_PEER = flags.DEFINE_enum("peer", None, ("transformers", "llama.cpp"), "Another engine to run beside ours.")
_PEER_PYTHON = flags.DEFINE_string("peer_python", None, "The Python that has the peer; without this flag, this one.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the rates into this file (.png or .svg); needs matplotlib.")

GROUPS = {
    "Workload": ("case", *workload_flags.WORKLOAD, "seed"),
    "Comparison": ("repeats", "peer", "peer_python"),
    "Model": model_flags.MODEL,
    "Memory and batching": model_flags.ENGINE,
    "Output": ("json", "plot", "verbose"),
}


def main() -> int:
    unknown = sorted(set(_CASE.value) - set(CASES))
    if unknown:
        raise ValueError(f"--case={','.join(unknown)} is not one of {', '.join(CASES)}")
    if _PLOT.value is not None:
        from benchmarks import plot

        plot.check(_PLOT.value)
    for name in _CASE.value:
        workload_flags.case(name)
    texts = _prompts()
    llm, drawn = None, []
    for number, name in enumerate(_CASE.value):
        llm = _engine(name, llm)
        text, record, results = _measure(name, llm, texts)
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


def _engine(name: str, before: LLM | None) -> LLM:
    """The engine that the flags ask for, with as many slots as the case has requests at once unless told otherwise."""
    config = model_flags.engine_config()
    if not flags.FLAGS["max_num_seqs"].present:
        slots = workload_flags.case(name).slots
        config = dataclasses.replace(
            config, max_num_seqs=slots, max_num_batched_tokens=max(slots, config.max_num_batched_tokens)
        )
    if before is None:
        return model_flags.load_llm(config)
    from jpaged.llm import LLM

    return LLM(before.engine.loaded, **dataclasses.asdict(config))


def _measure(name: str, llm: LLM, texts: list[Any] | None) -> tuple[str, dict[str, Any], Any]:
    from benchmarks import turns
    from benchmarks.report import Results

    case, vocab_size = workload_flags.case(name), llm.engine.loaded.model.spec.vocab_size
    ids = None if texts is None else [request.prompt_token_ids for request in llm.make_requests(texts)]
    repeats, seed = flags.FLAGS.repeats, flags.FLAGS.seed
    if name == "context":
        return (*_contexts(llm, case, repeats, seed), None)
    workload = workload_flags.workload(case, vocab_size, seed, ids)
    results = Results(_setting(name, llm), workload)
    if name == "sampling":
        return (*_sampling(results, llm, repeats), results)
    with (
        _peer(llm, workload) as peer,
        Progress(f"measuring {name}", 2 + repeats * (2 + (peer is not None)), "runs") as bar,
    ):
        if peer is not None:
            results.peer = peer.name, peer.details
        turns.throughput(results, llm, _clock, peer, repeats, _counter(bar))
    from benchmarks import report

    target = report.TARGETS.get((name, _PEER.value or "", results.setting.dtype))
    return report.as_text(results, f"{name}: {case.about}", target), report.as_json(results, target), results


def _sampling(results: Any, llm: LLM, repeats: int) -> tuple[str, dict[str, Any]]:
    from benchmarks import report, turns
    from benchmarks.measure import Spread, ratio

    from jpaged.config import SamplingParams

    params = SamplingParams(temperature=0.8, top_p=0.95, seed=0, ignore_eos=True)
    with Progress("measuring sampling", 2 + repeats, "runs") as bar:
        runs = turns.sampling(results, llm, _clock, params, repeats, _counter(bar))
    rates = [run.tokens_per_s for run in runs]
    found, rate = ratio(rates, results.rates), Spread.of(rates)
    title = "sampling: temperature 0.8 and top-p 0.95 against greedy"
    text = report.as_text(results, title) + (
        f"\nsampled: {rate.median:.1f} tokens/s, {found.median:.2f} of the greedy rate "
        f"({found.least:.2f} - {found.most:.2f}{report.verdict(found.median, report.SAMPLING_TARGET)})"
    )
    sampled = {
        "output_tokens_per_s": rate.median,
        "ratio": found.median,
        "ratio_range": [found.least, found.most],
        "target": report.SAMPLING_TARGET,
    }
    return text, {**report.as_json(results), "sampled": sampled}


def _contexts(llm: LLM, case: Any, repeats: int, seed: int) -> tuple[str, dict[str, Any]]:
    from benchmarks import report, turns, workloads
    from benchmarks.measure import Spread, ratio

    short, long = case.prompt_len
    longest = dataclasses.replace(case, prompt_len=(long, long))
    workload = workloads.synthetic(longest, llm.engine.loaded.model.spec.vocab_size, seed)
    steps = case.output_len[1]
    with Progress("measuring context", 2 * (repeats + 1), "runs") as bar:
        at_short, at_long = turns.contexts(llm, workload, (short, long), steps, repeats, _counter(bar))
    found, setting = ratio(at_long, at_short), _setting("context", llm)
    step_ms = {str(n): 1e3 * Spread.of(seconds).median for n, seconds in ((short, at_short), (long, at_long))}
    text = "\n".join(
        [
            f"context: {case.about}, {case.requests} sequences",
            str(setting),
            "",
            report.table([("context", "ms a step"), *((f"{int(n):,}", f"{ms:.1f}") for n, ms in step_ms.items())]),
            "",
            f"{found.median:.2f} times as long ({found.least:.2f} - {found.most:.2f}"
            f"{report.verdict(found.median, report.CONTEXT_TARGET, at_most=True)})",
        ]
    )
    record = {
        **dataclasses.asdict(setting),
        "requests": case.requests,
        "step_ms": step_ms,
        "ratio": found.median,
        "ratio_range": [found.least, found.most],
        "target": report.CONTEXT_TARGET,
        "runs": [{"short_ms": 1e3 * a, "long_ms": 1e3 * b} for a, b in zip(at_short, at_long, strict=True)],
    }
    return text, record


def _prompts() -> list[Any] | None:
    """The prompts of --prompts_file.

    Raises:
      ValueError: some of them cannot be read; all are named.
    """
    if flags.FLAGS.prompts_file is None:
        return None
    entries = prompts.gather((), flags.FLAGS.prompts_file)
    faults = [f"{entry.where}: {entry.fault}" for entry in entries if entry.fault]
    if faults:
        raise ValueError("; ".join(faults))
    return [entry.prompt for entry in entries]


def _peer(llm: LLM, workload: Workload) -> Any:
    """The peer that was asked for, as a context; a context of None without one."""
    if _PEER.value is None:
        return contextlib.nullcontext()
    import sys

    from benchmarks import peers

    source = peers.gguf_source(flags.FLAGS.model) if _PEER.value == "llama.cpp" else None
    python = _PEER_PYTHON.value or sys.executable
    return peers.start(_PEER.value, python, llm.engine.loaded, source, llm.config.dtype, peers.processors(), workload)


def _setting(name: str, llm: LLM) -> Any:
    import jax
    from benchmarks import peers
    from benchmarks.report import Setting

    from jpaged.attention import resolve_backend

    device = jax.devices()[0]
    return Setting(
        case=name,
        model=llm.engine.loaded.model.spec.name,
        backend=resolve_backend(llm.config.backend),
        dtype=llm.config.dtype,
        jax=jax.__version__,
        device=device.device_kind,
        threads=peers.processors() if device.platform == "cpu" else None,
    )


def _clock(llm: LLM) -> usage.Clock:
    return usage.Clock(llm.engine)


def _counter(bar: Progress) -> Any:
    def count() -> None:
        bar.done += 1

    return count


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
