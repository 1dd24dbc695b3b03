"""The host's lower bound on free blocks: integers only, and never a wait for the device.

The device allocates; the host learns the free count one step late. In between it knows the worst that the steps in
flight can do, because it knows an upper bound of every sequence's length. It knows nothing of requests or tables.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Budget:
    """What is known of the pool. Arrays are never written in place.

    Attributes:
      block_size: Tokens of a block.
      read_free: Free blocks after the last step that was read.
      read_S: Tokens of each slot's present sequence after that step, 0 if it was not there yet.
      bound_S: The most tokens it can have once every step in flight has run.
      returned: (step, blocks) of sequences that a step in flight frees.
    """

    block_size: int
    read_free: int
    read_S: np.ndarray
    bound_S: np.ndarray
    returned: tuple[tuple[int, int], ...] = ()

    @property
    def free(self) -> int:
        """At least this many blocks are free once the steps in flight have run."""
        grown = blocks_for(self.bound_S, self.block_size) - blocks_for(self.read_S, self.block_size)
        return self.read_free - int(grown.sum()) + sum(blocks for _, blocks in self.returned)

    def promised(self, limit_S: np.ndarray) -> int:
        """Blocks that the present sequences may still take beyond ``bound_S`` if all grow to ``limit_S``."""
        return int((blocks_for(limit_S, self.block_size) - blocks_for(self.bound_S, self.block_size)).sum())

    def dispatch(self, step: int, freed: list[int], grown: np.ndarray, grown_to: np.ndarray) -> "Budget":
        """Step ``step`` goes to the device: it frees slots, then slots ``grown`` may reach lengths ``grown_to``.

        A freed sequence's growth in flight comes back with it, so what it held when last read is the gain.
        """
        read_S, bound_S = self.read_S.copy(), self.bound_S.copy()
        blocks = int(blocks_for(read_S[freed], self.block_size).sum())
        read_S[freed] = 0
        bound_S[freed] = 0
        bound_S[grown] = grown_to
        returned = (*self.returned, (step, blocks)) if blocks else self.returned
        return dataclasses.replace(self, read_S=read_S, bound_S=bound_S, returned=returned)

    def harvest(self, step: int, num_free: int, slots: np.ndarray, lengths: np.ndarray) -> "Budget":
        """Step ``step`` was read: it left ``num_free`` blocks, and these slots, same occupants, have ``lengths``."""
        read_S = self.read_S.copy()
        read_S[slots] = lengths
        later = tuple(entry for entry in self.returned if entry[0] > step)
        return dataclasses.replace(self, read_free=num_free, read_S=read_S, returned=later)


def create(num_blocks: int, block_size: int, num_slots: int) -> Budget:
    """Nothing is in use."""
    return Budget(block_size, num_blocks, np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64))


def blocks_for(tokens: np.ndarray | np.integer, block_size: int) -> np.ndarray | np.integer:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)
