"""Block tables and lengths: which blocks hold the tokens of each sequence slot.

It knows the pool, tables and lengths. It does not know KV memory: what must happen there comes back as data
(`Copies`, and the places that `slots` names). Nor does it know requests, prompts or what a token is.

After every function, for every slot s:

* row s of the table holds ``ceil(lengths_S[s] / block_size)`` live blocks and then NULL; an empty slot has length 0;
* a block has one reference for each table entry that names it, and one for each time that a plan kept it.

The functions are pure and total: a request that does not fit answers ``ok = False`` with the state unchanged, all of
it. They have static shapes and no loop, and work under ``jit``, ``vmap``, ``scan`` and ``while_loop``. All integers
are int32. A row of a command that names slot S, or an id that is NULL, is padding: it does nothing and is ok.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int32

from jpaged import blocks
from jpaged.blocks import BlockPool
from jpaged.config import INT32_MAX
from jpaged.types import AnyArray, BlockTables, Flag, PerSlot


class PagedState(struct.PyTreeNode):
    """The whole memory state of a device: the pool, and how S sequence slots map into it.

    Attributes:
      pool: The blocks.
      tables_SM: The blocks of each slot in the order of its tokens, NULL past the last.
      lengths_S: Tokens of each slot.
      block_size: Tokens that one block holds; static.
    """

    pool: BlockPool
    tables_SM: BlockTables
    lengths_S: PerSlot
    block_size: int = struct.field(pytree_node=False)


class Copies(struct.PyTreeNode):
    """Blocks whose KV the caller must copy, ``src_S[s]`` to ``dst_S[s]``, before anything else is written.

    Rows of NULL are no copies. The destinations are distinct, and none of them is a source: any order will do.
    """

    src_S: PerSlot
    dst_S: PerSlot


class MemoryPlan(struct.PyTreeNode):
    """One step's commands, in the order in which `apply` carries them out; `idle_plan` makes one that asks nothing.

    The four lists are padded to static lengths of their own.

    Attributes:
      keep: Blocks to add a reference to, on behalf of a cache; each must be live.
      free_S: Slots to empty.
      drop: Blocks to release from the cache, once for each time they were kept.
      attach_dst, attach_ids, attach_lengths: See `attach`.
      fork_src, fork_dst: See `fork`.
      new_S: Tokens to add to each slot; see `grow`.
    """

    keep: Int32[AnyArray, " J_keep"]
    free_S: Bool[AnyArray, " S"]
    drop: Int32[AnyArray, " J_drop"]
    attach_dst: Int32[AnyArray, " J_attach"]
    attach_ids: Int32[AnyArray, "J_attach M"]
    attach_lengths: Int32[AnyArray, " J_attach"]
    fork_src: Int32[AnyArray, " J_fork"]
    fork_dst: Int32[AnyArray, " J_fork"]
    new_S: Int32[AnyArray, " S"]


def create(num_blocks: int, max_seqs: int, max_blocks_per_seq: int, block_size: int) -> PagedState:
    """Returns a state of ``num_blocks`` free blocks and ``max_seqs`` empty slots.

    Raises:
      ValueError: naming every argument that is below 1, or so large that a block id, a slot or a length would not fit
        an int32.
    """
    faults = [
        f"{name}={value} must be in [1, 2**31 - 2]; try a value in that range"
        for name, value in (
            ("num_blocks", num_blocks),
            ("max_seqs", max_seqs),
            ("max_blocks_per_seq", max_blocks_per_seq),
            ("block_size", block_size),
        )
        if not 1 <= value < INT32_MAX
    ]
    if max_blocks_per_seq * block_size > INT32_MAX:
        faults.append(f"{max_blocks_per_seq=} * {block_size=} must be below 2**31, for lengths are int32; try less")
    if faults:
        raise ValueError("; ".join(faults))
    return PagedState(
        pool=blocks.create(num_blocks),
        tables_SM=jnp.full((max_seqs, max_blocks_per_seq), num_blocks, jnp.int32),
        lengths_S=jnp.zeros(max_seqs, jnp.int32),
        block_size=block_size,
    )


def idle_plan(state: PagedState, *, keeps: int = 0, drops: int = 0, attaches: int = 0, forks: int = 0) -> MemoryPlan:
    """Returns a plan of padding for a state of this shape, in NumPy arrays of their own for the host to fill in.

    The integers are the lengths of the four lists.
    """
    null = state.pool.null
    num_slots, num_columns = state.tables_SM.shape

    def padding(shape: tuple[int, ...], value: int) -> np.ndarray:
        return np.full(shape, value, np.int32)

    return MemoryPlan(
        keep=padding((keeps,), null),
        free_S=np.zeros(num_slots, np.bool_),
        drop=padding((drops,), null),
        attach_dst=padding((attaches,), num_slots),
        attach_ids=padding((attaches, num_columns), null),
        attach_lengths=padding((attaches,), 0),
        fork_src=padding((forks,), num_slots),
        fork_dst=padding((forks,), num_slots),
        new_S=padding((num_slots,), 0),
    )


def append(state: PagedState, new_S: Int32[AnyArray, " S"], max_new: int) -> tuple[PagedState, Flag]:
    """Lengthens each slot by ``new_S[s]`` tokens and maps a free block for each block border that it crosses.

    Where the tokens go is for `slots` to say. They may land in a last block that others share: `copy_on_write` comes
    first, or `grow` does both.

    Args:
      state: The state.
      new_S: Tokens to add; 0 leaves a slot as it is.
      max_new: The most that one slot may gain; static.

    Returns:
      The state, and ``ok``: false if a count lies outside [0, max_new], a slot would outgrow its table, or the pool
      has too few free blocks for all of them together.

    Raises:
      ValueError: at trace time, if ``max_new < 1``.
    """
    if max_new < 1:
        raise ValueError(f"{max_new=} must be at least 1; try not calling append when no slot can grow")
    num_slots, num_columns = state.tables_SM.shape
    room_S = num_columns * state.block_size - state.lengths_S
    sane = jnp.all((new_S >= 0) & (new_S <= max_new) & (new_S <= room_S))
    new_S = jnp.where(sane, new_S, 0)  # so that no sum below leaves int32

    first_S = _blocks_for(state.lengths_S, state.block_size)
    counts_S = _blocks_for(state.lengths_S + new_S, state.block_size) - first_S
    width = -(-max_new // state.block_size)
    pool, ids_SA, served = blocks.take(state.pool, counts_S, width)

    column_SA = first_S[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    column_SA = jnp.where(ids_SA == pool.null, num_columns, column_SA)
    row_S1 = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    state = PagedState(
        pool=pool,
        tables_SM=state.tables_SM.at[row_S1, column_SA].set(ids_SA, mode="drop"),
        lengths_S=state.lengths_S + jnp.where(served, new_S, 0),
        block_size=state.block_size,
    )
    return state, sane & served


def fork(state: PagedState, src_J: Int32[AnyArray, " J"], dst_J: Int32[AnyArray, " J"]) -> tuple[PagedState, Flag]:
    """Makes each empty slot ``dst_J[j]`` a twin of slot ``src_J[j]``, sharing all of its blocks.

    All sources are read before any destination is written. The twin of an empty slot is an empty slot.

    Returns:
      The state, and ``ok``: false if a destination is not empty, is named twice or is no slot, or if a source is no
      slot. Rows with ``dst_J[j] == S`` are padding, whatever their source.
    """
    num_slots = state.lengths_S.shape[0]
    sane_J = (src_J >= 0) & (src_J < num_slots)
    src_J = jnp.where(sane_J, src_J, num_slots)
    rows_JM = state.tables_SM.at[src_J].get(mode="fill", fill_value=state.pool.null)
    lengths_J = state.lengths_S.at[src_J].get(mode="fill", fill_value=0)
    return _seat(state, dst_J, rows_JM, lengths_J, sane_J)


def attach(
    state: PagedState, dst_J: Int32[AnyArray, " J"], ids_JM: Int32[AnyArray, "J M"], lengths_J: Int32[AnyArray, " J"]
) -> tuple[PagedState, Flag]:
    """Starts each empty slot ``dst_J[j]`` from ``lengths_J[j]`` tokens in full blocks that are live already.

    Returns:
      The state, and ``ok``: false if a destination is not empty, is named twice or is no slot; if a length is not a
      multiple of the block size between 0 and M blocks; or if the row of ids is not that many live blocks and then
      NULL. Rows with ``dst_J[j] == S`` are padding, whatever else they say.
    """
    num_columns = state.tables_SM.shape[1]
    used_J = lengths_J // state.block_size
    column_1M = jnp.arange(num_columns, dtype=jnp.int32)[None, :]
    right_JM = jnp.where(column_1M < used_J[:, None], blocks.is_live(state.pool, ids_JM), ids_JM == state.pool.null)
    full_J = (lengths_J >= 0) & (lengths_J % state.block_size == 0) & (used_J <= num_columns)
    return _seat(state, dst_J, ids_JM, lengths_J, full_J & jnp.all(right_JM, axis=1))


def permute(state: PagedState, dst_J: Int32[AnyArray, " J"], src_J: Int32[AnyArray, " J"]) -> tuple[PagedState, Flag]:
    """Lets each slot ``dst_J[j]`` share the blocks of slot ``src_J[j]`` in the place of its own: a step of beams.

    All sources are read before any destination is written, and a source may be named several times. Nothing is copied;
    blocks that nobody holds any more are free.

    Returns:
      The state, and ``ok``: false if a destination is named twice or is no slot, if a source is no slot, or if the two
      differ in length, for then more would change than who holds what. Rows with ``dst_J[j] == S`` are padding,
      whatever their source.
    """
    num_slots, null = state.lengths_S.shape[0], state.pool.null
    padding_J = dst_J == num_slots
    sane_J = (dst_J >= 0) & (dst_J < num_slots) & (src_J >= 0) & (src_J < num_slots)
    sane_J = sane_J & (state.lengths_S.at[src_J].get(mode="clip") == state.lengths_S.at[dst_J].get(mode="clip"))
    at_J = jnp.where(sane_J & ~padding_J, dst_J, num_slots)
    named_S = jnp.zeros_like(state.lengths_S).at[at_J].add(1, mode="drop")
    ok = jnp.all(padding_J | sane_J) & jnp.all(named_S <= 1)

    at_J = jnp.where(ok, at_J, num_slots)
    real_J1 = (at_J < num_slots)[:, None]
    new_JM = jnp.where(real_J1, state.tables_SM.at[src_J].get(mode="clip"), null)
    old_JM = jnp.where(real_J1, state.tables_SM.at[dst_J].get(mode="clip"), null)
    pool, _ = blocks.retain(state.pool, new_JM)  # first, lest a block that only changes hands is free in between
    pool, _ = blocks.release(pool, old_JM)
    return state.replace(pool=pool, tables_SM=state.tables_SM.at[at_J].set(new_JM, mode="drop")), ok


def truncate(state: PagedState, lengths_S: Int32[AnyArray, " S"]) -> tuple[PagedState, Flag]:
    """Shortens each slot to ``lengths_S[s]`` tokens and releases the blocks that lie wholly past them.

    A slot keeps all its tokens if its own length is given.

    Returns:
      The state, and ``ok``: false if a length is negative or greater than the slot's own.
    """
    ok = jnp.all((lengths_S >= 0) & (lengths_S <= state.lengths_S))
    return _shorten(state, jnp.where(ok, lengths_S, state.lengths_S)), ok


def free(state: PagedState, done_S: Bool[AnyArray, " S"]) -> PagedState:
    """Empties the slots where ``done_S`` is true. Nothing can refuse this, so there is no flag."""
    return _shorten(state, jnp.where(done_S, 0, state.lengths_S))


def copy_on_write(state: PagedState, writes_S: Bool[AnyArray, " S"]) -> tuple[PagedState, Copies, Flag]:
    """Gives every slot that is about to write a partial last block which nobody else can see.

    Only a partial last block can be both shared and written: a full one is never written again, and a new one has one
    holder. A writer ranked r (from 0, in slot order) among the writers of a block with c references copies it iff
    r < c - 1. So when all holders write, the last keeps the original, and when some only read, every writer copies.

    Args:
      state: The state.
      writes_S: The slots that are about to append a token. Where the last block is full or absent nothing happens.

    Returns:
      The state; the copies that the caller must make; and ``ok``, false if the pool has too few free blocks.
    """
    null, num_columns = state.pool.null, state.tables_SM.shape[1]
    slot_S = jnp.arange(state.lengths_S.shape[0], dtype=jnp.int32)
    # The block that holds the next position: the last one if that is partial, else NULL or past the table.
    column_S = jnp.where(writes_S, state.lengths_S // state.block_size, num_columns)
    block_S = state.tables_SM.at[slot_S, column_S].get(mode="fill", fill_value=null)

    # Sorted by block, then slot, the writers of a block are a run. Rank r reaches c - 1 exactly where the row c - 1
    # places before lies in the same run; NULL rows meet themselves, for they count as the only holder.
    order_S = jnp.argsort(block_S, stable=True)
    run_S = block_S[order_S]
    others_S = state.pool.refs_N.at[run_S].get(mode="fill", fill_value=1) - 1
    before_S = jnp.where(slot_S >= others_S, slot_S - others_S, slot_S.shape[0])
    keeps_S = run_S.at[before_S].get(mode="fill", fill_value=-1) == run_S
    copies_S = jnp.zeros_like(writes_S).at[order_S].set(~keeps_S)

    # The sources are released after the destinations are taken, so a destination is never a source. They stay live,
    # since at most c - 1 writers leave a block, and so nothing needs to go back on the stack.
    pool, ids_S1, ok = blocks.take(state.pool, copies_S.astype(jnp.int32), 1)
    dst_S = ids_S1[:, 0]
    src_S = jnp.where(dst_S == null, null, block_S)
    pool = pool.replace(refs_N=pool.refs_N.at[src_S].add(-1, mode="drop"))
    column_S = jnp.where(dst_S == null, num_columns, column_S)
    tables_SM = state.tables_SM.at[slot_S, column_S].set(dst_S, mode="drop")
    return state.replace(pool=pool, tables_SM=tables_SM), Copies(src_S, dst_S), ok


def grow(state: PagedState, new_S: Int32[AnyArray, " S"], max_new: int) -> tuple[PagedState, Copies, Flag]:
    """`copy_on_write` for the slots that gain tokens, then `append`: both, or neither and no copies."""
    private, copies, copied = copy_on_write(state, new_S > 0)
    longer, appended = append(private, new_S, max_new)
    ok = copied & appended
    return _either(ok, longer, state), _copies_if(ok, copies, state.pool.null), ok


def apply(state: PagedState, plan: MemoryPlan, max_new: int) -> tuple[PagedState, Copies, Flag]:
    """Carries out a step's plan: keep, free, drop, attach, fork, then `grow`. All of it, or nothing and no copies.

    Keeping precedes freeing, so that a finished sequence can leave its blocks to the cache; freeing and dropping
    precede the rest, so that the plan may use what it gives back, slots included.
    """
    pool, kept = blocks.retain(state.pool, plan.keep)
    after = free(state.replace(pool=pool), plan.free_S)
    pool, dropped = blocks.release(after.pool, plan.drop)
    after, attached = attach(after.replace(pool=pool), plan.attach_dst, plan.attach_ids, plan.attach_lengths)
    after, forked = fork(after, plan.fork_src, plan.fork_dst)
    after, copies, grown = grow(after, plan.new_S, max_new)
    ok = kept & dropped & attached & forked & grown
    return _either(ok, after, state), _copies_if(ok, copies, state.pool.null), ok


def slots(
    state: PagedState, seq_T: Int32[AnyArray, " T"], pos_T: Int32[AnyArray, " T"]
) -> tuple[Int32[Array, " T"], Int32[Array, " T"]]:
    """Finds where in the KV memory the token at position ``pos_T[t]`` of slot ``seq_T[t]`` lives.

    A block and an offset, because their flat index may exceed an int32. A position that the slot does not have, or a
    slot that does not exist, has block NULL and offset 0: a scatter with ``mode="drop"`` ignores it.

    Returns:
      The block ids, and the offsets in [0, block_size).
    """
    length_T = state.lengths_S.at[seq_T].get(mode="fill", fill_value=0)
    mapped_T = (seq_T >= 0) & (pos_T >= 0) & (pos_T < length_T)
    column_T = jnp.where(mapped_T, pos_T // state.block_size, state.tables_SM.shape[1])
    block_T = state.tables_SM.at[seq_T, column_T].get(mode="fill", fill_value=state.pool.null)
    return block_T, jnp.where(mapped_T, pos_T % state.block_size, 0)


def _blocks_for(lengths: Int32[Array, " S"], block_size: int) -> Int32[Array, " S"]:
    """Blocks that hold so many tokens; unlike ``(n + b - 1) // b`` it cannot overflow."""
    return lengths // block_size + (lengths % block_size != 0).astype(jnp.int32)


def _seat(
    state: PagedState,
    dst_J: Int32[AnyArray, " J"],
    rows_JM: Int32[AnyArray, "J M"],
    lengths_J: Int32[AnyArray, " J"],
    sane_J: Bool[AnyArray, " J"],
) -> tuple[PagedState, Flag]:
    """Fills empty slots with rows of live blocks, each entry a new reference; all of them, or none."""
    num_slots = state.lengths_S.shape[0]
    padding_J = dst_J == num_slots
    sane = jnp.all(padding_J | (sane_J & (dst_J >= 0) & (dst_J < num_slots)))
    dst_J = jnp.where(sane, dst_J, num_slots)
    arrivals_S = jnp.zeros_like(state.lengths_S).at[dst_J].add(1, mode="drop")
    ok = sane & jnp.all(arrivals_S <= (state.lengths_S == 0).astype(jnp.int32))

    dst_J = jnp.where(ok, dst_J, num_slots)
    rows_JM = jnp.where((ok & ~padding_J)[:, None], rows_JM, state.pool.null)
    pool, _ = blocks.retain(state.pool, rows_JM)
    state = PagedState(
        pool=pool,
        tables_SM=state.tables_SM.at[dst_J].set(rows_JM, mode="drop"),
        lengths_S=state.lengths_S.at[dst_J].set(lengths_J, mode="drop"),
        block_size=state.block_size,
    )
    return state, ok


def _shorten(state: PagedState, lengths_S: PerSlot) -> PagedState:
    """Truncates to lengths that are known to be no greater than the slots' own."""
    kept_S1 = _blocks_for(lengths_S, state.block_size)[:, None]
    kept_SM = jnp.arange(state.tables_SM.shape[1], dtype=jnp.int32)[None, :] < kept_S1
    gone_SM = jnp.where(kept_SM, state.pool.null, state.tables_SM)
    pool, _ = blocks.release(state.pool, gone_SM)
    tables_SM = jnp.where(kept_SM, state.tables_SM, state.pool.null)
    return state.replace(pool=pool, tables_SM=tables_SM, lengths_S=lengths_S)


def _either(ok: Flag, after: PagedState, before: PagedState) -> PagedState:
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, before)


def _copies_if(ok: Flag, copies: Copies, null: int) -> Copies:
    return jax.tree.map(lambda ids: jnp.where(ok, ids, null), copies)
