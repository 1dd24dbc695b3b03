"""A beam search on the host: its request, its beams as they change places, and what has finished.

The device selects (`jpaged.beam`); this follows what it says. It does not know slots, blocks or steps.
"""

from __future__ import annotations

import dataclasses

from jpaged.asked import Asked
from jpaged.config import BeamSearchParams
from jpaged.outputs import BeamSearchOutput, BeamSearchSequence


class Path:
    """Tokens that were generated: the last one, and what came before it. Beams share their beginnings."""

    __slots__ = ("before", "token")

    def __init__(self, before: Path | None, token: int):
        self.before, self.token = before, token


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A continuation that is over.

    Attributes:
      token_ids: Its tokens, the stop token included.
      total: The sum of their log-probabilities.
      score: That over its length to the power of the length penalty.
      stopped: Whether a stop token ended it.
    """

    token_ids: list[int]
    total: float
    score: float
    stopped: bool


class Beam:
    """One beam as it grows: what an engine knows as a sample.

    Attributes:
      request, index: Whose it is, and its number.
      keeps_tokens_only, first_token, last_token: As of `request.Sample`.
      total: The sum of its log-probabilities; -inf for one that is none.
      finish_reason: As of its request.
    """

    keeps_tokens_only = False

    def __init__(self, request: BeamRequest, index: int):
        self.request, self.index = request, index
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.total = 0.0 if index == 0 else float("-inf")
        self.path: Path | None = None

    @property
    def token_ids(self) -> list[int]:
        return _tokens(self.path)

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason

    def abort(self, reason: str = "abort") -> None:
        self.request.finish_reason = self.request.finish_reason or reason


@dataclasses.dataclass(eq=False, kw_only=True)
class BeamRequest(Asked):
    """A prompt whose likeliest continuations are searched for, the beams, and what has finished.

    Attributes:
      search: How.
      samples: The beams.
      finished_best: The best hypotheses that have finished, best first.
      finish_reason: None while it runs; "length" or "stop", "abort", "timeout", "error".
      error: What went wrong with it, if anything.
    """

    search: BeamSearchParams
    samples: list[Beam] = dataclasses.field(init=False)
    finished_best: list[Hypothesis] = dataclasses.field(default_factory=list, init=False)
    finish_reason: str | None = dataclasses.field(default=None, init=False)
    error: str | None = dataclasses.field(default=None, init=False)
    _generated: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.samples = [Beam(self, index) for index in range(self.search.beam_width)]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def advance(
        self,
        parents: list[int],
        tokens: list[int],
        totals: list[float],
        ended: list[tuple[int, int, float]],
        now: float,
    ) -> None:
        """One step of the search: from which beam each beam goes on, by which token, with which sum; the beams and stop
        tokens by which hypotheses have finished, with their sums, best first; and when it was read, in seconds."""
        self._generated += 1
        paths = [beam.path for beam in self.samples]
        done = [self._hypothesis(Path(paths[parent], token), total, stopped=True) for parent, token, total in ended]
        self._keep(done)
        for beam, parent, token, total in zip(self.samples, parents, tokens, totals, strict=True):
            beam.path, beam.total = Path(paths[parent], token), total
            beam.first_token, beam.last_token = now if beam.first_token is None else beam.first_token, now

    def end(self, *, failed: bool) -> None:
        """The device is done with it. At the limit of tokens, what still ran has finished too."""
        if failed:
            self.finish_reason = "error"
            self.error = "no beam could be selected: the model's scores were not finite numbers; check the weights"
            return
        full = len(self.finished_best) == self.search.beam_width
        if self._generated >= self.max_tokens and not (full and self.search.early_stopping):
            alive = [beam for beam in self.samples if beam.total > float("-inf")]
            self._keep([self._hypothesis(beam.path, beam.total, stopped=False) for beam in alive])
        self.finish_reason = "stop" if all(each.stopped for each in self.finished_best) else "length"

    def output(self) -> BeamSearchOutput:
        """The best hypotheses, best first; of a search that was cut short those that had finished."""
        return BeamSearchOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            sequences=[self._sequence(each) for each in self.finished_best],
            finish_reason=self.finish_reason,
            error=self.error,
            metrics=self.metrics,
        )

    def _hypothesis(self, path: Path | None, total: float, *, stopped: bool) -> Hypothesis:
        tokens = _tokens(path)
        return Hypothesis(tokens, total, total / len(tokens) ** self.search.length_penalty, stopped)

    def _keep(self, found: list[Hypothesis]) -> None:
        best = sorted([*self.finished_best, *found], key=lambda each: -each.score)  # stable: of equals the older wins
        self.finished_best = best[: self.search.beam_width]

    def _sequence(self, found: Hypothesis) -> BeamSearchSequence:
        last = found.token_ids[-1]
        text = None
        if self.tokenizer is not None:
            hides = found.stopped and not self.search.include_stop_str_in_output
            shown = found.token_ids[:-1] if hides else found.token_ids
            text = self.tokenizer.decode(shown, skip_special_tokens=self.search.skip_special_tokens)
        return BeamSearchSequence(
            tokens=[*self.prompt_token_ids, *found.token_ids],
            token_ids=list(found.token_ids),
            text=text,
            cum_logprob=found.total,
            score=found.score,
            finish_reason="stop" if found.stopped else "length",
            stop_reason=last if found.stopped and last in self.search.stop_token_ids else None,
        )


def _tokens(path: Path | None) -> list[int]:
    tokens = []
    while path is not None:
        tokens.append(path.token)
        path = path.before
    return tokens[::-1]
