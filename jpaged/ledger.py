"""The host's books of blocks: an upper bound of what is in use, without a wait for the device.

The device allocates. The host knows which blocks are in the prefix cache's books, and of every slot how long its
sequence can be at most once the steps in flight have run (it may have ended before); what a slot has beyond the booked
blocks is its own, unless it is known to be shared. It knows nothing of requests or tables.
"""

from __future__ import annotations

import numpy as np

from jpaged.prefix import PrefixCache


class Ledger:
    """What is known of the pool.

    Attributes:
      num_blocks, block_size: Of the pool.
      bound_S: The most tokens that each slot's sequence can have.
      held_S: Those of its blocks that are in the cache's books.
      saved: Blocks of their own that slots save by sharing, at the least.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, cache: PrefixCache):
        self.num_blocks, self.block_size, self._cache = num_blocks, block_size, cache
        self.bound_S = np.zeros(num_slots, np.int64)
        self.held_S = np.zeros(num_slots, np.int64)
        self.saved = 0

    @property
    def free(self) -> int:
        """At least this many blocks are free once the steps in flight have run."""
        own = int((blocks_for(self.bound_S, self.block_size) - self.held_S).sum())
        return self.num_blocks - self._cache.live - own + self.saved

    @property
    def obtainable(self) -> int:
        """Free blocks, and those that the cache could give up."""
        return self.free + self._cache.idle


def blocks_for(tokens, block_size: int):
    """Blocks that hold so many tokens, an integer or an array of them."""
    return -(-tokens // block_size)
