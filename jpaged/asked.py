"""What every request says, whatever it asks for: its prompt, its limits, how urgent it is, who may share its blocks."""

from __future__ import annotations

import dataclasses

from jpaged.outputs import RequestMetrics
from jpaged.tokenizer import Tokenizer


@dataclasses.dataclass(eq=False, kw_only=True)
class Asked:
    """A prompt, and what is asked of it.

    Attributes:
      id: The caller's number for it.
      prompt: Its text, or None.
      prompt_token_ids: Its ids.
      tokenizer: What makes text of ids; None: nothing does.
      stop_ids: Ids that end a text: the tokenizer's EOS unless ignored, and the request's own.
      max_tokens: Tokens that a continuation may have.
      priority: Those with the lowest come first, if the engine serves by priority.
      timeout: Seconds that it may take; None: as many as it likes.
      cache_salt: Only requests with the same one share blocks.
      metrics: Kept by the engine that it was added to.
    """

    id: int
    prompt: str | None
    prompt_token_ids: list[int]
    tokenizer: Tokenizer | None
    stop_ids: frozenset[int]
    max_tokens: int
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    metrics: RequestMetrics | None = dataclasses.field(default=None, init=False)
