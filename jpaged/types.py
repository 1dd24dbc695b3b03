"""The shape letters, the array aliases that use them, and the meaning of NULL.

Names only: nothing here computes, holds a value, or knows which device or room an array lives in.

A signature carries a jaxtyping shape made of these letters, and a name in a body carries them as a suffix:
``tables_SM`` is an array of S rows and M columns.

======  ====================================================================================
letter  counts
======  ====================================================================================
N       blocks of the pool
B       tokens that one block holds (``block_size``)
S       sequence slots
M       columns of a block table: the most blocks that one sequence may map
T       query tokens of one step
R       rows (sequences) of one step
P       token positions of a slot's history (``max_model_len``)
J       entries of a list of commands or of a per-request setting, padded to a static length
A       blocks that one call may give to one sequence
L       layers
K       KV heads
G       query heads that read the same KV head
H       query heads: ``H = K * G``
D       width of one head
E       width of the model
F       width of the MLP
V       entries of the vocabulary
I, O    inputs and outputs of a product
X, Q    tiles of queries, and queries of a tile
======  ====================================================================================

A file that needs a letter for something of its own says so in its first lines; there it means that.

NULL
    The block id that names no block. Its value is ``num_blocks``, one past the last id. A gather with
    ``mode="fill"`` answers it with the fill value and a scatter with ``mode="drop"`` ignores it, so padding needs
    no mask. It is not 0, because block 0 is a block like any other, and not -1, because JAX counts a negative
    index from the end. In the same way ``num_slots`` (S) names no slot.
"""

from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Int32

AnyArray: TypeAlias = Array | np.ndarray  # of an argument: the host may build commands in NumPy

Flag: TypeAlias = Bool[Array, ""]
Count: TypeAlias = Int32[Array, ""]
BlockIds: TypeAlias = Int32[AnyArray, "..."]  # as an argument: any shape; NULL entries name nothing
BlockTables: TypeAlias = Int32[Array, "S M"]  # NULL past the last mapped column
PerSlot: TypeAlias = Int32[Array, " S"]
