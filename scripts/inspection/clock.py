"""Tilings of a case on the device at hand, by the clock."""

from __future__ import annotations

import logging
import math
import statistics
import threading
from typing import Any

import jax

from attention import attending, batches, timing
from pallas_kernels import tuning
from pallas_kernels.cases import CASES

log = logging.getLogger(__name__)

GAIN = 0.02  # of time or cycles, from which on a finding is worth writing down
_TIMINGS = 5  # of each
_DEVICE = threading.Lock()  # one timing at once


def fastest(chip: str, name: str, tilings: list[Any], backend: str) -> tuple[Any, dict[str, Any]] | None:
    """The fastest of these and how it was found; None if that is the first, which is in force, or as fast."""
    seconds, batch = [], batches.make(CASES[name])
    with _DEVICE:
        for tiling in tilings:
            with tuning.trying(tiling):
                try:
                    taken = timing.step_seconds(attending.ours(backend, batch), batch, _TIMINGS)[0]
                except Exception as error:  # a fault of a kernel ends the search
                    if not attending.refuses(error):
                        log.error("%s, %s: failed", name, tiling)
                        raise
                    # It fits the compiler's chip, and not this one.
                    log.warning("%s, %s: left out, for it does not run here: %s", name, tiling, error)
                    taken = [math.inf]
                seconds.append(statistics.median(taken))
    least = min(seconds)
    if least == math.inf or least >= seconds[0] * (1 - GAIN):
        return None
    found = {"us": round(1e6 * least, 2), "from": f"timed on {jax.devices()[0].device_kind}, jax {jax.__version__}"}
    return tilings[seconds.index(least)], found
