"""What was measured, on what, and what this project wants to reach. It neither measures nor prints."""

from __future__ import annotations

import dataclasses

from .measure import Run
from .workloads import Workload

# What this project wants to reach, by case, peer and dtype: the least ratio of output tokens a second.
TARGETS = {
    ("single", "transformers", "float32"): 1.2,
    ("single", "transformers", "bfloat16"): 1.8,
    ("mixed", "transformers", "float32"): 1.5,
    ("mixed", "transformers", "bfloat16"): 1.8,
    ("single", "llama.cpp", "float32"): 0.8,
    ("single", "llama.cpp", "bfloat16"): 0.8,
    ("parallel16", "llama.cpp", "float32"): 2.0,
    ("parallel16", "llama.cpp", "bfloat16"): 2.0,
}
SAMPLING_TARGET = 0.7  # the rate when sampling, of the greedy rate
CONTEXT_TARGET = 3.0  # at the most: the time of a step at the long context, of that at the short one


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a benchmark ran on and with."""

    case: str
    model: str
    backend: str
    dtype: str
    jax: str
    device: str
    threads: int | None

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.model} in {self.dtype}, {self.backend} attention, jax {self.jax} on {self.device}{threads}"


@dataclasses.dataclass
class Results:
    """All repeats of one case; runs of the same repeat stand at the same place.

    Attributes:
      paged, baseline: Ours; ``baseline`` may be empty.
      peer: Its name and details; None without one.
      peer_seconds: Of each repeat.
      peer_outputs: Tokens of its last repeat, where it tells them.
    """

    setting: Setting
    workload: Workload
    paged: list[Run] = dataclasses.field(default_factory=list)
    baseline: list[Run] = dataclasses.field(default_factory=list)
    peer: tuple[str, str] | None = None
    peer_seconds: list[float] = dataclasses.field(default_factory=list)
    peer_outputs: list[list[int]] | None = None

    @property
    def rates(self) -> list[float]:
        return [run.tokens_per_s for run in self.paged]

    @property
    def peer_rates(self) -> list[float]:
        return [self.workload.output_tokens / seconds for seconds in self.peer_seconds]

    @property
    def median(self) -> Run:
        """The paged run whose time is the median (of an even number, the longer of the middle two)."""
        return sorted(self.paged, key=lambda run: run.seconds)[len(self.paged) // 2]
