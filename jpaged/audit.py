"""Whether the device's memory and the host's books agree: what must be true after every step, said as faults.

It reads both and changes neither.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jpaged.scheduler import Scheduler
from jpaged.tables import PagedState


def faults(state: PagedState, scheduler: Scheduler) -> list[str]:
    """What is wrong, in sentences; nothing, as it should be.

    Args:
      state: After every step that was dispatched; waited for.
      scheduler: When all that it has planned was dispatched.
    """
    paged = jax.device_get(state)
    return memory_faults(paged, scheduler.kept_ids()) + _books(paged, scheduler)


def memory_faults(state: PagedState, kept_ids: list[int]) -> list[str]:
    """What is wrong with the device's memory by itself: references are holders, what nobody holds is free, and tables
    have the blocks that lengths say.

    Args:
      state: Waited for.
      kept_ids: Blocks that have a reference besides those of the tables.
    """
    paged: Any = jax.device_get(state)
    null, num_free = len(paged.pool.refs_N), int(paged.pool.num_free)
    found = []
    free = np.sort(paged.pool.free_N[:num_free])
    if not np.array_equal(free, np.flatnonzero(paged.pool.refs_N == 0)):
        found.append(f"the {num_free} blocks on the stack are not those without references")
    holders = np.concatenate([paged.tables_SM[paged.tables_SM < null], np.array(kept_ids, np.int32)])
    holders_N = np.bincount(holders, minlength=null)
    if wrong := np.flatnonzero(holders_N != paged.pool.refs_N).tolist():
        one = wrong[0]
        found.append(
            f"{len(wrong)} blocks have other references than holders, the first {one}: {paged.pool.refs_N[one]} "
            f"references, {holders_N[one]} holders"
        )
    used_S = (paged.tables_SM < null).sum(axis=1)
    if not np.array_equal(used_S, -(-paged.lengths_S // paged.block_size)):
        found.append("tables do not have the blocks that lengths say")
    return found


def _books(paged: Any, scheduler: Scheduler) -> list[str]:
    found = []
    for slot, sequence in enumerate(scheduler.occupants):
        if sequence is None:
            continue
        held = [block.id for block in sequence.held]
        if paged.tables_SM[slot, : len(held)].tolist() != held:
            found.append(f"slot {slot} has other blocks than its sequence holds in the books")
        if paged.lengths_S[slot] > scheduler.ledger.bound_S[slot]:
            found.append(f"slot {slot} has {paged.lengths_S[slot]} tokens, more than the books allow")
    if scheduler.is_idle and scheduler.ledger.free != int(paged.pool.num_free):
        found.append(f"at idle {paged.pool.num_free} blocks are free and the books say {scheduler.ledger.free}")
    return found
