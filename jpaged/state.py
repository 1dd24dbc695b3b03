"""What is on the device between steps, and how a plan changes its memory: tables, KV blocks, histories.

All of it is pure: a state and a plan in, a state out. It runs no model and samples nothing.

Here X and B are as in `plan`, and Z counts blocks that were filled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jpaged import beam, sampling, tables
from jpaged import cache as kv
from jpaged import plan as plans
from jpaged.attention import token_rows
from jpaged.beam import BeamRows
from jpaged.cache import KVCache, KVLayout
from jpaged.plan import Plan
from jpaged.sampling import SamplerRows
from jpaged.tables import PagedState
from jpaged.types import Flag


class DecodeState(struct.PyTreeNode):
    """Everything on the device that steps change.

    Attributes:
      paged: Blocks, tables and lengths: which tokens' KV is where.
      cache: The KV memory.
      history_SP: The tokens of each slot, prompt then output. Position ``lengths_S[s]`` holds the token to run next.
      samplers: Each slot's sampling settings.
      beams: What each slot is as a beam, if it is one.
      done_S: Slots whose sequence has met its stop token or its limit, or has failed.
    """

    paged: PagedState
    cache: KVCache
    history_SP: Int32[Array, "S P"]
    samplers: SamplerRows
    beams: BeamRows
    done_S: Bool[Array, " S"]


def create(
    layout: KVLayout, *, max_num_seqs: int, max_model_len: int, max_beam_width: int, samplers: SamplerRows
) -> DecodeState:
    """An idle state: all blocks free, all slots empty."""
    return DecodeState(
        paged=tables.create(layout.num_blocks, max_num_seqs, -(-max_model_len // layout.block_size), layout.block_size),
        cache=kv.create(layout),
        history_SP=jnp.zeros((max_num_seqs, max_model_len), jnp.int32),
        samplers=samplers,
        beams=beam.create(max_num_seqs, max_beam_width),
        done_S=jnp.ones(max_num_seqs, jnp.bool_),
    )


def beside(weights: Any, state: DecodeState) -> DecodeState:
    """The state on the device that has the weights.

    Raises:
      ValueError: on several devices.
    """
    devices = {device for leaf in jax.tree.leaves(weights) for device in leaf.devices()}
    if len(devices) > 1:
        raise ValueError(f"the weights are on {len(devices)} devices and this version runs on one; try loading on one")
    return jax.device_put(state, devices.pop())


def apply(
    state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"], max_new: int
) -> tuple[DecodeState, Int32[Array, " R"], Bool[Array, ""]]:
    """Keeps, frees, drops and attaches what the plan says and adds the rows' tokens to the tables; all or nothing.

    Returns the state, the counts that hold now, and whether it fitted.
    """
    attached = {}
    if plan.admit_J.shape[0]:
        starts_J = prefix_sums(plan.attached_J)[:-1]
        column_1M = jnp.arange(state.paged.tables_SM.shape[1], dtype=jnp.int32)[None, :]
        ids_JM = plan.attach_X.at[starts_J[:, None] + column_1M].get(mode="fill", fill_value=0)
        attached = {
            "attach_dst": plan.admit_J,
            "attach_ids": jnp.where(column_1M < plan.attached_J[:, None], ids_JM, state.paged.pool.null),
            "attach_lengths": plan.attached_J * state.paged.block_size,
        }
    memory = tables.idle_plan(state.paged).replace(
        keep=plan.keep_B,
        free_S=plan.free_S > 0,
        drop=plan.drop_B,
        new_S=_per_slot(state, plan, counts_R),
        **attached,
    )
    return _with_copies(state, counts_R, *tables.apply(state.paged, memory, max_new))


def fork(state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"]) -> tuple[DecodeState, Bool[Array, ""]]:
    """Makes the rows that the plan says twins of their sources, each with a stream of randomness, a next token and, as
    a beam, a score of its own; and whether that went well."""
    num_slots = state.done_S.shape[0]
    twin_R = (plan.sources_R != jnp.arange(plan.sources_R.shape[0], dtype=jnp.int32)) & (counts_R[plan.sources_R] > 0)
    src_R, dst_R = plan.slots_R[plan.sources_R], jnp.where(twin_R, plan.slots_R, num_slots)

    def fork(state: DecodeState) -> tuple[DecodeState, Array]:
        paged, ok = tables.fork(state.paged, src_R, dst_R)
        rows = sampling.gather(state.samplers, src_R)
        lens_R = paged.lengths_S.at[src_R].get(mode="fill", fill_value=0)
        history_RP = state.history_SP.at[src_R].get(mode="fill", fill_value=0)
        history_SP = state.history_SP.at[dst_R].set(history_RP, mode="drop")
        beams = state.beams
        if plan.leaders_R.shape[0]:
            scores_R = lax.bitcast_convert_type(plan.scores_R, jnp.float32)
            beams = beam.set_rows(beams, beam.gather(beams, src_R).replace(score_R=scores_R), dst_R)
        return state.replace(
            paged=paged,
            samplers=sampling.set_rows(state.samplers, rows.replace(stream_R=plan.nexts_R), dst_R),
            history_SP=history_SP.at[dst_R, lens_R].set(plan.nexts_R, mode="drop"),
            done_S=state.done_S.at[dst_R].set(False, mode="drop"),
            beams=beams,
        ), ok

    return lax.cond(jnp.any(twin_R), fork, lambda state: (state, jnp.asarray(True)), state)


def permute(state: DecodeState, dst_R: Int32[Array, " R"], src_R: Int32[Array, " R"]) -> tuple[DecodeState, Flag]:
    """Lets each slot go on from what another one has, at once for all; their settings stay."""

    def permute(state: DecodeState) -> tuple[DecodeState, Array]:
        paged, ok = tables.permute(state.paged, dst_R, src_R)
        history_RP = state.history_SP.at[src_R].get(mode="fill", fill_value=0)
        return state.replace(paged=paged, history_SP=state.history_SP.at[dst_R].set(history_RP, mode="drop")), ok

    moves = jnp.any((dst_R < state.done_S.shape[0]) & (dst_R != src_R))
    return lax.cond(moves, permute, lambda state: (state, jnp.asarray(True)), state)


def filled(
    state: DecodeState, plan: Plan, grown_R: Int32[Array, " R"], most: int
) -> tuple[Int32[Array, " R"], Int32[Array, " Z"]]:
    """The blocks that rows have filled by growing so much: how many, and their ids, ``most`` at the most."""
    paged = state.paged
    lens_R = paged.lengths_S.at[plan.slots_R].get(mode="fill", fill_value=0)
    after_R = lens_R // paged.block_size
    counts_R = jnp.where(grown_R > 0, after_R - (lens_R - grown_R) // paged.block_size, 0)
    rows = token_rows(after_R, prefix_sums(counts_R), most)
    slot_Z = plan.slots_R.at[rows.row_T].get(mode="fill", fill_value=paged.lengths_S.shape[0])
    return counts_R, paged.tables_SM.at[slot_Z, rows.position_T].get(mode="fill", fill_value=paged.pool.null)


def own_blocks(paged: PagedState, slots_R: Int32[Array, " R"], shared_R: Int32[Array, " R"]) -> Float32[Array, " R"]:
    """Of each row's blocks behind the first so many, the number, each divided by its holders: the sum over those who
    share them is how many they have together."""
    null, columns = paged.pool.null, paged.tables_SM.shape[1]
    ids_RM = paged.tables_SM.at[slots_R].get(mode="fill", fill_value=null)
    own_RM = (ids_RM < null) & (jnp.arange(columns, dtype=jnp.int32)[None, :] >= shared_R[:, None])
    holders_RM = paged.pool.refs_N.at[ids_RM].get(mode="fill", fill_value=1)
    return jnp.sum(jnp.where(own_RM, 1 / jnp.maximum(holders_RM, 1), 0.0), axis=1, dtype=jnp.float32)


def tokens_in_blocks(paged: PagedState) -> Int32[Array, ""]:
    """Tokens in all live blocks, what is shared counted once. All blocks are full but the last one of a sequence, and
    those who share a last block have the same length."""
    slot_S = jnp.arange(paged.lengths_S.shape[0], dtype=jnp.int32)
    column_S = jnp.maximum(paged.lengths_S - 1, 0) // paged.block_size
    last_S = paged.tables_SM[slot_S, column_S]
    sharers_S = paged.pool.refs_N.at[last_S].get(mode="fill", fill_value=1)
    gap_S = (-paged.lengths_S % paged.block_size) / jnp.maximum(sharers_S, 1)
    used = paged.pool.null - paged.pool.num_free
    return used * paged.block_size - jnp.round(jnp.sum(gap_S)).astype(jnp.int32)


def grow(
    state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"]
) -> tuple[DecodeState, Int32[Array, " R"], Bool[Array, ""]]:
    """As `apply`, for a further decode step of the same plan: one token for the rows that go on."""
    return _with_copies(state, counts_R, *tables.grow(state.paged, _per_slot(state, plan, counts_R), 1))


def _with_copies(
    state: DecodeState, counts_R: Int32[Array, " R"], paged: PagedState, copies: tables.Copies, ok: Bool[Array, ""]
) -> tuple[DecodeState, Int32[Array, " R"], Bool[Array, ""]]:
    cache = kv.copy_blocks(state.cache, copies.src_S, copies.dst_S)
    return state.replace(paged=paged, cache=cache), jnp.where(ok, counts_R, 0), ok


def _per_slot(state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"]) -> Int32[Array, " S"]:
    return jnp.zeros(state.done_S.shape[0], jnp.int32).at[plan.slots_R].add(counts_R, mode="drop")


def prefix_sums(counts_R: Int32[Array, " R"]) -> Int32[Array, " R1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts_R, dtype=jnp.int32)])


def remember_prompts(
    state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"], cu_q_lens_R1: Int32[Array, " R1"], num_tokens: int
) -> DecodeState:
    """Writes the prompt tokens of rows that prefill into the history, and the one that follows each chunk.

    Such rows come first in a plan and are never done, so their tokens stand where the plan put them.
    """
    num_slots = state.done_S.shape[0]
    lens_R = state.paged.lengths_S.at[plan.slots_R].get(mode="fill", fill_value=0)
    rows = token_rows(lens_R, cu_q_lens_R1, num_tokens)
    prompts_R = jnp.where(((plan.flags_R & plans.PREFILLS) != 0) & (counts_R > 0), plan.slots_R, num_slots)
    slot_T = prompts_R.at[rows.row_T].get(mode="fill", fill_value=num_slots)
    history_SP = state.history_SP.at[slot_T, rows.position_T].set(plan.tokens_T, mode="drop")
    return state.replace(history_SP=history_SP.at[prompts_R, lens_R].set(plan.nexts_R, mode="drop"))
