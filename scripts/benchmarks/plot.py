"""Bars of what a benchmark found. matplotlib draws them, where it is installed (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import whole_file

from .measure import Spread
from .results import Results
from .sharing import PAPER, Found

FORMATS = (".png", ".svg", ".pdf")


def check(path: str) -> None:
    """Before anything is measured.

    Raises:
      ValueError: it cannot be drawn, or not into such a file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; try `pip install matplotlib`")
    if Path(path).suffix not in FORMATS:
        raise ValueError(f"--plot={path} must end in one of {', '.join(FORMATS)}; try --plot=rates.png")
    try:
        whole_file.check(Path(path).resolve())
    except ValueError as error:
        raise ValueError(f"--plot={path}: {error}") from error


def keep(figure: Any, path: str) -> None:
    """Writes a picture whole; what was there before stays if that fails."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix.removeprefix("."))
    whole_file.write(Path(path).resolve(), drawn.getvalue())


def rates(drawn: Sequence[Results], path: str) -> None:
    """Output tokens a second of each engine, a group of bars for each case; whiskers are least and most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 2 * len(drawn), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels: dict[str, str] = {}
    for group, results in enumerate(drawn):
        bars = _bars(results)
        for place, (name, spread) in enumerate(bars):
            x = group + (place - (len(bars) - 1) / 2) * 0.25
            whiskers = [[spread.median - spread.least], [spread.most - spread.median]]
            color = labels.setdefault(name, f"C{len(labels)}")
            axes.bar(x, spread.median, 0.23, yerr=whiskers, color=color, capsize=3)
    handles = [axes.bar(0, 0, color=color, label=name) for name, color in labels.items()]
    axes.legend(handles=handles, frameon=False)
    axes.set_xticks(range(len(drawn)), [results.setting.case for results in drawn])
    axes.set_ylabel("output tokens/s")
    axes.set_title(str(drawn[0].setting) if drawn else "", fontsize="small")
    keep(figure, path)


def saved(found: Sequence[Found], title: str, path: str) -> None:
    """What each kind of sharing saved, and beside it what the paper reports: a line from its least to its most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 0.8 * len(found), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [f"{each.asked.case}\n{each.asked.width}" for each in found]
    axes.bar(range(len(found)), [100 * each.saved for each in found], 0.6, color="C0", label="here")
    for number, dataset in enumerate(("alpaca", "sharegpt"), 1):
        labelled = False
        for place, each in enumerate(found):
            if each.asked.case in PAPER:
                low, high = PAPER[each.asked.case][dataset]
                label = "" if labelled else f"SOSP'23, {dataset}, 2 to 6"
                axes.vlines(place + 0.15 * (2 * number - 3), 100 * low, 100 * high, color=f"C{number}", label=label)
                labelled = True
    axes.legend(frameon=False, fontsize="small")
    axes.set_xticks(range(len(found)), names)
    axes.set_ylabel("KV blocks saved, %")
    axes.set_title(title, fontsize="small")
    keep(figure, path)


def shares(found: Sequence[dict[str, Any]], path: str) -> None:
    """What attention reaches of the rate at which the device copies memory, a group of bars for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases, backends = ([*dict.fromkeys(one[key] for one in found)] for key in ("case", "backend"))
    figure = Figure(figsize=(3 + 1.5 * len(cases), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, backend in enumerate(backends):
        mine = [one for one in found if one["backend"] == backend]
        places = [cases.index(one["case"]) + (number - (len(backends) - 1) / 2) * 0.25 for one in mine]
        axes.bar(places, [100 * one["share_of_copy"] for one in mine], 0.23, color=f"C{number}", label=backend)
    axes.set_xlim(-0.6, len(cases) - 0.4)  # or a single bar would fill the picture
    figure.legend(frameon=False, loc="outside upper right", ncols=len(backends))
    axes.set_xticks(range(len(cases)), cases, rotation=20)
    axes.set_ylabel("share of the copy rate, %")
    axes.set_title(f"{found[0]['device']}, jax {found[0]['jax']}", fontsize="small")
    keep(figure, path)


def _bars(results: Results) -> list[tuple[str, Spread]]:
    found = [("paged", Spread.of(results.rates))]
    if results.baseline:
        found.append(("static batches", Spread.of(run.tokens_per_s for run in results.baseline)))
    if results.peer is not None:
        found.append((results.peer[0].split(",")[0], Spread.of(results.peer_rates)))
    return found
