"""The scheduler by hand, and random traffic against a simulated device: nothing starves, nothing overflows."""

import random

import numpy as np
import pytest

from jpaged import budget as budgets
from jpaged import scheduler
from jpaged.budget import blocks_for
from jpaged.scheduler import Limits, Sequence

LIMITS = Limits(tokens=8, admissions=2, decode_steps=4)


def start(*sequences, slots=3, blocks=100, block_size=4):
    queue = scheduler.submit(scheduler.create(slots), tuple(Sequence(*each) for each in sequences))
    return queue, budgets.create(blocks, block_size, slots)


def test_prompts_come_in_chunks_within_the_token_budget():
    queue, budget = start(("a", 11, 20), ("b", 2, 9))
    queue, budget, first = scheduler.schedule(queue, budget, LIMITS, 0)
    assert (first.slots_R.tolist(), first.counts_R.tolist(), first.samples_R.tolist()) == ([0], [8], [False])
    queue, budget, second = scheduler.schedule(queue, budget, LIMITS, 1)
    assert (second.slots_R.tolist(), second.counts_R.tolist()) == ([0, 1], [3, 2])
    assert second.starts_R.tolist() == [8, 0] and second.samples_R.tolist() == [True, True]
    queue, budget, third = scheduler.schedule(queue, budget, LIMITS, 2)
    assert third.decodes_only and third.steps == 4 and third.slots_R.tolist() == [0, 1]
    assert budget.bound_S.tolist() == [15, 6, 0]


def test_running_sequences_go_along_with_a_newcomers_prompt():
    queue, budget = start(("a", 2, 9))
    queue, budget, _ = scheduler.schedule(queue, budget, LIMITS, 0)
    queue = scheduler.submit(queue, (Sequence("b", 20, 25),))
    _, budget, mixed = scheduler.schedule(queue, budget, LIMITS, 1)
    assert mixed.slots_R.tolist() == [1, 0] and mixed.counts_R.tolist() == [7, 1]
    assert mixed.prefills_R.tolist() == [True, False] and mixed.samples_R.tolist() == [False, True]
    assert mixed.steps == 1 and budget.bound_S.tolist() == [3, 7, 0]


def test_first_come_first_served_even_if_a_later_one_would_fit():
    queue, budget = start(("a", 4, 30), ("big", 4, 17), ("small", 1, 1), blocks=12)
    queue, budget, first = scheduler.schedule(queue, budget, LIMITS, 0)  # a may need 8 of 12 blocks, big 5
    assert [sequence.key for _, sequence in first.admitted] == ["a"]
    assert [sequence.key for sequence in queue.waiting] == ["big", "small"]


def test_the_last_token_of_a_sequence_needs_no_step():
    queue, budget = start(("a", 5, 5))  # one output token: the prefill makes it
    queue, budget, _ = scheduler.schedule(queue, budget, LIMITS, 0)
    assert scheduler.schedule(queue, budget, LIMITS, 1)[2] is None


def test_a_slot_is_freed_and_given_on_in_the_same_step():
    queue, budget = start(("a", 4, 8), ("b", 4, 8), slots=1, blocks=2)
    queue, budget, _ = scheduler.schedule(queue, budget, LIMITS, 0)
    assert scheduler.schedule(queue, budget, LIMITS, 1)[2].decodes_only
    budget = budget.harvest(0, 1, np.array([0]), np.array([4]))
    queue, budget, step = scheduler.schedule(scheduler.finish(queue, [0]), budget, LIMITS, 1)
    assert step.freed == (0,) and [s.key for _, s in step.admitted] == ["b"]


def test_withdrawn_before_it_ran():
    queue, _ = start(("a", 4, 8), ("b", 4, 8))
    assert [s.key for s in scheduler.withdraw(queue, {"a"}).waiting] == ["b"]
    assert scheduler.withdraw(queue, {"a", "b"}).is_idle


@pytest.mark.parametrize("late", [0, 1, 2])
def test_random_traffic_never_overflows_the_pool_and_always_ends(late):
    """The device: sequences end early at random; steps are read ``late`` steps after they were dispatched."""
    for seed in range(60):
        rng = random.Random(seed)
        block_size, slots = rng.choice([1, 4, 16]), rng.randint(1, 4)
        blocks = rng.randint(-(-40 // block_size), 3 * -(-40 // block_size))
        limits = Limits(tokens=rng.randint(slots, 12), admissions=2, decode_steps=rng.choice([1, 5]))
        queue, budget = scheduler.create(slots), budgets.create(blocks, block_size, slots)
        todo = []
        for key in range(15):
            prompt = rng.randint(1, 30)
            todo.append(Sequence(key, prompt, rng.randint(prompt, 40)))
        queue = scheduler.submit(queue, tuple(todo))
        length, over, finished, in_flight, step = [0] * slots, [False] * slots, [], [], 0
        while not queue.is_idle or in_flight:
            queue, budget, planned = scheduler.schedule(queue, budget, limits, step)
            if planned is not None:
                for slot in planned.freed:
                    length[slot], over[slot] = 0, False
                rows = list(
                    zip(planned.slots_R.tolist(), planned.counts_R.tolist(), planned.prefills_R.tolist(), strict=True)
                )
                assert sum(count for _, count, _ in rows) <= limits.tokens
                for slot, count, prefills in rows:
                    limit = int(queue.limit_S[slot])
                    if not over[slot]:
                        length[slot] = min(limit, length[slot] + (count if prefills else planned.steps))
                        done_early = length[slot] >= queue.prompt_S[slot] and rng.random() < 0.1
                        over[slot] = length[slot] >= limit or done_early
                used = sum(int(blocks_for(np.int64(n), block_size)) for n in length)
                assert used <= blocks and budget.free <= blocks - used
                keys = [queue.running[slot] for slot, _, _ in rows]
                in_flight.append((step, blocks - used, rows, keys, list(length), list(over)))
                step += 1
            while in_flight and (len(in_flight) > late or planned is None):
                number, num_free, rows, keys, read, ended = in_flight.pop(0)
                alive = [(slot, key) for (slot, _, _), key in zip(rows, keys, strict=True) if key.key not in finished]
                budget = budget.harvest(
                    number,
                    num_free,
                    np.array([s for s, _ in alive], np.int64),
                    np.array([read[s] for s, _ in alive], np.int64),
                )
                gone = [(slot, key) for slot, key in alive if ended[slot]]
                finished += [key.key for _, key in gone]
                queue = scheduler.finish(queue, [slot for slot, _ in gone])
            assert step < 2000
        assert sorted(finished) == list(range(15))
        assert budget.free == blocks
