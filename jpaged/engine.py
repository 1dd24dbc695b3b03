"""The loop: plan, dispatch, harvest one step late.

It joins the scheduler (who runs) with the steps (what the device does) and hands results to requests. It never waits
for the step it has just dispatched, only for the one before. It does not know prompts as text, nor who calls it, and it
leaves it to its callers that one thread at a time does.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from jpaged import buckets, budget, dtypes, plan, sampling, scheduler, sizing, step
from jpaged.attention import resolve_backend
from jpaged.config import EngineConfig
from jpaged.model import LoadedModel
from jpaged.plan import PlanShape
from jpaged.request import Candidates, Request, Sample
from jpaged.scheduler import Limits, Schedule, Sequence
from jpaged.stats import Stats

MAX_ADMISSIONS = 8  # sequences that may start in one step: what bounds a plan's size


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatched step: who its rows were for. A row whose sample is over by the time it is read is dropped."""

    number: int
    schedule: Schedule
    samples: tuple[Sample, ...]
    output: step.StepOutput


class Engine:
    """Serves requests on one model.

    Args:
      loaded: The model.
      config: Sizes and limits; see `EngineConfig`.

    Attributes:
      failure: What a step has failed with; the engine then serves no more. None while all is well.

    Raises:
      ValueError: settings that this model or machine cannot serve, with the numbers.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig):
        self.loaded = loaded
        spec, vocab = loaded.model.spec, loaded.model.spec.vocab_size
        self.config = settled = sizing.resolve(spec, dtypes.of_weights(loaded, config))
        self.layout = sizing.layout(
            spec, num_blocks=settled.num_blocks, block_size=settled.block_size, dtype=settled.dtype
        )
        self.buckets = buckets.make(
            settled.max_num_seqs, settled.max_num_batched_tokens, dtypes.min_rows(settled.dtype)
        )
        self._rows = sampling.RowLayout.of(settled, vocab)
        self.steps = step.Steps(
            loaded.model,
            backend=resolve_backend(settled.backend),
            vocab_limit=loaded.sampled_vocab,
            max_steps=settled.decode_steps,
            rows=self._rows,
        )
        state = step.create_state(
            self.layout,
            max_num_seqs=settled.max_num_seqs,
            max_model_len=settled.max_model_len,
            samplers=sampling.create(self._rows, settled.max_num_seqs),
        )
        # Where the weights are, and committed as a step's results are: else the second step would compile anew.
        self._state = _beside(loaded, state)
        self._limits = Limits(
            tokens=settled.max_num_batched_tokens,
            admissions=min(MAX_ADMISSIONS, settled.max_num_seqs),
            decode_steps=settled.decode_steps,
        )
        self._queue = scheduler.create(settled.max_num_seqs)
        self._budget = budget.create(settled.num_blocks, settled.block_size, settled.max_num_seqs)
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._step_number = 0
        self.failure: BaseException | None = None
        self.stats = Stats(block_size=settled.block_size, num_blocks=settled.num_blocks)

    @property
    def state(self) -> step.DecodeState:
        """The device state after every step that was dispatched."""
        return self._state

    @property
    def has_work(self) -> bool:
        return self.failure is None and (bool(self._in_flight) or not self._queue.is_idle)

    def add(self, *requests: Request) -> None:
        """Queues the requests' samples. They must have passed `validate.request_problems`: else they may wait forever.

        Raises:
          RuntimeError: a step has failed, and taken the state with it.
        """
        self._refuse_after_failure()
        self._queue = scheduler.submit(
            self._queue,
            tuple(
                Sequence(sample, len(request.prompt_token_ids), len(request.prompt_token_ids) + request.max_tokens - 1)
                for request in requests
                for sample in request.samples
            ),
        )

    def abort(self, *requests: Request) -> None:
        """Ends what is left of the requests; their blocks come back with the next step."""
        alive = {sample for request in requests for sample in request.samples if sample.finish_reason is None}
        if not alive:
            return
        self._queue = scheduler.withdraw(self._queue, alive)
        self._queue = scheduler.finish(self._queue, [s for s, q in self._running() if q.key in alive])
        for sample in alive:
            sample.abort()

    def step(self) -> list[Sample]:
        """Dispatches one step, reads the one before, and returns the samples that this changed."""
        self._refuse_after_failure()
        try:
            dispatched = self._dispatch()
            if len(self._in_flight) > 1 or (self._in_flight and not dispatched):
                return self._harvest()
            return []
        except Exception as error:
            self.failure = error  # what the step was given is donated, so there may be nothing left to go on from
            raise

    def warmup(self, on_progress=lambda done, total: None) -> int:
        """Compiles every bucket by running idle plans through it; returns how many there are.

        Raises:
          RuntimeError: a step has failed, and taken the state with it.
        """
        self._refuse_after_failure()
        shapes = [("prefill", self._shape(r, t)) for r, t in self.buckets.all_prefill()]
        shapes += [("decode", self._shape(r, 0)) for r in self.buckets.rows]
        for done, (kind, shape) in enumerate(shapes):
            on_progress(done, len(shapes))
            run = self.steps.prefill if kind == "prefill" else self.steps.decode
            with self._failing_without_a_state():
                self._state, output = run(self.loaded.weights, self._state, plan.blank(shape)[0], shape=shape)
            jax.block_until_ready(output)
        on_progress(len(shapes), len(shapes))
        return len(shapes)

    def _refuse_after_failure(self) -> None:
        if self.failure is not None:
            why = str(self.failure) or type(self.failure).__name__
            raise RuntimeError(f"a step of this engine failed ({why}); make a new one") from self.failure

    def _running(self) -> list[tuple[int, Sequence]]:
        return [(slot, sequence) for slot, sequence in enumerate(self._queue.running) if sequence is not None]

    def _shape(self, rows: int, tokens: int) -> PlanShape:
        admissions = self._limits.admissions if tokens else 0
        return PlanShape(self.config.max_num_seqs, rows, tokens, admissions, self._rows.width)

    def _dispatch(self) -> bool:
        number = self._step_number
        queue, budget, planned = scheduler.schedule(self._queue, self._budget, self._limits, number)
        if planned is None:
            self._queue, self._budget = queue, budget
            return False
        if planned.decodes_only:
            shape, run = self._shape(self.buckets.decode(len(planned.slots_R)), 0), self.steps.decode
        else:
            shape, run = (
                self._shape(*self.buckets.prefill(len(planned.slots_R), int(planned.counts_R.sum()))),
                self.steps.prefill,
            )
        running = queue.running
        samples = tuple(running[slot].key for slot in planned.slots_R.tolist())
        packed = self._pack(planned, samples, shape)
        with self._failing_without_a_state():
            state, output = run(self.loaded.weights, self._state, packed, shape=shape)
            for leaf in jax.tree.leaves(output):
                leaf.copy_to_host_async()
            self._in_flight.append(_InFlight(number, planned, samples, output))
            # Only now: an interrupt on the way here (compiling takes seconds) must not lose what the plan frees.
            self._queue, self._budget, self._step_number = queue, budget, number + 1
            self._state = state
        return True

    @contextlib.contextmanager
    def _failing_without_a_state(self) -> Iterator[None]:
        """For calls of steps: an interrupt between one and its assignment leaves the state donated, and no other."""
        try:
            yield
        except BaseException as error:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
                self.failure = error
            raise

    def _pack(self, planned: Schedule, samples: tuple[Sample, ...], shape: PlanShape) -> np.ndarray:
        packed, view = plan.blank(shape)
        rows = len(planned.slots_R)
        view["steps"][...] = planned.steps
        view["free"][list(planned.freed)] = 1
        view["slots"][:rows] = planned.slots_R
        view["counts"][:rows] = planned.counts_R
        view["flags"][:rows] = planned.prefills_R * plan.PREFILLS + planned.samples_R * plan.SAMPLES
        start = 0
        for row in np.flatnonzero(planned.prefills_R).tolist():
            first, count = int(planned.starts_R[row]), int(planned.counts_R[row])
            ids = samples[row].request.prompt_token_ids
            view["tokens"][start : start + count] = ids[first : first + count]
            view["nexts"][row] = ids[first + count] if first + count < len(ids) else 0
            start += count
        for j, (slot, sequence) in enumerate(planned.admitted):
            view["admit"][j] = slot
            view["samplers"][j] = self._sampler_row(sequence.key)
        return packed

    def _sampler_row(self, sample: Sample) -> np.ndarray:
        request = sample.request
        return sampling.pack_row(
            self._rows,
            request.params,
            index=sample.index,
            seed=self._seed(request),
            prompt_len=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            stop_ids=sorted(request.stop_ids),
            bad_words=request.bad_words,
        )

    def _seed(self, request: Request) -> int:
        """A request without a seed of its own gets one from the engine's seed and its number."""
        if request.params.seed is not None:
            return request.params.seed
        return int(np.random.default_rng([self.config.seed % 2**64, request.id]).integers(2**63))

    def _harvest(self) -> list[Sample]:
        record = self._in_flight[0]
        output: step.StepOutput = jax.device_get(record.output)  # waits: an interrupt here loses nothing
        try:
            return self._read(record, output)
        except BaseException as error:
            self.failure = error  # requests may have been told half of it
            raise

    def _read(self, record: _InFlight, output: step.StepOutput) -> list[Sample]:
        """Tells requests, budget and queue what a step did; returns the samples that this changed."""
        self._in_flight.popleft()
        if not output.ok and record.schedule.steps == 1:
            raise AssertionError("the pool could not serve a step that the budget had room for")
        planned, rows = record.schedule, len(record.samples)
        made_R = output.made_KR[:, :rows].sum(axis=0).tolist()
        tokens = output.sampled.token_R[:, :rows].T.tolist()
        over_R = output.done_R[:rows].tolist()
        failed_R = (output.sampled.bad_R & output.made_KR)[:, :rows].any(axis=0).tolist()
        counts_R = planned.counts_R.tolist()
        found = Candidates(
            output.sampled.logprob_R, output.sampled.rank_R, output.sampled.top_ids_RJ, output.sampled.top_logprobs_RJ
        )
        changed, present, lengths, over, start = [], [], [], [], 0
        # Lists, and nothing looked up twice: with 256 rows a microsecond here is a quarter of a millisecond a step.
        rows_of = zip(
            record.samples, planned.slots_R.tolist(), planned.prefills_R.tolist(), made_R, tokens, strict=True
        )
        for row, (sample, slot, prefills, made, made_tokens) in enumerate(rows_of):
            if prefills:
                start = self._read_prompt(record, output, row, start)
                sample.kv_len += counts_R[row]
            else:
                sample.kv_len += made
            if sample.finish_reason is not None:
                continue
            present.append(slot)
            lengths.append(sample.kv_len)
            if made:
                new = made_tokens if made == len(made_tokens) else made_tokens[:made]
                scores = self._logprobs(found, sample, row, new) if sample.request.params.logprobs is not None else ()
                sample.accept(new, scores, over=over_R[row], failed=failed_R[row])
                changed.append(sample)
                if sample.finish_reason is not None:
                    over.append(slot)
        self._budget = self._budget.harvest(
            record.number, int(output.num_free), np.array(present, np.int64), np.array(lengths, np.int64)
        )
        self._queue = scheduler.finish(self._queue, over)
        self.stats.record(planned, made_R, int(output.num_free), int(output.num_tokens), int(output.num_seqs))
        return changed

    def _logprobs(self, found: Candidates, sample: Sample, row: int, tokens: list[int]) -> list[dict]:
        top = sample.request.params.logprobs
        assert top is not None
        return [found.table((k, row), token, top, self.loaded.tokenizer) for k, token in enumerate(tokens)]

    def _read_prompt(self, record: _InFlight, output: step.StepOutput, row: int, start: int) -> int:
        """Keeps the prompt log-probabilities of one row's chunk; returns where the next row's tokens begin."""
        request, planned = record.samples[row].request, record.schedule
        first, count = int(planned.starts_R[row]), int(planned.counts_R[row])
        top, ids, scores = request.params.prompt_logprobs, request.prompt_token_ids, output.prompt_logprobs
        if top is not None and scores is not None and record.samples[row].index == 0:
            found = Candidates(scores.logprob_T, scores.rank_T, scores.top_ids_TJ, scores.top_logprobs_TJ)
            for i in range(min(count, len(ids) - 1 - first)):
                request.prompt_logprobs.append(found.table(start + i, ids[first + i + 1], top, self.loaded.tokenizer))
        return start + count


def _beside(loaded: LoadedModel, state: step.DecodeState) -> step.DecodeState:
    """The state on the device that has the weights.

    Raises:
      ValueError: on several devices.
    """
    devices = {device for leaf in jax.tree.leaves(loaded.weights) for device in leaf.devices()}
    if len(devices) > 1:
        raise ValueError(f"the weights are on {len(devices)} devices and this version runs on one; try loading on one")
    return jax.device_put(state, devices.pop())
