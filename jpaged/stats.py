"""What a run used: tokens, steps, blocks at peak, and how well the KV memory was filled. Plain sums on the host."""

from __future__ import annotations

import dataclasses

from jpaged.scheduler import Schedule


@dataclasses.dataclass
class Stats:
    """Counters of an engine since it was made or `reset`.

    Attributes:
      block_size, num_blocks: Of the pool.
      prefill_tokens, decode_tokens: Prompt tokens computed, and tokens sampled.
      steps: Dispatches read.
      blocks_peak, sequences_peak: The most blocks in use, and sequences with tokens, after any step.
      slot_steps, token_steps: Sums over steps of KV places in blocks that were in use, and of those that held tokens.
    """

    block_size: int
    num_blocks: int
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    blocks_peak: int = 0
    sequences_peak: int = 0
    slot_steps: int = 0
    token_steps: int = 0

    @property
    def kv_share(self) -> float:
        """Share of the KV places in use that held tokens, averaged over steps; 1.0 before the first."""
        return self.token_steps / self.slot_steps if self.slot_steps else 1.0

    def record(self, planned: Schedule, made_R: list[int], num_free: int, num_tokens: int, num_seqs: int) -> None:
        """Adds one step that was read, which left so many blocks free and so many sequences with tokens."""
        used = self.num_blocks - num_free
        self.prefill_tokens += int(planned.counts_R[planned.prefills_R].sum())
        self.decode_tokens += sum(made_R)
        self.steps += 1
        self.blocks_peak = max(self.blocks_peak, used)
        self.sequences_peak = max(self.sequences_peak, num_seqs)
        self.slot_steps += used * self.block_size
        self.token_steps += num_tokens

    def reset(self) -> None:
        """Starts again from zero."""
        self.__init__(self.block_size, self.num_blocks)
