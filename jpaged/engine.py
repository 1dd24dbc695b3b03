"""The loop: plan, dispatch, harvest one step late.

It joins the scheduler (who runs) with the steps (what the device does) and hands results to requests. It never waits
for the step it has just dispatched, only for the one before. It does not know prompts as text, nor who calls it, and it
leaves it to its callers that one thread at a time does.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import time
import weakref
from collections.abc import Callable

import jax
import numpy as np

from jpaged import audit, buckets, dtypes, intake, prefix, sampling, sizing, step
from jpaged import state as states
from jpaged.backends import backend_for
from jpaged.config import EngineConfig
from jpaged.groups import Group, Sequence
from jpaged.intake import AnyRequest, AnySample
from jpaged.model import LoadedModel
from jpaged.outputs import RequestMetrics
from jpaged.packing import Packer
from jpaged.prefix import Block, PrefixCache
from jpaged.reading import Reader
from jpaged.schedule import Schedule, StepLimits
from jpaged.scheduler import Scheduler
from jpaged.stats import Stats
from jpaged.swap import Swapper

MAX_ADMISSIONS = 8  # sequences that may start in one step: what bounds a plan's size


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatched step. A row whose sequence is over by the time it is read is dropped."""

    schedule: Schedule
    output: step.StepOutput
    stored: list[list[Block]]  # what each of the copies holds
    copies: list[jax.Array]
    fetched: list[list[Block]]
    fetched_ids: list[jax.Array]
    begun: float
    traces: int  # that there had been


class Engine:
    """Serves requests on one model.

    Args:
      loaded: The model.
      config: Sizes and limits; see `EngineConfig`.
      hash: By which the prefix cache finds blocks.
      clock: Seconds; for deadlines, ageing and times.

    Attributes:
      failure: What a step has failed with; the engine then serves no more. None while all is well.

    Raises:
      ValueError: settings that this model or machine cannot serve, with the numbers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        hash: Callable[[bytes], bytes] = prefix.sha256,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.loaded = loaded
        spec, vocab = loaded.model.spec, loaded.model.spec.vocab_size
        self.config = settled = sizing.resolve(spec, dtypes.of_weights(loaded, config))
        self.layout = sizing.layout(
            spec,
            num_blocks=settled.num_blocks,
            block_size=settled.block_size,
            dtype=settled.dtype,
            backend=settled.backend,
        )
        self.buckets = buckets.make(
            settled.max_num_seqs, settled.max_num_batched_tokens, dtypes.min_rows(settled.dtype)
        )
        rows = sampling.RowLayout.of(settled, vocab)
        self.steps = step.Steps(
            loaded.model,
            backend=backend_for(settled.backend, self.layout),
            vocab_limit=loaded.sampled_vocab,
            max_steps=settled.decode_steps,
            rows=rows,
        )
        idle = states.create(
            self.layout,
            max_num_seqs=settled.max_num_seqs,
            max_model_len=settled.max_model_len,
            max_beam_width=settled.max_beam_width,
            samplers=sampling.create(rows, settled.max_num_seqs),
        )
        # Where the weights are, and committed as a step's results are: else the second step would compile anew.
        self._state = states.beside(loaded.weights, idle)
        limits = StepLimits.of(
            tokens=settled.max_num_batched_tokens,
            starts=min(MAX_ADMISSIONS, settled.max_num_seqs),
            attached=settled.max_model_len // settled.block_size,
            decode_steps=settled.decode_steps,
            slots=settled.max_num_seqs,
            block_size=settled.block_size,
        )
        self.packer = Packer(settled, rows, limits)
        self.prefix_cache = PrefixCache(
            retains=settled.enable_prefix_caching, room=settled.swap_space // self.layout.bytes_per_block
        )
        self.swapper = Swapper(self.layout, self.steps, self.prefix_cache)
        self.scheduler = Scheduler(
            settled.max_num_seqs,
            settled.num_blocks,
            settled.block_size,
            limits,
            self.prefix_cache,
            self._prefers_swap,
        )
        self._reader = Reader(
            self.scheduler, loaded.tokenizer, settled.block_size, books_generated=settled.enable_prefix_caching
        )
        self._hash, self._clock = hash, clock
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, weakref.ref[AnyRequest]]] = []  # a heap
        self._changed: list[AnySample] = []  # and not told yet
        self._read_at = 0.0
        self._sequences: dict[AnySample, Sequence] = {}
        self._planned: Schedule | None = None  # not dispatched yet
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self.failure: BaseException | None = None
        self.stats = Stats(block_size=settled.block_size, num_blocks=settled.num_blocks)

    @property
    def state(self) -> states.DecodeState:
        """The device state after every step that was dispatched."""
        return self._state

    @property
    def has_work(self) -> bool:
        return self.failure is None and not (self._planned is None and not self._in_flight and self.scheduler.is_idle)

    def add(self, *requests: AnyRequest) -> None:
        """Queues the requests' samples. They must have passed `validate`: else they may wait forever.

        Raises:
          RuntimeError: a step has failed, and taken the state with it.
          ValueError: a request is none, was added before, or is over; nothing is queued.
        """
        self._refuse_after_failure()
        intake.check_new(requests)
        now = self._clock()
        groups = [
            self._group_of(request, now) for request in requests
        ]  # whatever fails, fails before anything is queued
        with self._all_or_failure():
            for request, group in zip(requests, groups, strict=True):
                request.metrics = RequestMetrics(arrived=now)
                self._sequences.update((sequence.key, sequence) for sequence in group.sequences)
                if request.timeout is not None:
                    self._arrivals += 1
                    heapq.heappush(self._deadlines, (now + request.timeout, self._arrivals, weakref.ref(request)))
            self.scheduler.submit(*groups)

    def _group_of(self, request: AnyRequest, now: float) -> Group:
        self._arrivals += 1
        return intake.group_of(request, self.config, self._hash, arrival=self._arrivals, now=now)

    def abort(self, *requests: AnyRequest, reason: str = "abort") -> None:
        """Ends what is left of the requests; their blocks come back with the next step.

        Args:
          reason: The finish_reason that they get.
        """
        for request in requests:
            alive = [sample for sample in request.samples if sample.finish_reason is None]
            known = [sample for sample in alive if sample in self._sequences]
            with self._all_or_failure():
                if self.failure is None:  # else there are no books left to keep
                    self.scheduler.finish(*(self._sequences.pop(sample) for sample in known))
                for sample in alive:
                    sample.abort(reason)
                if alive and request.metrics is not None:
                    self._finished(request)

    def _expire(self) -> None:
        """Ends the requests whose time is up."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            request = self._deadlines[0][-1]()
            with self._all_or_failure():
                if request is not None:
                    alive = [sample for sample in request.samples if sample.finish_reason is None]
                    self.abort(request, reason="timeout")
                    self._changed += alive
                heapq.heappop(self._deadlines)

    def _prefers_swap(self, tokens: int, blocks: int) -> bool:
        mode = self.config.preemption_mode
        return mode == "swap" or (mode == "auto" and self.swapper.costs.prefer_swap(tokens, blocks))

    def step(self) -> list[AnySample]:
        """Dispatches one step, reads the one before, and returns the samples that this changed.

        An interrupt loses nothing: the next call goes on, or, if it came where that is not possible, says so.
        """
        self._refuse_after_failure()
        try:
            self._expire()
            dispatched = self._dispatch()
            if len(self._in_flight) > 1 or (self._in_flight and not dispatched):
                self._harvest()
            with self._all_or_failure():
                self.swapper.discard()
            if self.config.check_every_step or not self.has_work:
                self.check()
        except Exception as error:  # what the step was given is donated, so there may be nothing left to go on from
            self.failure = error
            raise
        changed, self._changed = self._changed, []
        return changed

    def check(self) -> None:
        """Compares the device's memory with the host's books; waits for the steps in flight.

        Every engine does so whenever it becomes idle, and after each step with ``check_every_step``. There is nothing
        to compare while a plan is not dispatched yet, or blocks come from the host whose ids are not read yet.

        Raises:
          RuntimeError: a block is lost, held by nobody or by too many, or not where the books say; all is named.
        """
        if self._planned is not None or any(record.fetched for record in self._in_flight):
            return
        if found := audit.faults(self._state.paged, self.scheduler):
            raise RuntimeError("the KV memory is not as the books say: " + "; ".join(found))

    def warmup(self, on_progress=lambda done, total: None, *, beams: bool = False) -> int:
        """Compiles every bucket by running idle plans through it; returns how many there are.

        Args:
          on_progress: Is told how many are done, and how many there are.
          beams: Whether to compile what beam searches need, too, which are as many again.

        Raises:
          RuntimeError: a step has failed, and taken the state with it.
        """
        self._refuse_after_failure()
        sizes = [*self.buckets.all_prefill(), *((rows, 0) for rows in self.buckets.rows)]
        kinds = (False, True) if beams else (False,)
        shapes = [self.packer.shape(*size, beams=kind) for kind in kinds for size in sizes]
        for done, shape in enumerate(shapes):
            on_progress(done, len(shapes))
            run = self.steps.prefill if shape.tokens else self.steps.decode
            with self._failing_without_a_state():
                self._state, output = run(self.loaded.weights, self._state, self.packer.blank(shape)[0], shape=shape)
            jax.block_until_ready(output)
        self.prepare_swap()
        on_progress(len(shapes), len(shapes))
        return len(shapes)

    def _refuse_after_failure(self) -> None:
        if self.failure is not None:
            why = str(self.failure) or type(self.failure).__name__
            raise RuntimeError(f"a step of this engine failed ({why}); make a new one") from self.failure

    def _dispatch(self) -> bool:
        if self._planned is None:
            if self.scheduler.ledger.obtainable < self.config.num_blocks // 4:
                self.prepare_swap()
            with self._all_or_failure():
                self._planned = self.scheduler.schedule(in_flight=bool(self._in_flight))
        planned = self._planned
        if planned is None:
            return False
        # An interrupt from here on (compiling takes seconds) leaves the plan for the next call: it is in the books.
        begun = self._clock()
        traces, shape = self.steps.traces.total(), self.packer.shape_for(planned, self.buckets)
        packed = self.packer.pack(planned, shape)
        with self._all_or_failure():
            stored, copies = self.swapper.store(self._state, planned)
            fetches = self.swapper.lay_out(planned, [(each.stored, each.copies) for each in self._in_flight])
        run = self.steps.decode if planned.decodes_only else self.steps.prefill
        with self._failing_without_a_state():
            state, output = run(self.loaded.weights, self._state, packed, shape=shape)
            ids = []
            for blocks, data in fetches:
                state, found = self.steps.fetch(state, data, np.int32(len(blocks)))
                ids.append(found)
            fetched = [blocks for blocks, _ in fetches]
            for leaf in jax.tree.leaves((output, copies, ids)):
                leaf.copy_to_host_async()
            with self._all_or_failure():
                self._started(planned, begun)
                self._in_flight.append(_InFlight(planned, output, stored, copies, fetched, ids, begun, traces))
                self._planned, self._state = None, state
        return True

    def prepare_swap(self) -> None:
        """Compiles the way to the host and back, and times it; nothing, if that is done, or nobody would go it.

        Every engine does so once memory gets short, and when it warms up.
        """
        wanted = self.config.preemption_mode != "recompute" and self.config.enable_prefix_caching
        if wanted and self.swapper.costs.move is None:
            with self._failing_without_a_state():
                self._state = self.swapper.measure(self._state)

    def _started(self, planned: Schedule, now: float) -> None:
        for one in planned.started:
            metrics = one.sequence.key.request.metrics
            if metrics.started is None:
                metrics.started = now
                metrics.num_cached_tokens = len(one.block_ids) * self.config.block_size
        for group in planned.paused:
            if group.sequences:
                group.sequences[0].key.request.metrics.preemptions += 1

    def _failing_without_a_state(self) -> Telling:
        """For calls of steps: an interrupt between one and its assignment leaves the state donated, and no other."""

        def fail(error: BaseException) -> None:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
                self.failure = error

        return Telling(fail)

    def _all_or_failure(self) -> Telling:
        """For what changes the books, or tells requests: half of it is no state to go on from."""

        def fail(error: BaseException) -> None:
            self.failure = self.failure or error

        return Telling(fail)

    def _harvest(self) -> None:
        record = self._in_flight[0]
        output, ids = jax.device_get((record.output, record.fetched_ids))  # waits: an interrupt here loses nothing
        jax.block_until_ready(record.copies)
        with self._all_or_failure():
            self._in_flight.popleft()
            self.swapper.take(record.stored, record.copies)
            self.swapper.arrived(record.fetched, ids)
            self._changed += self._read(record, output)

    def _read(self, record: _InFlight, output: step.StepOutput) -> list[AnySample]:
        now = self._clock()
        changed = self._reader.read(record.schedule, output, now)
        made = int(output.made_KR.sum())
        over = [sample for sample in changed if sample.finish_reason is not None]
        self.scheduler.finish(*(self._sequences.pop(sample) for sample in over))
        for request in {sample.request: None for sample in over}:
            if request.finished:
                self._finished(request)
        self.stats.record(
            record.schedule, self.scheduler, made, int(output.num_free), int(output.num_tokens), int(output.num_seqs)
        )
        compiled = self.steps.traces.total() > record.traces  # and somebody waited for that
        if record.schedule.prefills_R.any() and not compiled:
            self.swapper.costs.computed(int(record.schedule.counts_R.sum()), now - max(self._read_at, record.begun))
        self._read_at = now
        return changed

    def _finished(self, request: AnyRequest) -> None:
        metrics, samples = request.metrics, request.samples
        assert metrics is not None
        metrics.tokens = sum(len(sample.token_ids) for sample in samples)
        metrics.first_token = min((s.first_token for s in samples if s.first_token is not None), default=None)
        metrics.last_token = max((s.last_token for s in samples if s.last_token is not None), default=None)
        self.stats.finished(metrics, len(samples))


class Telling:
    """Tells of the exception that leaves its block. Not a generator: one that an interrupt keeps from its block would
    take it for an exception when it is dropped."""

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[BaseException], None]):
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._tell(error)
