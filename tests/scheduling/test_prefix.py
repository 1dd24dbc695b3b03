"""The prefix cache by hand: what is found, who holds it, what goes first, and that digests are only a way to find."""

import hashlib
from typing import Any

import numpy as np
import pytest

from jpaged.prefix import Block, Chain, PrefixCache


def chain(*tokens: int, salt: bytes = b"", **options: Any) -> Chain:
    made = Chain(2, salt, **options)
    made.extend(tokens)
    return made


def filled(cache: PrefixCache, text: Chain, first_id: int = 0) -> list[Block]:
    """A sequence that has filled all blocks of a text."""
    held: list[Block] = []
    cache.add(range(first_id, first_id + len(text)), text, held)
    return held


def ids(blocks: list[Block]) -> list[int | None]:
    return [block.id for block in blocks]


def test_a_digest_is_of_the_tokens_and_of_all_before_them():
    one = chain(1, 2, 3, 4, 5)
    root = hashlib.sha256(b"").digest()
    first = hashlib.sha256(root + np.array([1, 2], np.int32).tobytes()).digest()
    assert one.digests == [first, hashlib.sha256(first + np.array([3, 4], np.int32).tobytes()).digest()]
    assert chain(9, 9, 3, 4).digests[1] != one.digests[1]
    assert chain(1, 2, salt=b"tenant").digests != one.digests[:1]


def test_a_chain_grows_by_full_blocks():
    one, text = chain(), []
    for token in range(11):
        text.append(token)
        one.extend(text)
        assert len(one) == len(text) // 2
    assert one.digests == chain(*text).digests and one.contents == chain(*text).contents


def test_a_chain_grows_by_what_is_new_alone():
    one = chain(1, 2, 3, 4, 5)
    one.extend([5, 6, 7, 8, 9], start=4)
    assert one.digests == chain(1, 2, 3, 4, 5, 6, 7, 8).digests
    one.extend([7], start=6)
    assert len(one) == 4


def test_the_beginning_of_a_text_is_found_as_far_as_it_is_there():
    cache = PrefixCache(retains=True)
    filled(cache, chain(1, 2, 3, 4, 5, 6), first_id=7)
    assert ids(cache.match(chain(1, 2, 3, 4, 9, 9), 9)) == [7, 8]
    assert ids(cache.match(chain(1, 2, 3, 4, 5, 6), 2)) == [7, 8]
    assert cache.match(chain(3, 4), 9) == [] and cache.match(chain(1), 9) == []


@pytest.mark.parametrize("other", [(9, 9, 3, 4), (1, 2, 9, 9), (3, 4, 1, 2)])
def test_equal_digests_of_other_tokens_are_not_found(other: tuple[int, ...]):
    cache, same = PrefixCache(retains=True), dict[str, Any](hash=lambda data: b"same")
    filled(cache, chain(1, 2, **same))
    assert all(block.content == chain(*other).contents[0] for block in cache.match(chain(*other, **same), 9))


def test_a_block_after_another_beginning_is_not_found():
    cache = PrefixCache(retains=True)
    by_content: dict[str, Any] = {"hash": lambda data: data[-8:]}  # the same wherever the block stands
    filled(cache, chain(1, 2, 3, 4, **by_content))
    filled(cache, chain(9, 9, **by_content), first_id=5)
    assert ids(cache.match(chain(9, 9, 3, 4, **by_content), 9)) == [5]


def test_the_salt_is_compared_too():
    cache = PrefixCache(retains=True)
    filled(cache, chain(1, 2, salt=b"a", hash=lambda data: b"same"))
    assert cache.match(chain(1, 2, salt=b"b", hash=lambda data: b"same"), 9) == []


def test_what_is_kept_outlives_its_sequence_and_goes_when_it_must():
    cache = PrefixCache(retains=True)
    held = filled(cache, chain(1, 2, 3, 4))
    assert (cache.live, cache.idle, cache.keeps(9)) == (2, 0, [0, 1])
    cache.release(held)
    assert (cache.live, cache.idle) == (2, 2)
    assert cache.evict(1) == ([1], []) and ids(cache.match(chain(1, 2, 3, 4), 9)) == [0]
    assert cache.evict(9) == ([0], []) and cache.match(chain(1, 2), 9) == []
    assert (cache.live, cache.idle) == (0, 0)


def test_what_is_not_kept_ends_with_its_last_holder():
    for cache in (PrefixCache(retains=False), PrefixCache(retains=True)):
        held = filled(cache, chain(1, 2, 3, 4))
        cache.hold(held)
        cache.release(held)
        assert ids(cache.match(chain(1, 2, 3, 4), 9)) == [0, 1]
        cache.release(held)
        assert (cache.live, cache.idle, cache.keeps(9), cache.match(chain(1, 2), 9)) == (0, 0, [], [])


def test_few_are_kept_at_a_time_and_beginnings_first():
    cache = PrefixCache(retains=True)
    held = filled(cache, chain(1, 2, 3, 4, 5, 6))
    assert cache.keeps(1) == [0]
    cache.release(held)
    assert (cache.live, cache.keeps(9)) == (1, [])


def test_what_somebody_holds_is_not_evicted():
    cache = PrefixCache(retains=True)
    held = filled(cache, chain(1, 2, 3, 4))
    cache.keeps(9)
    cache.release(held)
    cache.hold(held[:1])
    assert cache.evict(9) == ([1], [])
    cache.release(held[:1])
    assert cache.evict(9) == ([0], [])


def test_the_least_recently_used_goes_first_and_no_block_outlives_the_one_before_it():
    cache = PrefixCache(retains=True)
    first = filled(cache, chain(1, 2, 3, 4))
    second = first[:1]
    cache.hold(second)
    cache.add([5], chain(1, 2, 5, 6), second)
    cache.keeps(9)
    cache.release(second)
    cache.release(first)
    again = cache.match(chain(1, 2, 5, 6), 9)
    assert ids(again) == [0, 5]
    cache.hold(again)
    cache.release(again)
    assert [cache.evict(1)[0] for _ in range(3)] == [[1], [5], [0]]


def test_the_second_of_two_equal_blocks_is_not_found_nor_what_follows_it():
    cache = PrefixCache(retains=True)
    first, second = filled(cache, chain(1, 2)), filled(cache, chain(1, 2, 3, 4), first_id=5)
    assert [block.digest is None for block in second] == [True, True]
    assert cache.keeps(9) == [0] and cache.live == 3
    cache.release(second)
    assert cache.live == 1 and ids(cache.match(chain(1, 2, 3, 4), 9)) == [0]
    cache.release(first)
    assert cache.idle == 1


def test_what_is_expected_by_two_is_expected_until_both_are_done():
    cache, text = PrefixCache(retains=True), chain(1, 2)
    cache.expect(text.digests)
    cache.expect(text.digests)
    cache.disappoint(text.digests)
    assert cache.find(text, 9).comes
    cache.disappoint(text.digests)
    assert not cache.find(text, 9).comes


def paused(room: int, text: Chain) -> tuple[PrefixCache, list[Block]]:
    """A sequence that has filled a text and wants it back."""
    cache = PrefixCache(retains=True, room=room)
    held = filled(cache, text)
    cache.keeps(9)
    cache.want(held)
    cache.release(held)
    return cache, held


def test_what_is_wanted_goes_to_the_host_and_comes_back():
    text = chain(1, 2, 3, 4)
    cache, held = paused(9, text)
    assert cache.evict(1) == ([1], [(held[1], 1)])
    assert (cache.live, cache.idle, cache.stored) == (1, 1, 1)
    assert cache.find(text, 9) == ([held[0]], [held[1]], False)
    assert cache.find(text, 1) == ([held[0]], [], False)
    cache.fetch([held[1]])
    assert cache.live == 2 and cache.find(text, 9) == ([held[0]], [], True)
    cache.arrive([(held[1], 7)])
    assert ids(cache.match(text, 9)) == [0, 7] and cache.idle == 2
    assert cache.evict(9) == ([7, 0], [(held[0], 0)])  # the other one is there already
    cache.unwant(held)
    assert cache.discards() == [held[1], held[0]] and cache.discards() == []
    assert (cache.stored, cache.live, cache.match(text, 9)) == (0, 0, [])


def test_what_is_not_wanted_any_more_does_not_stay_on_the_host():
    cache, held = paused(9, chain(1, 2))
    cache.evict(9)
    cache.fetch(held)
    cache.unwant(held)
    assert cache.discards() == [] and cache.stored == 1  # it is on its way
    cache.arrive([(held[0], 3)])
    assert cache.discards() == held and cache.stored == 0
    assert ids(cache.match(chain(1, 2), 9)) == [3]


@pytest.mark.parametrize("together", [False, True])
def test_the_host_keeps_beginnings_if_it_has_not_room_for_all(together: bool):
    text = chain(1, 2, 3, 4, 5, 6)
    cache, held = paused(2, text)
    if together:
        assert cache.evict(9) == ([2, 1, 0], [(held[1], 1), (held[0], 0)])
    else:
        assert [cache.evict(1)[1] for _ in range(3)] == [[(held[2], 2)], [(held[1], 1)], [(held[0], 0)]]
    assert cache.find(text, 9) == ([], held[:2], False)
    assert cache.discards() == [held[2]] and cache.stored == 2
    cache.unwant(held)
    assert cache.discards() == [held[1], held[0]] and cache.stored == 0


def test_a_host_without_room_keeps_nothing():
    cache, held = paused(0, chain(1, 2))
    assert cache.evict(9) == ([0], []) and cache.match(chain(1, 2), 9) == []
    cache.unwant(held)
    assert cache.discards() == [] and cache.stored == 0


def test_what_is_on_its_way_keeps_its_copy():
    cache, held = paused(1, chain(1, 2))
    cache.evict(9)
    cache.fetch(held)
    other = filled(cache, chain(7, 8), first_id=5)
    cache.keeps(9)
    cache.want(other)
    cache.release(other)
    assert cache.evict(9) == ([5], [])


def test_ends_that_were_fetched_go_before_the_beginning_that_stayed():
    text = chain(1, 2, 3, 4, 5, 6)
    cache, held = paused(9, text)
    cache.evict(2)
    cache.fetch(held[1:])
    cache.arrive([(held[1], 7), (held[2], 8)])
    assert cache.evict(9)[0] == [8, 7, 0]


@pytest.mark.parametrize("comes", [False, True])
def test_what_the_host_loses_is_not_found(comes: bool):
    cache, held = paused(9, chain(1, 2))
    cache.evict(9)
    if comes:
        cache.fetch(held)
    cache.lose(held[0])
    cache.lose(held[0])
    assert (cache.stored, cache.live, cache.find(chain(1, 2), 9)) == (0, 0, ([], [], False))
    cache.unwant(held)
    assert cache.discards() == []


def test_a_twin_begins_as_the_other_and_goes_its_own_way():
    one = chain(1, 2, 3)
    other = one.twin()
    one.extend([1, 2, 3, 4])
    other.extend([1, 2, 3, 5])
    assert other.digests == chain(1, 2, 3, 5).digests and one.digests == chain(1, 2, 3, 4).digests
