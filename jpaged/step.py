"""The only jit boundary: one packed plan in, the whole state donated through, one small output back.

`Steps` holds the two compiled functions: *prefill*, one step of a mixed batch, and *decode*, up to K steps of a decode
batch in one dispatch, which allocates on the device as sequences cross block borders and leaves early when all are
done or the pool cannot serve the next step. It knows slots and rows; it knows neither requests nor text.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int32

from jpaged import cache as kv
from jpaged import plan as plans
from jpaged import sampling, tables
from jpaged.attention import token_rows
from jpaged.cache import KVCache, KVLayout
from jpaged.model import AttentionView, Model, Weights
from jpaged.plan import Plan, PlanShape
from jpaged.sampling import Sampled, SamplerRows, TokenLogprobs
from jpaged.tables import PagedState


class DecodeState(struct.PyTreeNode):
    """Everything on the device that steps change.

    Attributes:
      paged: Blocks, tables and lengths: which tokens' KV is where.
      cache: The KV memory.
      history_SP: The tokens of each slot, prompt then output. Position ``lengths_S[s]`` holds the token to run next.
      samplers: Each slot's sampling settings.
      done_S: Slots whose sequence has met its stop token or its limit, or has failed.
    """

    paged: PagedState
    cache: KVCache
    history_SP: Int32[Array, "S P"]
    samplers: SamplerRows
    done_S: Bool[Array, " S"]


class StepOutput(struct.PyTreeNode):
    """What the host reads, one step late. K is 1 after a prefill step.

    Attributes:
      sampled: The token of each step and row where ``made_KR``, its log-probabilities and flags, [K, R, …].
      made_KR: Whether that row was alive in that step.
      done_R: Whether the row's sequence is over by a stop token or its limit, or has failed.
      steps: Decode steps that ran.
      num_free: Free blocks afterwards.
      num_tokens, num_seqs: Tokens in all slots afterwards, and slots that hold any.
      ok: False if the pool could not serve the plan, and nothing has happened; or a further decode step of it, and
        ``steps`` says how many ran.
      prompt_logprobs: For each prompt token, or None; see `sampling.prompt_logprobs`.
    """

    sampled: Sampled
    made_KR: Bool[Array, "K R"]
    done_R: Bool[Array, " R"]
    steps: Int32[Array, ""]
    num_free: Int32[Array, ""]
    num_tokens: Int32[Array, ""]
    num_seqs: Int32[Array, ""]
    ok: Bool[Array, ""]
    prompt_logprobs: TokenLogprobs | None


def create_state(layout: KVLayout, *, max_num_seqs: int, max_model_len: int, samplers: SamplerRows) -> DecodeState:
    """An idle state: all blocks free, all slots empty."""
    return DecodeState(
        paged=tables.create(layout.num_blocks, max_num_seqs, -(-max_model_len // layout.block_size), layout.block_size),
        cache=kv.create(layout),
        history_SP=jnp.zeros((max_num_seqs, max_model_len), jnp.int32),
        samplers=samplers,
        done_S=jnp.ones(max_num_seqs, jnp.bool_),
    )


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

    def _prefill(
        self, weights: Weights, state: DecodeState, packed: Int32[Array, " size"], shape: PlanShape
    ) -> tuple[DecodeState, StepOutput]:
        self.traces["prefill", shape] += 1
        plan = plans.unpack(packed, shape)
        state = self._admit(state, plan)
        live_R = self._live(state, plan) | ((plan.flags_R & plans.PREFILLS) != 0)
        state, counts_R, ok = _apply(state, plan, jnp.where(live_R, plan.counts_R, 0), shape.tokens)
        cu_q_lens_R1 = _prefix_sums(counts_R)
        state = _remember_prompts(state, plan, counts_R, cu_q_lens_R1, shape.tokens)
        state, hidden_TE = self._forward(weights, state, plan, counts_R, cu_q_lens_R1, shape.tokens, None)
        last_R = jnp.maximum(cu_q_lens_R1[1:] - 1, 0)
        samples_R = (counts_R > 0) & ((plan.flags_R & plans.SAMPLES) != 0)
        state, sampled = self._sample(weights, state, plan, hidden_TE[last_R], samples_R)
        prompt = self._prompt_logprobs(weights, state, plan, hidden_TE, cu_q_lens_R1)
        one = jax.tree.map(lambda x: x[None], sampled)
        return state, self._output(state, plan, one, samples_R[None], jnp.int32(1), ok, prompt)

    def _decode(
        self, weights: Weights, state: DecodeState, packed: Int32[Array, " size"], shape: PlanShape
    ) -> tuple[DecodeState, StepOutput]:
        self.traces["decode", shape] += 1
        plan = plans.unpack(packed, shape)
        live_R = self._live(state, plan)
        state, counts_R, ok = _apply(state, plan, (live_R & (plan.steps > 0)).astype(jnp.int32), 1)
        blank = sampling.blank(self._rows, (self._max_steps, shape.rows))
        made_KR = jnp.zeros((self._max_steps, shape.rows), jnp.bool_)

        def more(carry: tuple) -> Array:
            k, _, counts_R, ok, _, _ = carry
            return (k < plan.steps) & jnp.any(counts_R > 0) & ok

        def one(carry: tuple) -> tuple:
            k, state, counts_R, ok, kept, made_KR = carry
            cu_q_lens_R1 = _prefix_sums(counts_R)
            state, hidden_TE = self._forward(weights, state, plan, counts_R, cu_q_lens_R1, shape.rows, 1)
            samples_R = counts_R > 0
            state, sampled = self._sample(
                weights, state, plan, hidden_TE[jnp.maximum(cu_q_lens_R1[1:] - 1, 0)], samples_R
            )
            kept = jax.tree.map(lambda all_K, new: all_K.at[k].set(new), kept, sampled)
            made_KR = made_KR.at[k].set(samples_R)
            again_R = self._live(state, plan) & (k + 1 < plan.steps)
            state, counts_R, ok = _grow(state, plan, again_R.astype(jnp.int32))
            return k + 1, state, counts_R, ok, kept, made_KR

        carry = (jnp.int32(0), state, counts_R, ok, blank, made_KR)
        steps, state, _, ok, kept, made_KR = lax.while_loop(more, one, carry)
        return state, self._output(state, plan, kept, made_KR, steps, ok, None)

    def _admit(self, state: DecodeState, plan: Plan) -> DecodeState:
        rows = self._rows.unpack(plan.samplers_JW)
        return state.replace(
            samplers=sampling.set_rows(state.samplers, rows, plan.admit_J),
            done_S=state.done_S.at[plan.admit_J].set(False, mode="drop"),
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
        )
        rows = view.rows(num_tokens)
        slot_T = plan.slots_R.at[rows.row_T].get(mode="fill", fill_value=state.done_S.shape[0])
        tokens_T = state.history_SP.at[slot_T, rows.position_T].get(mode="fill", fill_value=0)
        hidden_TE, view = self._model.hidden(weights, tokens_T, rows.position_T, view)
        return state.replace(cache=view.cache), hidden_TE

    def _sample(
        self, weights: Weights, state: DecodeState, plan: Plan, hidden_RE: Array, samples_R: Array
    ) -> tuple[DecodeState, Sampled]:
        """Samples one token for each row that wants one, appends it to the history and marks what is over."""
        lens_R = state.paged.lengths_S.at[plan.slots_R].get(mode="fill", fill_value=0)
        slots_R = jnp.where(samples_R, plan.slots_R, state.done_S.shape[0])
        rows = sampling.gather(state.samplers, slots_R)
        history_RP = state.history_SP.at[slots_R].get(mode="fill", fill_value=0)
        logits_RV = self._model.logits(weights, hidden_RE)
        sampled = sampling.sample(logits_RV, rows, history_RP, lens_R, vocab_limit=self._vocab_limit)
        over_R = sampling.is_over(sampled, rows, lens_R)
        return state.replace(
            history_SP=state.history_SP.at[slots_R, lens_R].set(sampled.token_R, mode="drop"),
            done_S=state.done_S.at[slots_R].set(over_R, mode="drop"),
        ), sampled

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
        sampled: Sampled,
        made_KR: Array,
        steps: Array,
        ok: Array,
        prompt_logprobs: TokenLogprobs | None,
    ) -> StepOutput:
        return StepOutput(
            sampled=sampled,
            made_KR=made_KR,
            done_R=~self._live(state, plan),
            steps=steps,
            num_free=state.paged.pool.num_free,
            num_tokens=jnp.sum(state.paged.lengths_S, dtype=jnp.int32),
            num_seqs=jnp.sum(state.paged.lengths_S > 0, dtype=jnp.int32),
            ok=ok,
            prompt_logprobs=prompt_logprobs,
        )


def _apply(
    state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"], max_new: int
) -> tuple[DecodeState, Int32[Array, " R"], Bool[Array, ""]]:
    """Frees what the plan frees and adds the rows' tokens to the tables; all or nothing.

    Returns the state, the counts that hold now, and whether it fitted.
    """
    memory = tables.idle_plan(state.paged).replace(free_S=plan.free_S > 0, new_S=_per_slot(state, plan, counts_R))
    return _with_copies(state, counts_R, *tables.apply(state.paged, memory, max_new))


def _grow(
    state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"]
) -> tuple[DecodeState, Int32[Array, " R"], Bool[Array, ""]]:
    """As `_apply`, for a further decode step of the same plan: one token for the rows that go on."""
    return _with_copies(state, counts_R, *tables.grow(state.paged, _per_slot(state, plan, counts_R), 1))


def _with_copies(
    state: DecodeState, counts_R: Int32[Array, " R"], paged: PagedState, copies: tables.Copies, ok: Bool[Array, ""]
) -> tuple[DecodeState, Int32[Array, " R"], Bool[Array, ""]]:
    cache = kv.copy_blocks(state.cache, copies.src_S, copies.dst_S)
    return state.replace(paged=paged, cache=cache), jnp.where(ok, counts_R, 0), ok


def _per_slot(state: DecodeState, plan: Plan, counts_R: Int32[Array, " R"]) -> Int32[Array, " S"]:
    return jnp.zeros(state.done_S.shape[0], jnp.int32).at[plan.slots_R].add(counts_R, mode="drop")


def _prefix_sums(counts_R: Int32[Array, " R"]) -> Int32[Array, " R1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts_R, dtype=jnp.int32)])


def _remember_prompts(
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
