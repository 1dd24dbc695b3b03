"""The scheduler by hand, against a device in plain Python: nothing starves, overflows, differs."""

import random
from typing import Any
from unittest import mock

import pytest

from tests.scheduling.device import Sample, Server


def server(**changes: Any) -> Server:
    return Server(**{"slots": 3, "blocks": 100, "block_size": 4, "tokens": 8, "decode_steps": 4, **changes})


def finish(server: Server, late: int = 1, most: int = 3000) -> None:
    for _ in range(most):
        if not server.busy:
            return
        server.step(late)
    pytest.fail("it does not end")


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 200), k=length)


def assert_right(*samples: Sample) -> None:
    for sample in samples:
        assert sample.over == "length" and sample.tokens == sample.expected


def prefilled(server: Server) -> int:
    return sum(int(plan.counts_R[plan.prefills_R].sum()) for plan in server.plans)


def test_prompts_come_in_chunks_within_the_token_budget():
    one = server()
    one.submit(text(11, 1), 10)
    one.submit(text(2, 2), 8)
    for _ in range(3):
        one.step()
    first, second, third = one.plans
    assert (first.slots_R.tolist(), first.counts_R.tolist(), first.samples_R.tolist()) == ([0], [8], [False])
    assert (second.slots_R.tolist(), second.counts_R.tolist()) == ([0, 1], [3, 2])
    assert second.starts_R.tolist() == [8, 0] and second.samples_R.tolist() == [True, True]
    assert third.decodes_only and third.steps == 4 and third.slots_R.tolist() == [0, 1]
    assert one.scheduler.ledger.bound_S.tolist() == [15, 6, 0]


def test_running_sequences_go_along_with_a_newcomers_prompt():
    one = server()
    one.submit(text(2, 1), 8)
    one.step()
    one.submit(text(20, 2), 6)
    one.step()
    mixed = one.plans[1]
    assert mixed.slots_R.tolist() == [1, 0] and mixed.counts_R.tolist() == [7, 1]
    assert mixed.prefills_R.tolist() == [True, False] and mixed.samples_R.tolist() == [False, True]
    assert mixed.steps == 1 and one.scheduler.ledger.bound_S.tolist() == [3, 7, 0]


def test_one_step_at_a_time_while_somebody_waits():
    one = server(slots=1)
    one.submit(text(2, 1), 8)
    one.submit(text(2, 2), 8)
    one.step()
    one.step()
    assert one.plans[1].decodes_only and one.plans[1].steps == 1


def test_first_come_first_served_even_if_a_later_one_would_fit():
    one = server(blocks=6)
    one.submit(text(8, 1), 17)
    one.submit(text(16, 2), 4)
    one.submit(text(1, 3), 1)
    one.step()
    assert [start.slot for start in one.plans[0].started] == [0]
    assert len(one.scheduler.waiting) == 2


def test_ranks_go_before_arrival():
    one = server(slots=1)
    later, sooner = one.submit(text(4, 1), 2, rank=1), one.submit(text(4, 2), 2, rank=0)
    one.step()
    assert one.plans[0].sequences[0].key is sooner[0]
    finish(one)
    assert_right(*later, *sooner)


def test_the_last_token_of_a_sequence_needs_no_step():
    one = server()
    one.submit(text(5), 1)
    one.step()
    one.step()
    assert len(one.plans) == 1


def test_a_slot_is_freed_and_given_on_in_the_same_step():
    one = server(slots=1, blocks=2)
    one.submit(text(4, 1), 2)
    one.submit(text(4, 2), 2)
    finish(one)
    (step,) = [plan for plan in one.plans if plan.freed and plan.started]
    assert step.freed == (0,) and step.started[0].slot == 0


def test_withdrawn_before_it_ran():
    one = server()
    first, second = one.submit(text(4, 1), 4), one.submit(text(4, 2), 4)
    one.abort(first)
    finish(one)
    assert first[0].tokens == []
    assert_right(*second)
    last = one.submit(text(4, 3), 4)
    one.abort(last)
    assert one.scheduler.is_idle


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_prompt_that_another_computes_is_waited_for_and_never_computed_again(late: int):
    one = server(tokens=16, slots=4)
    prompt = text(40)
    samples = [one.submit(prompt + text(3, seed), 5)[0] for seed in range(1, 5)]
    finish(one, late)
    assert_right(*samples)
    assert prefilled(one) == 40 + 4 * 3
    assert one.hit_tokens == 3 * 40


def test_who_waits_for_a_prompt_is_overtaken():
    one = server(tokens=8)
    first, second = one.submit(text(6), 5), one.submit(text(6), 5)
    third = one.submit(text(2, 9), 1)
    one.step()
    assert [sequence.key for sequence in one.plans[0].sequences] == [*first, *third]
    assert [group.sequences[0].key for group in one.scheduler.waiting] == second
    finish(one)
    assert_right(*first, *second, *third)


def test_a_prompt_of_whole_blocks_sent_twice_computes_its_last_block_again():
    one = server()
    first = one.submit(text(12), 5)
    finish(one)
    second = one.submit(text(12), 5)
    finish(one)
    assert_right(*first, *second)
    assert prefilled(one) == 12 + 4


def test_three_identical_prompts_of_which_the_second_ends_first():
    one = server()
    samples = [one.submit(text(13), max_tokens)[0] for max_tokens in (20, 2, 30)]
    finish(one)
    assert_right(*samples)
    assert prefilled(one) == 13 + 1 + 1


def test_what_was_generated_is_found_too():
    one = server()
    (first,) = one.submit(text(5), 12)
    finish(one)
    (second,) = one.submit(first.text, 3)
    finish(one)
    assert_right(first, second)
    assert prefilled(one) == 5 + 1  # of 17 tokens 16 were in full blocks


def test_the_salt_keeps_texts_apart():
    one = server(retains=False)  # a salt for each request
    samples = one.submit(text(12), 5) + one.submit(text(12), 5)
    finish(one)
    assert_right(*samples)
    assert one.hit_tokens == 0 and one.device.used == 0


def test_collisions_cost_time_and_nothing_else():
    one = server(hash=lambda data: b"the same")
    samples = [one.submit(text(13, seed), 6)[0] for seed in (1, 2, 1)]
    finish(one)
    assert_right(*samples)


def test_twins_share_their_prompt_and_copy_its_last_block():
    one = server(tokens=16, slots=3)
    samples = one.submit(text(14), 6, n=3)
    one.step(late=0)
    assert one.device.used == 4 and one.plans[0].sources_R.tolist() == [0, 0, 0]
    one.step(late=0)
    assert one.device.used == 3 + 3 * 2
    finish(one)
    assert_right(*samples)
    assert prefilled(one) == 14


def test_the_last_in_rank_pauses_with_all_its_twins():
    one = server(slots=4, blocks=12)
    first, second = one.submit(text(8, 1), 17), one.submit(text(6, 2), 17, n=3)
    finish(one)
    assert_right(*first, *second)
    assert one.preemptions >= 1
    started = [start.sequence.key for plan in one.plans for start in plan.started]
    assert started.count(first[0]) == 1 and all(started.count(sample) >= 1 for sample in second)


def test_nobody_pauses_while_a_step_is_in_flight():
    one = server(slots=2, blocks=6)
    samples = one.submit(text(7, 1), 14) + one.submit(text(7, 2), 14)
    pause, seen = one.scheduler._pause, []
    with mock.patch.object(one.scheduler, "_pause", lambda group: (seen.append(len(one.in_flight)), pause(group))[1]):
        finish(one)
    assert_right(*samples)
    assert seen and not any(seen)


def test_a_group_that_does_not_fit_together_goes_on_one_after_another():
    one = server(slots=3, blocks=6)
    samples = one.submit(text(6), 18, n=3)
    finish(one)
    assert_right(*samples)


def test_aborted_while_a_step_is_in_flight():
    one = server()
    first, second = one.submit(text(4, 1), 20), one.submit(text(4, 2), 20)
    one.step()
    one.step()
    assert len(one.in_flight) == 1
    one.abort(first)
    third = one.submit(text(4, 3), 5)
    finish(one)
    assert_right(*second, *third)
    assert len(first[0].tokens) < 20


def test_the_least_recently_used_goes_first_and_ends_before_beginnings():
    one = server(blocks=8, slots=1)
    for seed in (1, 2):
        one.submit(text(12, seed), 1)
        finish(one)
    one.submit(text(9, 1), 1)
    finish(one)
    one.submit(text(16, 3), 1)  # needs four, two are free
    finish(one)
    hits = one.hit_tokens
    for seed, found in ((1, 8), (2, 4)):
        one.submit(text(9, seed), 1)
        one.step(late=0)
        assert one.hit_tokens - hits == found
        hits = one.hit_tokens
        finish(one)


def test_what_has_to_go_while_it_is_wanted_comes_back_from_the_host():
    computed = {}
    for room in (0, 100):
        one = server(slots=2, blocks=11, room=room)
        samples = one.submit(text(8, 1), 30) + one.submit(text(21, 2), 12)
        finish(one)
        assert_right(*samples)
        assert one.preemptions >= 1 and (one.fetched > 0) == (room > 0)
        computed[room] = prefilled(one)
    assert computed[100] < computed[0]


def test_those_who_have_paused_do_not_take_their_blocks_from_each_other():
    """Once the first is gone nobody runs, and no two of the others fit together."""
    one = server(slots=4, blocks=15, block_size=2, tokens=24, decode_steps=1, room=100, cache_changes=4)
    samples = []
    for seed, (length, most, rank, steps) in enumerate(
        ((20, 10, 1, 4), (26, 5, 1, 1), (18, 6, 1, 3), (11, 11, 1, 2), (5, 16, 1, 0), (2, 10, 0, 17))
    ):
        samples += one.submit(text(length, seed), most, rank=rank)
        for _ in range(steps):
            one.step()
    one.abort(samples[:1])
    finish(one)
    assert_right(*samples[1:])
    assert one.fetched


def test_who_is_aborted_after_it_has_paused_leaves_nothing_on_the_host():
    one = server(slots=2, blocks=11, room=100)
    first, second = one.submit(text(8, 1), 30), one.submit(text(21, 2), 12)
    while not one.cache.stored:
        one.step()
    one.abort(second)
    finish(one)
    assert_right(*first)
    assert one.cache.stored == 0 and not one.device.host


def test_what_waits_for_its_blocks_is_overtaken():
    one = server(slots=2, blocks=11, room=100)
    samples = one.submit(text(8, 1), 30) + one.submit(text(21, 2), 12)
    while not any(plan.fetches for plan in one.plans):
        one.step()
    samples += one.submit(text(1, 3), 1)
    finish(one)
    assert_right(*samples)
    assert samples[2].over == "length"


def test_beams_go_on_from_each_other_and_share_what_they_have_in_common():
    one = server(slots=3, decode_steps=1)
    samples = one.submit(text(10), 9, n=3, beams=True)
    used = []
    while one.busy:
        one.step()
        used.append(one.device.used)
    assert_right(*samples)
    assert 5 < max(used) < 3 * 5 and one.plans[0].steps == 1
    assert all(len(plan.beams) == 1 for plan in one.plans[1:] if len(plan.sequences))


def test_beams_that_paused_go_on_from_where_they_were():
    one = server(slots=4, blocks=12)
    first = one.submit(text(7, 1), 24)
    second = one.submit(text(9, 2), 12, n=3, beams=True)
    finish(one)
    assert_right(*first, *second)
    assert one.preemptions >= 1
    assert any(not plan.samples_R[plan.sources_R != range(len(plan.sources_R))].all() for plan in one.plans)


def test_beams_end_together_when_they_are_aborted():
    one = server(slots=4)
    beams, other = one.submit(text(9, 1), 20, n=3, beams=True), one.submit(text(5, 2), 12)
    for _ in range(4):
        one.step()
    one.abort(beams)
    finish(one)
    assert_right(*other)
    assert one.device.used == one.cache.idle and one.scheduler.ledger.saved == 0


def test_two_that_paused_and_fit_only_one_at_a_time_both_end():
    """Found by random programs: each of two fetched the blocks that the other had just fetched."""
    one = server(slots=3, blocks=17, block_size=2, tokens=8, decode_steps=4, room=1000)
    samples = one.submit(text(17, 1), 7, n=3, rank=1) + one.submit(text(6, 2), 18)
    samples += one.submit(text(20, 3), 4, n=2, ends=3)
    finish(one, late=2, most=500)
    for sample in samples:
        assert sample.tokens == sample.expected
