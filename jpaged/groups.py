"""What the scheduler moves: a group, the sequences of one request, which start, pause and end together.

Plain records. They know lengths, slots and the blocks that their tokens are in; they know no tokens and no device.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from jpaged.prefix import Block, Chain


class Sequence:
    """One sample or beam of a request.

    Attributes:
      key: Whose it is; the scheduler only hands it on.
      group: The request's sequences that are not over.
      chain: The full blocks of its known tokens.
      prefill_len: Tokens to compute before the next can be sampled: the prompt, and after a pause the output so far.
      limit: The most tokens whose KV it can ever hold: prompt and output, less the last, which nothing attends to.
      is_twin: Whether it will start as a twin of the group's first, which computes their prompt.
      slot: Where it runs; None while it waits.
      held: The blocks of its beginning that are in the prefix cache's books.
      wanted: Those that it held when it paused.
      expected: Digests of the blocks that it is about to fill, for which others wait.
      twins: Sequences that share its prompt's blocks.
      kv_len: Tokens whose KV the device held when the last step was read.
    """

    __slots__ = (
        "chain",
        "expected",
        "group",
        "held",
        "is_twin",
        "key",
        "kv_len",
        "limit",
        "prefill_len",
        "slot",
        "twins",
        "wanted",
    )

    def __init__(self, key: Any, group: Group, chain: Chain, prefill_len: int, limit: int, *, is_twin: bool = False):
        self.key, self.group, self.chain = key, group, chain
        self.prefill_len, self.limit, self.is_twin = prefill_len, limit, is_twin
        self.slot: int | None = None
        self.held: list[Block] = []
        self.wanted: list[Block] = []
        self.expected: list[bytes] = []
        self.twins: list[Sequence] = []
        self.kv_len = 0

    def target(self, first: int = 0) -> int:
        """Up to where it prefills without a break from there: where its twins part from it, or to its end."""
        parts = first < self.group.fork_len and any(other.is_twin for other in self.group.sequences)
        return self.group.fork_len if parts else self.prefill_len


@dataclasses.dataclass(eq=False, slots=True)
class Group:
    """The sequences of one request.

    Attributes:
      rank: Groups run in ascending order of this, and are paused in descending order.
      reads_cache: Whether it may begin with blocks that others have computed.
      are_beams: Whether its sequences are beams: equally long, one step for all of them, tables that change places.
      sequences: Those that are not over, in order.
      fork_len: Tokens of the prompt that they share: behind them twins part from the first.
      alone: Whether its sequences may only run one after another, for together they did not fit.
      resumes: Whether it has paused, and its beams have tokens to run already.
      saved: At least so many blocks of its own does it save by sharing.
      losses: For each step that it takes part in and that is yet to be read, how many of these it may lose.
    """

    rank: tuple[float, ...]
    reads_cache: bool = True
    are_beams: bool = False
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    fork_len: int = 0
    alone: bool = False
    resumes: bool = False
    saved: int = 0
    losses: collections.deque[int] = dataclasses.field(default_factory=collections.deque)

    @property
    def resumes_beams(self) -> bool:
        """Whether it has beams that part, and have tokens to run, as soon as their prompt is computed."""
        return self.are_beams and self.resumes
