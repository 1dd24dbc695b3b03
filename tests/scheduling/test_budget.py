"""The bound on free blocks, by hand and against a device that is simulated with real lengths."""

import random

import numpy as np

from jpaged import budget
from jpaged.budget import blocks_for

NOBODY = np.empty(0, np.int64)


def test_the_bound_counts_what_is_in_flight():
    b = budget.create(num_blocks=10, block_size=4, num_slots=2)
    assert b.free == 10
    b = b.dispatch(0, [], np.array([0]), np.array([9]))  # 9 tokens: 3 blocks, not read yet
    assert b.free == 7
    b = b.dispatch(1, [], np.array([0, 1]), np.array([13, 4]))  # one more, and one for the other
    assert b.free == 5
    b = b.harvest(0, 7, np.array([0]), np.array([9]))  # the first step took its 3
    assert b.free == 5
    b = b.harvest(1, 6, np.array([0, 1]), np.array([12, 4]))  # the second took one less than it might have
    assert b.free == 5, "a bound of 13 tokens still stands until the next dispatch"


def test_what_a_step_frees_comes_back_with_its_dispatch():
    b = budget.create(num_blocks=4, block_size=4, num_slots=1)
    b = b.dispatch(0, [], np.array([0]), np.array([8]))
    b = b.harvest(0, 2, np.array([0]), np.array([8]))
    b = b.dispatch(1, [0], NOBODY, NOBODY)
    assert b.free == 4
    assert b.harvest(1, 4, NOBODY, NOBODY).free == 4


def test_promised_is_what_present_sequences_may_still_take():
    b = budget.create(num_blocks=10, block_size=4, num_slots=2).dispatch(0, [], np.array([0]), np.array([5]))
    assert b.promised(np.array([17, 0])) == 3  # 17 tokens are 5 blocks, 5 tokens are 2


def test_never_above_the_truth_whatever_a_device_does():
    """Random steps, read up to three late; sequences grow by anything up to their bound, end early, and are freed."""
    for seed in range(300):
        rng = random.Random(seed)
        size, total = rng.choice([1, 3, 16]), 200
        b = budget.create(total, size, 4)
        lengths, in_flight = [0] * 4, []
        for step in range(40):
            freed = [s for s in range(4) if b.bound_S[s] and rng.random() < 0.2]
            slots = [s for s in range(4) if rng.random() < 0.7]
            grown_to = np.array([(0 if s in freed else int(b.bound_S[s])) + rng.randint(1, 9) for s in slots], np.int64)
            b = b.dispatch(step, freed, np.array(slots, np.int64), grown_to)
            for s in freed:
                lengths[s] = 0
            for s, bound in zip(slots, grown_to.tolist(), strict=True):
                lengths[s] = rng.randint(lengths[s], bound)
            used = sum(int(blocks_for(np.int64(n), size)) for n in lengths)
            in_flight.append((step, total - used, list(lengths), set(freed)))
            assert b.free <= total - used
            while in_flight and (len(in_flight) > 3 or rng.random() < 0.5):
                number, num_free, read, _ = in_flight.pop(0)
                same = [s for s in range(4) if not any(s in later[3] for later in in_flight)]
                b = b.harvest(number, num_free, np.array(same, np.int64), np.array([read[s] for s in same], np.int64))
                assert b.free <= total - used
