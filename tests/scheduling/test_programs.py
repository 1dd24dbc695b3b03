"""Random programs against a device in plain Python: nothing starves, overflows or differs."""

import random

import pytest

from jpaged.prefix import sha256
from tests.scheduling.device import Server
from tests.scheduling.test_scheduler import assert_right, finish, text


def random_program(seed: int, block_size: int, steps: int) -> Server:
    """Submits, forks, aborts, hits, evictions and pauses over a pool that is small."""
    rng = random.Random(seed)
    random.seed(seed)
    slots, longest = rng.randint(1, 5), rng.choice([20, 40])
    least = -(-longest // block_size)
    one = Server(
        slots=slots,
        blocks=rng.randint(least, 2 * least),
        block_size=block_size,
        tokens=rng.randint(slots, 24),
        decode_steps=rng.choice([1, 4]),
        retains=rng.random() < 0.8,
        hash=sha256 if rng.random() < 0.85 else lambda data: b"the same",
        room=rng.choice([0, 5, 100]),
        cache_changes=rng.choice([slots, slots + 2, None]),
    )
    one.device.forgets = rng.choice([0.0, 0.3])
    late = rng.choice([0, 1, 2])
    texts = [rng.choices(range(5), k=longest) for _ in range(3)]
    groups = []
    for _ in range(steps):
        if rng.random() < 0.3 and len(one.scheduler.waiting) < 20:
            cut = rng.randint(1, longest - 1)
            prompt = rng.choice(texts)[:cut]
            if rng.random() < 0.2:
                prompt = prompt[: cut // 2] + rng.choices(range(5), k=cut - cut // 2)
            n, rank = rng.randint(1, min(3, slots)), rng.choice([0, 0, 1])
            most, ends = rng.randint(1, longest - cut), rng.choice([1, 3, 1000])
            full = cut // block_size
            fits = full + n * (-(-(cut + most - 1) // block_size) - full) <= len(one.device.refs)
            groups.append(one.submit(prompt, most, n=n, rank=rank, ends=ends, beams=fits and rng.random() < 0.3))
        if groups and rng.random() < 0.05:
            one.abort(rng.choice(groups))
        if one.busy:
            one.step(late)
    finish(one, late, 20_000)
    for sample in (sample for group in groups for sample in group):
        if sample.over == "length":
            assert_right(sample)
        assert sample.over and (sample.beams or sample.tokens == sample.expected[: len(sample.tokens)])
    assert one.device.used == one.cache.live == one.cache.idle
    assert one.cache.stored == 0 == one.scheduler.ledger.saved
    one.discard()
    assert not one.device.host
    assert not one.cache._expected
    return one


@pytest.mark.one_python
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_random_programs(block_size: int):
    """10,000 steps each."""
    ran = [random_program(seed, block_size, steps=500) for seed in range(20)]
    assert sum(one.preemptions for one in ran) > 50
    assert sum(one.hit_tokens for one in ran) > 500
    assert sum(len(plan.drops) for one in ran for plan in one.plans) > 100
    assert sum(one.fetched for one in ran if one.room == 5) > 5
    assert sum(one.fetched for one in ran if one.room == 100) > 10


def test_paused_groups_do_not_take_their_blocks_from_each_other_for_ever():
    """In pools of hardly more than one needs, with room on the host for all, and nobody who is aborted."""
    fetched = 0
    for seed in range(120):
        rng = random.Random(seed)
        random.seed(seed)
        size, longest = rng.choice([1, 2, 4]), rng.choice([16, 24, 40])
        least = -(-longest // size)
        one = Server(
            slots=rng.randint(2, 4),
            blocks=rng.randint(least, int(1.5 * least)),
            block_size=size,
            tokens=rng.choice([8, 24]),
            decode_steps=rng.choice([1, 4]),
            room=1000,
        )
        late, samples = rng.choice([0, 1, 2]), []
        common = text(8, seed) if rng.random() < 0.5 else []
        for number in range(rng.randint(2, 4)):
            cut, n = rng.randint(longest // 4, longest - 4), rng.randint(1, min(3, len(one.scheduler.occupants)))
            prompt = (common + text(cut, 100 * seed + number))[:cut]
            samples += one.submit(prompt, longest - cut, n=n, rank=rng.choice([0, 1, 2]), ends=rng.choice([3, 1000]))
            for _ in range(rng.randint(0, 3)):
                if one.busy:
                    one.step(late)
        finish(one, late, 1000)
        for sample in samples:
            assert sample.tokens == sample.expected
        fetched += one.fetched
    assert fetched > 100
