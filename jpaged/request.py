"""A request on the host: its samples, their tokens, text and log-probabilities, and why each of them ended.

It knows what the caller asked for and what has come back. It does not know slots, blocks or the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jpaged.asked import Asked
from jpaged.config import NO_TOKEN, SamplingParams
from jpaged.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from jpaged.tokenizer import TextStream, Tokenizer
from jpaged.types import AnyArray


class Sample:
    """One sample as it grows. Not thread-safe.

    Attributes:
      request: Whose it is.
      index: Which of the request's samples.
      num_logprobs: How many log-probabilities each of its tokens comes with; None: not even its own.
      keeps_tokens_only: Whether, until it is over, its tokens are kept and nothing is made of them.
      token_ids: What was generated, up to and including what ended it.
      first_token, last_token: When the first and the last of them came, in seconds; None while there is none.
      finish_reason, stop_reason: See `CompletionOutput`.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None):
        params = request.params
        self.request, self.index, self.num_logprobs = request, index, params.logprobs
        self.keeps_tokens_only = tokenizer is None and params.logprobs is None
        self.token_ids: list[int] = []
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._pieces: list[str] = []
        self._told = (0, 0)  # pieces and tokens that deltas have handed out
        self._tokenizer = tokenizer
        self._stream = (
            None
            if tokenizer is None
            else TextStream(
                tokenizer,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        )

    @property
    def text(self) -> str | None:
        return None if self._stream is None else "".join(self._pieces)

    def accept(
        self, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]], now: float, *, over: bool, failed: bool
    ) -> None:
        """Takes the tokens that a step made; ``now`` is in seconds, and ``over`` says that the device is done with the
        sample after the last."""
        params = self.request.params
        for number, token in enumerate(tokens):
            last = over and number == len(tokens) - 1
            if last and failed:
                self._end("error", None)
                return
            self.token_ids.append(token)
            self.first_token, self.last_token = now if self.first_token is None else self.first_token, now
            if self.num_logprobs is not None:
                self.logprobs.append(logprobs[number])
            stops = last and token in self.request.stop_ids and len(self.token_ids) >= params.min_tokens
            if self._stream is not None and (not stops or params.include_stop_str_in_output):
                piece, hit = self._stream.push(token)
                if piece:
                    self._pieces.append(piece)
                if hit:
                    self._end("stop", self._stream.stop_hit)
                    return
            if stops:
                self._end("stop", token if token in params.stop_token_ids else None)
            elif last:
                self._end("length", None)

    def abort(self, reason: str = "abort") -> None:
        """Ends the sample where it stands, on the caller's wish or because its time is up."""
        if self.finish_reason is None:
            self._end(reason, None)

    def output(self) -> CompletionOutput:
        wanted = self.num_logprobs is not None
        pairs = zip(self.token_ids, self.logprobs, strict=True) if wanted else ()
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=sum(found[token].logprob for token, found in pairs) if wanted else None,
            logprobs=list(self.logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def delta(self) -> Delta:
        """What is new since the last delta."""
        (pieces, tokens), self._told = self._told, (len(self._pieces), len(self.token_ids))
        wants_prompt = tokens == 0 and self.index == 0 and self.request.params.prompt_logprobs is not None
        return Delta(
            request_id=self.request.id,
            index=self.index,
            text=None if self._stream is None else "".join(self._pieces[pieces:]),
            token_ids=self.token_ids[tokens:],
            logprobs=None if self.num_logprobs is None else self.logprobs[tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_logprobs=list(self.request.prompt_logprobs) if wants_prompt else None,
            error=self.request.error if self.finish_reason == "error" else None,
        )

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        rest = self._stream.finish() if self._stream is not None else ""
        if rest:
            self._pieces.append(rest)


@dataclasses.dataclass(eq=False, kw_only=True)
class Request(Asked):
    """A prompt that is to be continued, and its samples.

    Attributes:
      params: How.
      bad_words: Token sequences that must not be generated.
      samples: The ``n`` samples.
      prompt_logprobs: Filled in as the prompt is computed.
    """

    params: SamplingParams
    bad_words: list[list[int]] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(init=False)
    prompt_logprobs: list[dict[int, Logprob] | None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.samples = [Sample(self, index, self.tokenizer) for index in range(self.params.n)]
        self.prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def error(self) -> str | None:
        """What went wrong with it, if anything."""
        if all(sample.finish_reason != "error" for sample in self.samples):
            return None
        return (
            "no token could be sampled: the model's scores were not finite numbers, or the sampling parameters forbid "
            "every token; check the weights, the prompt and the parameters"
        )

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            outputs=[sample.output() for sample in self.samples],
            finished=self.finished,
            error=self.error,
            metrics=self.metrics,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """Log-probabilities as a step returns them, for X tokens: of the token itself, and of the top J."""

    logprob_X: AnyArray
    rank_X: AnyArray
    top_ids_XJ: AnyArray
    top_logprobs_XJ: AnyArray

    def table(self, x: int | tuple[int, int], token: int, top: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
        """The ``top`` likeliest tokens at place ``x``, and the token itself; NO_TOKEN pads where there are fewer."""
        ids, logprobs = self.top_ids_XJ[x][:top].tolist(), self.top_logprobs_XJ[x][:top].tolist()
        found = {
            t: Logprob(p, r, _text(tokenizer, t))
            for r, (t, p) in enumerate(zip(ids, logprobs, strict=True), 1)
            if t != NO_TOKEN
        }
        found.setdefault(token, Logprob(float(self.logprob_X[x]), int(self.rank_X[x]), _text(tokenizer, token)))
        return found


def _text(tokenizer: Tokenizer | None, token: int) -> str | None:
    return (
        None
        if tokenizer is None
        else tokenizer.token_bytes(token, skip_special_tokens=False).decode("utf-8", "replace")
    )
