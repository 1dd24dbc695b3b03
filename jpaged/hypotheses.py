"""A beam search on the host: its request, its beams as they change places, and what has finished.

The device selects (`jpaged.beam`); this follows what it says. It does not know slots, blocks or steps.
"""

from __future__ import annotations

import dataclasses

from jpaged.config import BeamSearchParams, SamplingParams
from jpaged.outputs import BeamSearchOutput, BeamSearchSequence, RequestMetrics
from jpaged.tokenizer import Tokenizer


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
      total: The sum of its log-probabilities; -inf for one that is none.
      finish_reason: As of its request.
    """

    def __init__(self, request: BeamRequest, index: int):
        self.request, self.index = request, index
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


class BeamRequest:
    """A prompt, what is asked of it, its beams and what has finished.

    Attributes:
      id, prompt, prompt_token_ids, stop_ids, max_tokens: As of `request.Request`.
      priority, timeout, cache_salt, metrics: The same.
      search: What was asked for.
      params: What the sampler is told: nothing.
      samples: The beams.
      finished_best: The best hypotheses that have finished, best first.
      finish_reason: None while it runs; "length" or "stop", "abort", "timeout", "error".
    """

    def __init__(
        self,
        id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        search: BeamSearchParams,
        *,
        tokenizer: Tokenizer | None,
        stop_ids: tuple[int, ...],
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ):
        self.id, self.prompt, self.prompt_token_ids, self.search = id, prompt, prompt_token_ids, search
        self.params = SamplingParams(temperature=0.0, max_tokens=search.max_tokens, ignore_eos=True)
        self.stop_ids = frozenset(stop_ids)
        self.bad_words: list[list[int]] = []
        self.max_tokens = search.max_tokens
        self.priority, self.timeout, self.cache_salt = priority, timeout, cache_salt
        self.metrics: RequestMetrics | None = None
        self.samples = [Beam(self, index) for index in range(search.beam_width)]
        self.prompt_logprobs: list = [None]
        self.finished_best: list[Hypothesis] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._generated = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def advance(
        self,
        parents: list[int],
        tokens: list[int],
        totals: list[float],
        ended: list[tuple[int, int, float]],
    ) -> None:
        """One step of the search: from which beam each beam goes on, by which token, with which sum; and the beams and
        stop tokens by which hypotheses have finished, with their sums, best first."""
        self._generated += 1
        paths = [beam.path for beam in self.samples]
        done = [self._hypothesis(Path(paths[parent], token), total, stopped=True) for parent, token, total in ended]
        self._keep(done)
        for beam, parent, token, total in zip(self.samples, parents, tokens, totals, strict=True):
            beam.path, beam.total = Path(paths[parent], token), total

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
        if self._tokenizer is not None:
            hides = found.stopped and not self.search.include_stop_str_in_output
            shown = found.token_ids[:-1] if hides else found.token_ids
            text = self._tokenizer.decode(shown, skip_special_tokens=self.search.skip_special_tokens)
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
