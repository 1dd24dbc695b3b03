"""Cost against bandwidth over context length, as a picture: of TPUs the schedule, of GPUs the bytes that are copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import plot
from inspection.gpu import figures
from pallas_kernels.cases import CASES
from pallas_kernels.gpu.chips import GPUS
from pallas_kernels.tpu.chips import CHIPS

CONTEXTS = [2**n for n in range(7, 18)]


def draw(found: Sequence[dict[str, Any]], path: str) -> None:
    """One part for each kind of chip among the figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = [(_tpus, [one for one in found if one["chip"] in CHIPS])]
    parts += [(_gpus, [one for one in found if one["chip"] in GPUS])]
    parts = [(part, some) for part, some in parts if some]
    figure = Figure(figsize=(7, 4.5 * len(parts)), layout="constrained")
    FigureCanvasAgg(figure)
    for n, (part, some) in enumerate(parts):
        axes = figure.add_subplot(len(parts), 1, n + 1)
        part(axes, some)
        axes.set_xlabel("tokens of a sequence")
        axes.legend(fontsize=7)
    plot.keep(figure, path)


def _tpus(axes: Any, found: Sequence[dict[str, Any]]) -> None:
    """Microseconds that a sequence takes in one layer, by its schedule and by HBM; the longer of them counts."""
    for n, one in enumerate(found):
        hertz = CHIPS[one["chip"]].hertz
        for key, line in (("cycles_per_token", "-"), ("bandwidth_bound", ":")):
            times = [one[key] * context / hertz * 1e6 for context in CONTEXTS]
            what = "schedule" if line == "-" else "HBM"
            axes.loglog(CONTEXTS, times, line, color=f"C{n}", label=f"{one['chip']} {one['case']}, {what}")
    axes.set_ylabel("µs in one layer")
    axes.set_title("Static schedules, not timings: the higher line of a pair bounds the speed")


def _gpus(axes: Any, found: Sequence[dict[str, Any]]) -> None:
    """Bytes that are copied, over those that must be."""
    for n, one in enumerate(found):
        name, gpu = one["case"], GPUS[one["chip"]]
        contexts = [context for context in CONTEXTS if context >= CASES[name].queries]
        cases = [dataclasses.replace(CASES[name], context=context) for context in contexts]
        shares = [figures.bytes_moved(gpu, case) / case.least_bytes for case in cases]
        axes.semilogx(contexts, shares, color=f"C{n}", label=f"{one['chip']} {name}")
    axes.set_ylabel("bytes copied / bytes that must be")
    axes.set_title("Counted, not timed: what chunks, splits and padding copy besides")
