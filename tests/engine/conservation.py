"""What must be true of an engine's memory after every step, while no two sequences share a block."""

import jax

from jpaged.tables import PagedState


def check(state: PagedState) -> None:
    """Each block is free or held by one table entry, and tables fit lengths."""
    paged = jax.device_get(state)
    null, free = paged.pool.refs_N.shape[0], paged.pool.num_free
    held = paged.tables_SM[paged.tables_SM < null]
    assert len(set(held.tolist())) == len(held) == null - free
    assert sorted([*held.tolist(), *paged.pool.free_N[:free].tolist()]) == list(range(null))
    assert (paged.pool.refs_N[held] == 1).all() and paged.pool.refs_N.sum() == len(held)
    assert ((paged.tables_SM < null).sum(1) == -(-paged.lengths_S // paged.block_size)).all()
