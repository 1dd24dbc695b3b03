"""The schedule against HBM's bandwidth over context length, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import plot

CONTEXTS = [2**n for n in range(7, 18)]


def draw(found: Sequence[dict[str, Any]], path: str) -> None:
    """Microseconds that a sequence takes in one layer, by its schedule and by HBM; the longer of them counts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from pallas_kernels.tpu.chips import CHIPS

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for n, one in enumerate(found):
        hertz = CHIPS[one["chip"]].hertz
        for key, line in (("cycles_per_token", "-"), ("bandwidth_bound", ":")):
            times = [one[key] * context / hertz * 1e6 for context in CONTEXTS]
            what = "schedule" if line == "-" else "HBM"
            axes.loglog(CONTEXTS, times, line, color=f"C{n}", label=f"{one['chip']} {one['case']}, {what}")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("µs in one layer")
    axes.set_title("Static schedules, not timings: the higher line of a pair bounds the speed")
    axes.legend(fontsize=7)
    plot.keep(figure, path)
