"""What a caller gets back, under the names that vLLM's users know. Plain data; nothing here computes."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one candidate token, of the model's unmodified distribution.

    Attributes:
      logprob: Natural logarithm.
      rank: 1 for the most likely token.
      decoded_token: Its text, or None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock; None for what has not happened.

    Attributes:
      arrived: It was added.
      started: It first got a slot.
      first_token, last_token: A step that made tokens for it was read, for the first and for the last time; once it is
        over.
      tokens: Tokens that it got, of all its samples; once it is over.
      num_cached_tokens: Tokens of its prompt that were there already.
      preemptions: How often it had to pause.
    """

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    num_cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for a slot."""
        return None if self.started is None else self.started - self.arrived

    @property
    def first_token_seconds(self) -> float | None:
        """Time to first token (TTFT)."""
        return None if self.first_token is None else self.first_token - self.arrived


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
      index: Which of its ``n`` samples.
      text: The text; None without a tokenizer.
      token_ids: The generated ids; in text, ids and logprobs nothing follows a stop.
      cumulative_logprob: Sum over the generated tokens; None unless logprobs were asked for.
      logprobs: For each token, candidates by id: the top ``logprobs`` and the token itself; None unless asked for.
      finish_reason: "stop", "length", "error", "abort", "timeout", or None while it runs.
      stop_reason: The stop string or stop token id that ended it; None for EOS and all else.
    """

    index: int
    text: str | None
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request and its samples.

    Attributes:
      request_id: Its number in the order of submission.
      prompt: The prompt's text; None if it was given as ids.
      prompt_token_ids: The prompt.
      prompt_logprobs: For each prompt token, candidates by id; None for the first, which nothing predicts. None as a
        whole unless asked for.
      outputs: The ``n`` samples in order.
      finished: Whether all of them are over.
      error: What went wrong with this request alone, if anything.
      metrics: When things happened to it; None before it was added.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    metrics: RequestMetrics | None = None


@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """One hypothesis of a beam search.

    Attributes:
      tokens: Prompt and continuation.
      token_ids: The continuation, up to and including what ended it.
      text: Of the continuation; None without a tokenizer.
      cum_logprob: The sum of the continuation's log-probabilities.
      score: That over its length to the power of the length penalty; what it was ranked by.
      finish_reason: "stop" or "length".
      stop_reason: The stop token id that ended it; None for EOS and at the limit.
    """

    tokens: list[int]
    token_ids: list[int]
    text: str | None
    cum_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | None


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """A beam search.

    Attributes:
      request_id, prompt, prompt_token_ids, error, metrics: As in `RequestOutput`.
      sequences: Its best hypotheses, best first: as many as beams, or fewer if there are none.
      finish_reason: "stop" if all of them stopped, else "length"; "error", "abort", "timeout".
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    finish_reason: str | None
    error: str | None = None
    metrics: RequestMetrics | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What one sample of a request has gained, as a stream hands it out.

    Attributes:
      request_id, index: Whose it is.
      text: New text in whole characters; None without a tokenizer.
      token_ids: New ids. Text may lag behind them while it could still become a stop string.
      logprobs: Their candidates, if asked for.
      finish_reason, stop_reason: As in `CompletionOutput`; the last delta of a sample has a finish_reason.
      prompt_logprobs: As in `RequestOutput`, if asked for; in the first delta of a request's first sample.
      error: As in `RequestOutput`, in the last delta of a sample that failed.
    """

    request_id: int
    index: int
    text: str | None
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
