"""Counters of a run, worked by hand."""

import dataclasses

import numpy as np
import pytest

from jpaged.groups import Group, Sequence
from jpaged.outputs import RequestMetrics
from jpaged.prefix import Chain, PrefixCache
from jpaged.schedule import Schedule, Start, StepLimits
from jpaged.scheduler import Scheduler
from jpaged.stats import Spread, Stats

NOTHING = Schedule(
    keeps=(),
    freed=(),
    drops=(),
    stores=(),
    fetches=(),
    started=(),
    sequences=(),
    slots_R=np.zeros(0, int),
    starts_R=np.zeros(0, int),
    counts_R=np.zeros(0, int),
    sources_R=np.zeros(0, int),
    prefills_R=np.zeros(0, bool),
    samples_R=np.zeros(0, bool),
    steps=1,
)
START = Start(Sequence("somebody", Group((0.0,)), Chain(4), 9, 12), 0, (3, 4))


def schedule(counts: list[int], prefills: list[bool], **more) -> Schedule:
    return dataclasses.replace(NOTHING, counts_R=np.array(counts), prefills_R=np.array(prefills), **more)


@pytest.fixture
def scheduler() -> Scheduler:
    limits = StepLimits(tokens=8, starts=1, attached=10, decode_steps=1, cache_changes=1)
    return Scheduler(2, 10, 4, limits, PrefixCache(retains=True))


def test_tokens_blocks_and_sequences_by_hand(scheduler: Scheduler):
    stats = Stats(block_size=4, num_blocks=10)
    assert stats.kv_share == 1.0 and stats.hit_share == 0.0
    first = schedule([5, 1], [True, False], started=(START,), drops=(7, 8), paused=(START.sequence.group,))
    stats.record(first, scheduler, 2, num_free=7, num_tokens=8, num_seqs=2)
    stats.record(schedule([1], [False]), scheduler, 3, num_free=8, num_tokens=8, num_seqs=1)
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (5, 5, 2)
    assert (stats.blocks_peak, stats.sequences_peak) == (3, 2)
    assert (stats.hit_tokens, stats.evictions, stats.preemptions) == (8, 2, 1)
    assert stats.hit_share == 8 / 13
    assert stats.kv_share == (8 + 8) / (3 * 4 + 2 * 4)
    assert stats.last is not None and (stats.last.blocks_used, stats.last.decode_tokens, stats.last.waiting) == (
        2,
        3,
        0,
    )
    stats.reset()
    assert stats == Stats(block_size=4, num_blocks=10)


def test_times_of_requests_by_hand():
    stats = Stats(block_size=4, num_blocks=10)
    stats.finished(RequestMetrics(10.0, started=11.0, first_token=13.0, last_token=19.0, tokens=8), num_samples=2)
    stats.finished(RequestMetrics(10.0, started=10.5, first_token=11.0, last_token=11.0, tokens=1), num_samples=1)
    stats.finished(RequestMetrics(10.0), num_samples=1)  # aborted while it waited
    assert stats.queue == Spread(2, 1.5, 1.0) and stats.queue.mean == 0.75
    assert stats.first_token == Spread(2, 4.0, 3.0)
    assert stats.inter_token == Spread(1, 2.0, 2.0)  # 6 seconds, 4 tokens a sample
    assert Spread().mean is None
