"""Results that nobody measured, with round numbers, for the tests of what is printed."""

from scripts.benchmarks.measure import Run, Served
from scripts.benchmarks.results import Results, Setting
from scripts.benchmarks.workloads import Workload

SETTING = Setting("mixed", "small", "xla", "float32", "0.12", "cpu", 2)
STEPS = [0.1, 0.2], [0.25, 0.5]  # seconds at a short and at a long context, in two repeats


def run(seconds: float, token: int = 7, *, blocks: int | None = None) -> Run:
    served = [Served(0.0), Served(0.0)]
    served[0].receive(seconds / 2, [token])
    served[0].receive(seconds, [token] * 4)
    served[1].receive(seconds / 2, [token] * 5)
    return Run(served, seconds, 100.0, 50.0, blocks, None if blocks is None else 0.75)


def results() -> Results:
    """Three repeats of paged engine, baseline and peer."""
    found = Results(SETTING, Workload(((1, 2, 3), (4,)), (5, 5), 2))
    found.paged = [run(2.0, blocks=9), run(1.0, blocks=9), run(4.0, blocks=9)]
    found.baseline = [run(4.0), run(2.0), run(8.0, token=8)]
    found.peer = "transformers 5, torch 2", "AVX"
    found.peer_seconds = [3.0, 1.5, 6.0]
    found.peer_outputs = [[7] * 5, [7] * 4 + [8]]
    return found


def sampled() -> list[Run]:
    """Half as fast as the paged runs of `results`, repeat by repeat."""
    return [run(4.0), run(2.0), run(8.0)]
