"""The paged engine and the contiguous baseline on a tiny model: the same tokens, as many as were asked for."""

import gc
import time
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from jpaged.llm import LLM
from scripts.benchmarks import contiguous, paged, turns, workloads
from scripts.benchmarks.contiguous import StaticBatches
from scripts.benchmarks.results import Results, Setting
from scripts.benchmarks.workloads import Case, Workload
from scripts.common import usage
from tests.models_tiny import few_shapes, golden, tiny

# Two slots and prompts on both sides of a padding multiple, so that batches are padded and end at different times.
CASE = Case("", 5, (3, 40), (1, 12), 2)
SETTINGS = {
    "dtype": "float32",
    "num_blocks": 24,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_steps": 3,
    "max_model_len": 96,
}

pytestmark = pytest.mark.xdist_group("bench_engines")  # two engines for all


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("llama"), **SETTINGS)


@pytest.fixture(scope="module")
def static() -> StaticBatches:
    return StaticBatches(tiny("llama"), slots=2, max_len=112, dtype="float32", decode_steps=3)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return workloads.synthetic(CASE, vocab_size=320, seed=1)


def test_the_baseline_gives_the_reference_tokens(static: StaticBatches):
    cases = golden("llama", "golden_float32")
    prompts = tuple(tuple(case["prompt"]) for case in cases)
    run = static.run(Workload(prompts, tuple(len(case["greedy"]) for case in cases), 2))
    assert [one.tokens for one in run.served] == [case["greedy"] for case in cases]


@pytest.mark.one_python
def test_both_give_the_same_tokens(llm: LLM, static: StaticBatches, workload: Workload):
    ours, theirs = paged.run(llm, workload), static.run(workload)
    assert [len(one.tokens) for one in ours.served] == list(workload.outputs)
    assert [one.tokens for one in ours.served] == [one.tokens for one in theirs.served]


def test_a_run_knows_what_it_used(llm: LLM, workload: Workload):
    paged.run(llm, workload)
    run = paged.run(llm, workload)
    assert run.output_tokens == workload.output_tokens
    assert run.blocks_peak is not None and 1 <= run.blocks_peak <= 2 * -(-workload.longest // 16)
    assert run.kv_share is not None and 0 < run.kv_share <= 1
    assert run.prefill_rate and run.decode_rate
    assert all(one.deltas[-1][0] <= run.seconds for one in run.served)


@pytest.mark.one_python
def test_a_run_keeps_nothing_of_its_engine(workload: Workload):
    """Its KV may be a gigabyte, and the next case has an engine of its own."""
    llm = few_shapes(LLM(tiny("llama"), **SETTINGS))
    paged.run(llm, workload)
    engine = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert engine() is None


def test_requests_that_come_together_are_added_together(llm: LLM, workload: Workload, monkeypatch: pytest.MonkeyPatch):
    """Each call copies the queue, so that many calls for many requests would take the time of their square."""
    calls, add = [], llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda *added: (calls.append(len(added)), add(*added))[1])
    paged.run(llm, workload)
    paged.step_seconds(llm, [[1] * 20, [2] * 20], steps=6)
    assert calls == [5, 2]


def test_requests_wait_for_their_arrival(llm: LLM, static: StaticBatches, workload: Workload):
    arrivals = [0.0, 0.0, 0.1, 0.2, 0.3]
    for run in (paged.run(llm, workload, arrivals=arrivals), static.run(workload, arrivals)):
        assert [one.arrival for one in run.served] == arrivals
        assert min(run.ttft) > 0
        assert run.seconds > 0.3


def test_a_batch_is_who_has_come(static: StaticBatches, workload: Workload, monkeypatch: pytest.MonkeyPatch):
    """On a clock of its own: who has come is a question of time, and a busy machine's would answer it otherwise."""
    clock, sizes = _Clock(), []

    def run_batch(prompts, outputs, served, begin):
        sizes.append(len(prompts))
        clock.sleep(0.5)
        for one in served:
            one.receive(clock.now, [0])
        return 0.2, 0.3

    monkeypatch.setattr(contiguous, "time", clock)
    monkeypatch.setattr(static, "run_batch", run_batch)
    static.run(workload, [0.0, 0.0, 0.0, 2.0, 2.1])
    assert sizes == [2, 1, 1, 1]
    sizes.clear()
    static.run(workload, [0.0, 0.1, 0.2, 0.3, 0.4])
    assert sizes == [1, 2, 2]


class _Clock:
    """What the baseline uses of `time`, on which nothing takes time but what says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_nothing_compiles_after_the_baselines_warmup(workload: Workload):
    static = StaticBatches(tiny("llama"), slots=2, max_len=workload.longest, dtype="float32", decode_steps=3)
    static.warmup(workload)
    with turns.nothing_compiles():
        static.run(workload, [0.0, 0.0, 0.01, 0.02, 0.03])


def test_compiling_in_a_timed_run_is_noticed(no_executable_cache: Iterator[None]):
    with pytest.raises(RuntimeError, match="compiled in a timed run"), turns.nothing_compiles():
        jax.jit(lambda x: x + time.time())(1.0)


def test_nobody_listens_afterwards(no_executable_cache: Iterator[None]):
    with usage.compiled() as found:
        jax.jit(lambda x: x + time.time())(1.0)
    heard = len(found)
    jax.jit(lambda x: x - time.time())(1.0)
    assert len(found) == heard > 0


def test_taking_turns(llm: LLM, workload: Workload):
    results, done = Results(setting(), workload), []
    turns.throughput(results, llm, None, 2, lambda: done.append(1))
    assert (len(results.paged), len(results.baseline), len(done)) == (2, 2, 6)


def test_sampled_runs_are_sampled(llm: LLM, workload: Workload):
    results = Results(setting(), workload)
    sampled = turns.sampling(results, llm, 1, lambda: None)
    assert sampled[0].output_tokens == results.paged[0].output_tokens
    assert [one.tokens for one in sampled[0].served] != [one.tokens for one in results.paged[0].served]


def test_a_step_is_timed_with_everybody_in_it(llm: LLM):
    assert 0 < paged.step_seconds(llm, [[1] * 20, [2] * 20], steps=6) < 10
    assert not llm.engine.has_work


def test_a_model_whose_scores_are_nan_is_refused(workload: Workload):
    loaded = tiny("llama")
    embed = {"weight": jnp.full_like(loaded.weights["embed"]["weight"], jnp.nan)}
    sick = LLM(loaded._replace(weights={**loaded.weights, "embed": embed}), **SETTINGS)
    with pytest.raises(ValueError, match=r"nothing can be measured.*not finite"):
        paged.run(sick, workload)
    assert not sick.engine.has_work
    with pytest.raises(ValueError, match=r"nothing can be measured.*not finite"):
        paged.step_seconds(sick, [[1] * 20, [2] * 20], steps=6)
    assert not sick.engine.has_work


def setting() -> Setting:
    return Setting("mixed", "llama", "xla", "float32", "0", "cpu", 2)
