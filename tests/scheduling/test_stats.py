"""Counters of a run, worked by hand."""

import numpy as np

from jpaged.scheduler import Schedule
from jpaged.stats import Stats


def schedule(counts: list[int], prefills: list[bool]) -> Schedule:
    rows = np.arange(len(counts))
    marks = np.array(prefills)
    return Schedule((), (), rows, np.zeros(len(counts), int), np.array(counts), marks, np.ones_like(marks), 1)


def test_tokens_blocks_and_sequences_by_hand():
    stats = Stats(block_size=4, num_blocks=10)
    assert stats.kv_share == 1.0
    stats.record(schedule([5, 1], [True, False]), [1, 1], num_free=7, num_tokens=8, num_seqs=2)
    stats.record(schedule([1], [False]), [3], num_free=8, num_tokens=8, num_seqs=1)
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (5, 5, 2)
    assert (stats.blocks_peak, stats.sequences_peak) == (3, 2)
    assert stats.kv_share == (8 + 8) / (3 * 4 + 2 * 4)
    stats.reset()
    assert stats == Stats(block_size=4, num_blocks=10)
