"""Times attention on the device at hand, every backend that it has, and compares the results with the oracle's.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --case=decode_bf16_b16,decode_e4m3_b64 --json
    python scripts/bench_attention.py --rows=4 --context=512 --plot=shares.png

A case is a batch of one kind: so many rows of so many tokens, in shuffled blocks. Each backend does it in a loop on the
device, its KV written on the way, as one layer of a model would. On a TPU JAX's own kernels run beside ours
(jax.experimental.pallas.ops.tpu: paged_attention as jax_paged, ragged_paged_attention as jax_ragged), on a GPU its
Triton kernel (jax_triton, up to jax 0.12.0) and its way to cuDNN (cudnn), all of which only read.

GB/s counts what must move at the least: the KV that is seen, the new KV, queries and results. Its share is of the rate
at which the same device copies memory, measured in the same run. The error is the largest distance of some rows'
results from the oracle's in float64, over the largest of these.

--json prints an object a line: case, backend, device, jax, rows, context, queries, us, us_least, us_most, bytes,
gb_per_s, copy_gb_per_s, share_of_copy and error.
"""

from __future__ import annotations

import json
from typing import Any

from absl import flags

from common import command
from common.progress import Progress

_CASE = flags.DEFINE_list("case", ["decode_bf16_b16"], "Named cases, or all; a wrong name lists them.")
_BACKEND = flags.DEFINE_list("backend", ["all"], "Who attends: all that run here, or some by name.")
_ROWS = flags.DEFINE_integer("rows", None, "Sequences, if not the case's own.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", None, "Tokens of a sequence, if not the case's own.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timings of each; the median counts.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw shares of the copy rate into this file.")
_JSON = flags.DEFINE_boolean("json", False, "Print JSON, an object a line.")

GROUPS = {
    "What to time": ("case", "backend", "rows", "context", "repeats"),
    "Output": ("json", "plot", "verbose"),
}

_ROW = "{:<34}  {:<13}  {:>11}  {:>21}  {:>8}  {:>13}  {:>9}"


def main() -> int:
    with command.interrupt.leaving_at_once():
        from benchmarks import plot
        from pallas_kernels.cases import CASES

    names = command.chosen("case", tuple(CASES))
    if _PLOT.value:
        plot.check(_PLOT.value)
    command.start_jax()
    import jax

    from attention import attending, batches, timing

    cases = {name: batches.smaller(name, CASES[name], rows=_ROWS.value, context=_CONTEXT.value) for name in names}
    known = (*attending.there(), "tpu_interpret", "gpu_interpret")
    backends = attending.there() if _BACKEND.value == ["all"] else command.chosen("backend", known)
    found: list[dict[str, Any]] = []
    failed = 0
    with Progress("timing", len(cases) * len(backends), "kernels") as progress:
        rate = timing.copy_bytes_per_second(_REPEATS.value)
        if not _JSON.value:
            with progress.aside():
                print(_ROW.format("case", "backend", "us", "(least - most)", "GB/s", "share of copy", "error"))
        for name, case in cases.items():
            for backend in backends:
                try:
                    one = _figures(name, case, backend, rate)
                except jax.errors.JaxRuntimeError as error:  # the others go on, and the status tells
                    failed += 1
                    one = f"has failed: {error}"
                with progress.aside():
                    if isinstance(one, str):
                        command.complain(f"{name}: {backend} {one}")
                    else:
                        found.append(one)
                        print(json.dumps(one) if _JSON.value else _text(one), flush=True)
                progress.done += 1
    if _PLOT.value and found:
        plot.shares(found, _PLOT.value)
    return command.OK if found and not failed else command.FAULT


def _figures(name: str, case: Any, backend: str, rate: float) -> dict[str, Any] | str:
    """What a backend took for a case, or why it cannot have it."""
    import jax

    from attention import attending, batches, others, timing
    from benchmarks.measure import Spread

    if reasons := list(attending.faults(backend, case)):
        return "is left out: " + ", ".join(reasons)
    batch = batches.make(case)
    try:
        who = (others.attends if backend in attending.OTHERS else attending.ours)(backend, batch)
        seconds, out, memory = timing.step_seconds(who, batch, _REPEATS.value)
    except Exception as error:  # what refuses is told from what fails by more than its class
        if not attending.refuses(error):
            raise
        return f"is left out: {error}"
    spread = Spread.of(seconds)
    moved = case.least_bytes / spread.median
    return {
        "case": name,
        "backend": backend,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rows": case.rows,
        "context": case.context,
        "queries": case.queries,
        "us": round(1e6 * spread.median, 2),
        "us_least": round(1e6 * spread.least, 2),
        "us_most": round(1e6 * spread.most, 2),
        "bytes": case.least_bytes,
        "gb_per_s": round(moved / 1e9, 2),
        "copy_gb_per_s": round(rate / 1e9, 2),
        "share_of_copy": round(moved / rate, 3),
        "error": float(f"{batches.error(batch, who.cache(memory), out):.2e}"),
    }


def _text(one: dict[str, Any]) -> str:
    span = f"({one['us_least']:,.1f} - {one['us_most']:,.1f})"
    share, error = f"{one['share_of_copy']:.1%}", f"{one['error']:.0e}"
    return _ROW.format(one["case"], one["backend"], f"{one['us']:,.1f}", span, f"{one['gb_per_s']:.1f}", share, error)


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
