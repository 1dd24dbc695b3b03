"""What a run used and how it went: of the last step, and in sums since the start. Plain numbers on the host."""

from __future__ import annotations

import dataclasses

from jpaged.outputs import RequestMetrics
from jpaged.schedule import Schedule
from jpaged.scheduler import Scheduler


@dataclasses.dataclass
class Spread:
    """Times of many requests, in seconds: how many, their sum, and the greatest."""

    count: int = 0
    total: float = 0.0
    greatest: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.greatest = max(self.greatest, seconds)

    @property
    def mean(self) -> float | None:
        """None before the first."""
        return self.total / self.count if self.count else None


@dataclasses.dataclass(frozen=True)
class StepStats:
    """One step.

    Attributes:
      running, waiting: Requests that had slots when it was read, and requests that waited for some.
      preempted: Requests that had to pause before it.
      blocks_used: Blocks that sequences or the prefix cache held after it.
      blocks_cached: Those of them that nobody but the cache held, so that they were to be had.
      prefill_tokens, decode_tokens: Prompt tokens that it computed, and tokens that it sampled.
      hit_tokens: Tokens of sequences that started in it, whose KV was there.
      tokens, sequences: Tokens in blocks afterwards, what is shared counted once, and sequences that had any.
    """

    running: int
    waiting: int
    preempted: int
    blocks_used: int
    blocks_cached: int
    prefill_tokens: int
    decode_tokens: int
    hit_tokens: int
    tokens: int
    sequences: int


@dataclasses.dataclass
class Stats:
    """Counters of an engine since it was made or `reset`.

    Attributes:
      block_size, num_blocks: Of the pool.
      last: The step that was read last; None before the first.
      prefill_tokens, decode_tokens: Prompt tokens computed, and tokens sampled.
      hit_tokens: Tokens whose KV was found in the prefix cache.
      steps: Dispatches read.
      preemptions: Requests that had to pause.
      evictions: Blocks that the prefix cache had to give up.
      swapped_out, swapped_in: Blocks that went to the host, and that came back.
      blocks_peak, sequences_peak: The most blocks in use, but for those that only the cache held, and sequences with
        tokens, after any step.
      slot_steps, token_steps: Sums over steps of KV places in blocks that were in use, and of those that held tokens.
      queue, first_token, inter_token: Of requests that got a slot, a token, that are over: how long they waited, how
        long until their first token came (TTFT), and the mean time between tokens of one sample (ITL).
    """

    block_size: int
    num_blocks: int
    last: StepStats | None = None
    prefill_tokens: int = 0
    decode_tokens: int = 0
    hit_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    blocks_peak: int = 0
    sequences_peak: int = 0
    slot_steps: int = 0
    token_steps: int = 0
    queue: Spread = dataclasses.field(default_factory=Spread)
    first_token: Spread = dataclasses.field(default_factory=Spread)
    inter_token: Spread = dataclasses.field(default_factory=Spread)

    @property
    def kv_share(self) -> float:
        """Share of the KV places in use that held tokens, averaged over steps; 1.0 before the first."""
        return self.token_steps / self.slot_steps if self.slot_steps else 1.0

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that did not have to be computed."""
        return self.hit_tokens / max(1, self.hit_tokens + self.prefill_tokens)

    def record(
        self, planned: Schedule, scheduler: Scheduler, made: int, num_free: int, num_tokens: int, num_seqs: int
    ) -> None:
        """Adds one step that was read: tokens that it made, and blocks that were free, tokens in blocks and sequences
        with tokens after it."""
        cached = scheduler.idle_blocks
        self.last = StepStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=len(planned.paused),
            blocks_used=self.num_blocks - num_free,
            blocks_cached=cached,
            prefill_tokens=int(planned.counts_R[planned.prefills_R].sum()),
            decode_tokens=made,
            hit_tokens=sum(len(start.block_ids) for start in planned.started) * self.block_size,
            tokens=num_tokens,
            sequences=num_seqs,
        )
        used = self.last.blocks_used
        self.prefill_tokens += self.last.prefill_tokens
        self.decode_tokens += made
        self.hit_tokens += self.last.hit_tokens
        self.steps += 1
        self.preemptions += self.last.preempted
        self.evictions += len(planned.drops)
        self.swapped_out += len(planned.stores)
        self.swapped_in += len(planned.fetches)
        self.blocks_peak = max(self.blocks_peak, used - cached)
        self.sequences_peak = max(self.sequences_peak, num_seqs)
        self.slot_steps += used * self.block_size
        self.token_steps += num_tokens

    def finished(self, metrics: RequestMetrics, num_samples: int) -> None:
        """Adds a request that is over."""
        if metrics.queue_seconds is not None:
            self.queue.add(metrics.queue_seconds)
        if metrics.first_token_seconds is not None:
            self.first_token.add(metrics.first_token_seconds)
        if metrics.first_token is not None and metrics.last_token is not None:
            intervals = metrics.tokens / num_samples - 1
            if intervals >= 1:
                self.inter_token.add((metrics.last_token - metrics.first_token) / intervals)

    def reset(self) -> None:
        """Starts again from zero."""
        self.__init__(self.block_size, self.num_blocks)
