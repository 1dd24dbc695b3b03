"""The only jit boundary: one packed plan in, the whole state donated through, one small output back.

`Steps` holds the compiled functions: *prefill*, one step of a mixed batch; *decode*, up to K steps of a decode batch in
one dispatch, which allocates on the device as sequences cross block borders and leaves early when all are done or the
pool cannot serve the next step; *read* and *fetch*, which move blocks to the host and back. It knows slots and rows; it
knows neither requests nor text.

Here K counts decode steps of one dispatch, J candidates of log-probabilities, W beams of a group, E stop ids, Z blocks
that were filled and X blocks that move; H and the like in the plan's names are the plan's.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jpaged import beam, blocks, sampling
from jpaged import cache as kv
from jpaged import plan as plans
from jpaged import state as states
from jpaged.attention import token_rows
from jpaged.beam import BeamStep
from jpaged.model import AttentionView, Model, Weights
from jpaged.plan import Plan, PlanShape
from jpaged.sampling import Sampled, TokenLogprobs
from jpaged.state import DecodeState


class StepOutput(struct.PyTreeNode):
    """What the host reads, one step late. K is 1 after a prefill step.

    Attributes:
      sampled: The token of each step and row where ``made_KR``, its log-probabilities and flags, [K, R, …].
      made_KR: Whether that row was alive in that step.
      done_R: Whether the row's sequence is over by a stop token or its limit, or has failed.
      steps: Decode steps that ran.
      num_free: Free blocks afterwards.
      num_tokens, num_seqs: Tokens in all live blocks afterwards, and slots that hold any.
      ok: False if the pool could not serve the plan, and nothing has happened; or a further decode step of it, and
        ``steps`` says how many ran.
      filled_R, filled_Z: How many blocks each row has filled, and their ids, row after row and in order, then NULL.
      prompt_logprobs: For each prompt token, or None; see `sampling.prompt_logprobs`.
      beams: What the search did in each step, [K, R]; None without beams.
      own_R: See `state.own_blocks`, of what lies behind the full blocks of the prompt; None without beams.
    """

    sampled: Sampled
    made_KR: Bool[Array, "K R"]
    done_R: Bool[Array, " R"]
    steps: Int32[Array, ""]
    num_free: Int32[Array, ""]
    num_tokens: Int32[Array, ""]
    num_seqs: Int32[Array, ""]
    ok: Bool[Array, ""]
    filled_R: Int32[Array, " R"]
    filled_Z: Int32[Array, " Z"]
    prompt_logprobs: TokenLogprobs | None
    beams: BeamStep | None
    own_R: Float32[Array, " R"] | None


class Steps:
    """The compiled steps of one model.

    Args:
      model: Computes hidden states and logits.
      backend: Attention backend, by name.
      vocab_limit: Ids from here on are never sampled.
      max_steps: K, the most decode steps of one dispatch.
      rows: How sampling settings are packed.

    Attributes:
      traces: How often each (kind, plan shape) was traced; a second trace of one is a fault.
    """

    def __init__(self, model: Model, *, backend: str, vocab_limit: int, max_steps: int, rows: sampling.RowLayout):
        self._model, self._backend = model, backend
        self._vocab_limit, self._max_steps, self._rows = vocab_limit, max_steps, rows
        self.traces: collections.Counter = collections.Counter()
        jit = functools.partial(jax.jit, static_argnames="shape", donate_argnames="state")
        self.prefill = jit(self._prefill)
        self.decode = jit(self._decode)
        self.read = jax.jit(kv.read_blocks)
        self.fetch = jax.jit(_fetch, donate_argnames="state")

    def _prefill(
        self, weights: Weights, state: DecodeState, packed: Int32[Array, " size"], shape: PlanShape
    ) -> tuple[DecodeState, StepOutput]:
        self.traces["prefill", shape] += 1
        plan = plans.unpack(packed, shape)
        state = self._admit(state, plan)
        live_R = self._live(state, plan) | ((plan.flags_R & plans.PREFILLS) != 0)
        state, counts_R, ok = states.apply(state, plan, jnp.where(live_R, plan.counts_R, 0), shape.tokens)
        cu_q_lens_R1 = states.prefix_sums(counts_R)
        state = states.remember_prompts(state, plan, counts_R, cu_q_lens_R1, shape.tokens)
        state, hidden_TE = self._forward(weights, state, plan, counts_R, cu_q_lens_R1, shape.tokens, None)
        last_R = jnp.maximum(cu_q_lens_R1[1:] - 1, 0)[plan.sources_R]
        state, forked = states.fork(state, plan, counts_R)
        samples_R = (counts_R[plan.sources_R] > 0) & ((plan.flags_R & plans.SAMPLES) != 0)
        state, made, selected = self._sample(weights, state, plan, hidden_TE[last_R], samples_R)
        prompt = self._prompt_logprobs(weights, state, plan, hidden_TE, cu_q_lens_R1)
        one = jax.tree.map(lambda x: x[None], made)
        filled = states.filled(state, plan, counts_R, shape.tokens // shape.block_size + shape.rows)
        ok = ok & forked & selected
        return state, self._output(state, plan, one, samples_R[None], jnp.int32(1), ok, filled, prompt)

    def _decode(
        self, weights: Weights, state: DecodeState, packed: Int32[Array, " size"], shape: PlanShape
    ) -> tuple[DecodeState, StepOutput]:
        self.traces["decode", shape] += 1
        plan = plans.unpack(packed, shape)
        live_R = self._live(state, plan)
        state, counts_R, ok = states.apply(state, plan, (live_R & (plan.steps > 0)).astype(jnp.int32), 1)
        blank = (sampling.blank(self._rows, (self._max_steps, shape.rows)), None)
        if shape.beams:
            blank = (blank[0], beam.blank((self._max_steps, shape.rows)))
        made_KR = jnp.zeros((self._max_steps, shape.rows), jnp.bool_)

        def more(carry: tuple) -> Array:
            k, _, counts_R, ok, _, _ = carry
            return (k < plan.steps) & jnp.any(counts_R > 0) & ok

        def one(carry: tuple) -> tuple:
            k, state, counts_R, ok, kept, made_KR = carry
            cu_q_lens_R1 = states.prefix_sums(counts_R)
            state, hidden_TE = self._forward(weights, state, plan, counts_R, cu_q_lens_R1, shape.rows, 1)
            samples_R = counts_R > 0
            last_RE = hidden_TE[jnp.maximum(cu_q_lens_R1[1:] - 1, 0)]
            state, made, selected = self._sample(weights, state, plan, last_RE, samples_R)
            kept = jax.tree.map(lambda all_K, new: all_K.at[k].set(new), kept, made)
            made_KR = made_KR.at[k].set(samples_R)
            again_R = self._live(state, plan) & (k + 1 < plan.steps)
            state, counts_R, ok = states.grow(state, plan, again_R.astype(jnp.int32))
            return k + 1, state, counts_R, ok & selected, kept, made_KR

        carry = (jnp.int32(0), state, counts_R, ok, blank, made_KR)
        steps, state, _, ok, kept, made_KR = lax.while_loop(more, one, carry)
        made_R = jnp.sum(made_KR, axis=0, dtype=jnp.int32)
        filled = states.filled(state, plan, made_R, shape.rows * -(-self._max_steps // shape.block_size))
        return state, self._output(state, plan, kept, made_KR, steps, ok, filled, None)

    def _admit(self, state: DecodeState, plan: Plan) -> DecodeState:
        rows = self._rows.unpack(plan.samplers_JW)
        known_J = plan.attached_J * state.paged.block_size
        tokens = token_rows(known_J, states.prefix_sums(known_J), plan.known_H.shape[0])
        slot_H = plan.admit_J.at[tokens.row_T].get(mode="fill", fill_value=state.done_S.shape[0])
        beams = state.beams
        if plan.beams_JX.shape[1]:
            beams = beam.set_rows(beams, beam.unpack(plan.beams_JX), plan.admit_J)
        return state.replace(
            beams=beams,
            samplers=sampling.set_rows(state.samplers, rows, plan.admit_J),
            done_S=state.done_S.at[plan.admit_J].set(False, mode="drop"),
            history_SP=state.history_SP.at[slot_H, tokens.position_T].set(plan.known_H, mode="drop"),
        )

    def _live(self, state: DecodeState, plan: Plan) -> Bool[Array, " R"]:
        """Rows with a sequence that goes on; padding rows are none."""
        return ~state.done_S.at[plan.slots_R].get(mode="fill", fill_value=True)

    def _forward(
        self,
        weights: Weights,
        state: DecodeState,
        plan: Plan,
        counts_R: Array,
        cu_q_lens_R1: Array,
        num_tokens: int,
        max_q_len: int | None,
    ) -> tuple[DecodeState, Array]:
        """Runs the rows' tokens, which the tables hold already, through the model. Rows with count 0 take no part."""
        paged = state.paged
        lens_R = paged.lengths_S.at[plan.slots_R].get(mode="fill", fill_value=0)
        view = AttentionView(
            cache=state.cache,
            block_tables_RM=paged.tables_SM.at[plan.slots_R].get(mode="fill", fill_value=paged.pool.null),
            kv_lens_R=jnp.where(counts_R > 0, lens_R, 0),
            cu_q_lens_R1=cu_q_lens_R1,
            backend=self._backend,
            max_q_len=max_q_len,
        ).prepared(self._model.spec, num_tokens)
        rows = view.rows(num_tokens)
        slot_T = plan.slots_R.at[rows.row_T].get(mode="fill", fill_value=state.done_S.shape[0])
        tokens_T = state.history_SP.at[slot_T, rows.position_T].get(mode="fill", fill_value=0)
        hidden_TE, view = self._model.hidden(weights, tokens_T, rows.position_T, view)
        return state.replace(cache=view.cache), hidden_TE

    def _sample(
        self, weights: Weights, state: DecodeState, plan: Plan, hidden_RE: Array, samples_R: Array
    ) -> tuple[DecodeState, tuple[Sampled, BeamStep | None], Array]:
        """Samples one token for each row that wants one, appends it to the history and marks what is over. Beams go on
        from whatever beams were selected.

        Returns the state, what was made, and whether the tables could follow.
        """
        num_slots = state.done_S.shape[0]
        lens_R = state.paged.lengths_S.at[plan.slots_R].get(mode="fill", fill_value=0)
        slots_R = jnp.where(samples_R, plan.slots_R, num_slots)
        rows = sampling.gather(state.samplers, slots_R)
        history_RP = state.history_SP.at[slots_R].get(mode="fill", fill_value=0)
        logits_RV = self._model.logits(weights, hidden_RE)
        sampled = sampling.sample(logits_RV, rows, history_RP, lens_R, vocab_limit=self._vocab_limit)
        over_R, step, ok = sampling.is_over(sampled, rows, lens_R), None, jnp.asarray(True)
        if plan.leaders_R.shape[0]:
            is_beam_R = samples_R & (plan.leaders_R < plan.slots_R.shape[0])
            state, step, ended_R, bad_R, ok = self._select(state, plan, logits_RV, rows, is_beam_R, lens_R)
            over_R = jnp.where(is_beam_R, ended_R, over_R)
            sampled = sampled.replace(
                token_R=jnp.where(is_beam_R, step.token_R, sampled.token_R),
                bad_R=jnp.where(is_beam_R, bad_R, sampled.bad_R),
            )
        state = state.replace(
            history_SP=state.history_SP.at[slots_R, lens_R].set(sampled.token_R, mode="drop"),
            done_S=state.done_S.at[slots_R].set(over_R, mode="drop"),
        )
        return state, (sampled, step), ok

    def _select(
        self,
        state: DecodeState,
        plan: Plan,
        logits_RV: Array,
        rows: sampling.SamplerRows,
        is_beam_R: Array,
        lens_R: Array,
    ) -> tuple[DecodeState, BeamStep, Array, Array, Array]:
        num_rows, num_slots = plan.slots_R.shape[0], state.done_S.shape[0]
        width = state.beams.finished_RW.shape[1]
        leaders_R = jnp.where(is_beam_R, plan.leaders_R, num_rows)
        members_RW = beam.members(leaders_R, plan.numbers_R, width)
        first_R = plan.slots_R.at[leaders_R].get(mode="fill", fill_value=num_slots)
        beams = beam.gather(state.beams, plan.slots_R)
        beams = beams.replace(finished_RW=beam.gather(state.beams, first_R).finished_RW)
        step, beams, over_R, bad_R = beam.select(
            logits_RV,
            beams,
            members_RW,
            plan.numbers_R,
            rows.stop_ids_RE,
            lens_R + 1 - rows.prompt_len_R,
            rows.limit_R - rows.prompt_len_R,
            vocab_limit=self._vocab_limit,
        )
        dst_R = jnp.where(is_beam_R, plan.slots_R, num_slots)
        parent_R = jnp.take_along_axis(members_RW, step.parent_R[:, None], axis=1)[:, 0]
        src_R = plan.slots_R.at[parent_R].get(mode="fill", fill_value=num_slots)
        state, ok = states.permute(state, dst_R, src_R)
        return state.replace(beams=beam.set_rows(state.beams, beams, dst_R)), step, over_R, bad_R, ok

    def _prompt_logprobs(
        self, weights: Weights, state: DecodeState, plan: Plan, hidden_TE: Array, cu_q_lens_R1: Array
    ) -> TokenLogprobs:
        """Log-probabilities of the prompt token that follows each token of this step, where a row asks for them."""
        num_tokens = hidden_TE.shape[0]
        lens_R = state.paged.lengths_S.at[plan.slots_R].get(mode="fill", fill_value=0)
        rows = token_rows(lens_R, cu_q_lens_R1, num_tokens)
        slot_T = plan.slots_R.at[rows.row_T].get(mode="fill", fill_value=state.done_S.shape[0])
        next_T = state.history_SP.at[slot_T, rows.position_T + 1].get(mode="fill", fill_value=0)
        wanted_R = sampling.wants_prompt_logprobs(sampling.gather(state.samplers, plan.slots_R))
        wanted_R = wanted_R & ((plan.flags_R & plans.PREFILLS) != 0)
        return sampling.prompt_logprobs(
            functools.partial(self._model.logits, weights), hidden_TE, next_T, jnp.any(wanted_R), self._rows
        )

    def _output(
        self,
        state: DecodeState,
        plan: Plan,
        made: tuple[Sampled, BeamStep | None],
        made_KR: Array,
        steps: Array,
        ok: Array,
        filled: tuple[Array, Array],
        prompt_logprobs: TokenLogprobs | None,
    ) -> StepOutput:
        own_R = None
        if made[1] is not None:
            rows = sampling.gather(state.samplers, plan.slots_R)
            own_R = states.own_blocks(state.paged, plan.slots_R, rows.prompt_len_R // state.paged.block_size)
        return StepOutput(
            sampled=made[0],
            made_KR=made_KR,
            done_R=~self._live(state, plan),
            steps=steps,
            num_free=state.paged.pool.num_free,
            num_tokens=states.tokens_in_blocks(state.paged),
            num_seqs=jnp.sum(state.paged.lengths_S > 0, dtype=jnp.int32),
            ok=ok,
            filled_R=filled[0],
            filled_Z=filled[1],
            prompt_logprobs=prompt_logprobs,
            beams=made[1],
            own_R=own_R,
        )


def _fetch(
    state: DecodeState, blocks_XLBCKD: Float[Array, "..."], count: Int32[Array, ""]
) -> tuple[DecodeState, Int32[Array, " X"]]:
    """Takes ``count`` free blocks for the first of these, which come from the host in canonical order, a block first.

    Returns the state, in which each has one reference, and their ids, then NULL; NULL throughout if there is no room.
    """
    most = blocks_XLBCKD.shape[0]
    pool, ids_1X, _ = blocks.take(state.paged.pool, count[None], most)
    cache = kv.write_blocks(state.cache, ids_1X[0], blocks_XLBCKD)
    return state.replace(paged=state.paged.replace(pool=pool), cache=cache), ids_1X[0]
