"""Times of the scheduler and of the prefix cache, by themselves: no requests, no plans, no device."""

from __future__ import annotations

import statistics
import time

import numpy as np

from jpaged.groups import Group, Sequence
from jpaged.prefix import Block, Chain, PrefixCache
from jpaged.schedule import StepLimits
from jpaged.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_LEN = 64
STARTS = 8  # in a step


def schedule_seconds(running: int, waiting: int, steps: int) -> float:
    """Seconds in which a step is planned and the blocks that it filled are booked, with so many sequences decoding and
    so many that wait; the median of so many steps."""
    pool = 4 * running * -(-(PROMPT_LEN + steps) // BLOCK_SIZE)
    limits = StepLimits(running + STARTS * PROMPT_LEN, STARTS, pool, decode_steps=1, cache_changes=pool)
    scheduler = Scheduler(running, pool, BLOCK_SIZE, limits, PrefixCache(retains=True))
    rng, most = np.random.default_rng(0), PROMPT_LEN + steps + -(-running // STARTS)  # until the last has begun
    for number in range(running + waiting):
        group = Group(rank=(number,), fork_len=PROMPT_LEN)
        chain = Chain(BLOCK_SIZE)
        chain.extend(rng.integers(0, 1000, most).tolist())  # tokens to come included, for hashing them is not timed
        group.sequences.append(Sequence(None, group, chain, PROMPT_LEN, PROMPT_LEN + 10**6))
        scheduler.submit(group)
    ids, found = iter(range(10**9)), []
    while len(found) < steps:
        begin = time.perf_counter()
        planned = scheduler.schedule(in_flight=False)
        seconds = time.perf_counter() - begin
        assert planned is not None
        for sequence, count in zip(planned.sequences, planned.counts_R.tolist(), strict=True):
            first = sequence.kv_len
            sequence.kv_len += count
            filled = sequence.kv_len // BLOCK_SIZE - first // BLOCK_SIZE
            if filled:
                begin = time.perf_counter()
                scheduler.filled(sequence, first // BLOCK_SIZE, [next(ids) for _ in range(filled)])
                seconds += time.perf_counter() - begin
            if sequence.kv_len == PROMPT_LEN:
                scheduler.computed(sequence)
        if planned.decodes_only and len(planned.sequences) == running:
            found.append(seconds)
    return statistics.median(found)


def lookup_seconds(tokens: int, repeats: int) -> float:
    """Seconds in which a prompt of so many tokens is hashed, and found in a cache that has all of it; the median."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, tokens).tolist()
    cache, chain = PrefixCache(retains=True), Chain(BLOCK_SIZE)
    chain.extend(prompt)
    held: list[Block] = []
    cache.add(range(len(chain)), chain, held)
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        again = Chain(BLOCK_SIZE)
        again.extend(prompt)
        hits, _, _ = cache.find(again, len(again))
        found.append(time.perf_counter() - begin)
        assert len(hits) == len(chain)
    return statistics.median(found)
