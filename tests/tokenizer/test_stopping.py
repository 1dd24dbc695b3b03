"""Stop strings: against a definition by brute force, and by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.tokenizer import ByteTokenizer, StopChecker, TextStream

STOPS = st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=3)


def pieces_like(stop: list[str]) -> st.SearchStrategy[list[str]]:
    """Pieces that nearly are stop strings: beginnings of them, and odd letters."""
    beginnings = sorted({string[:n] for string in stop for n in range(len(string))})
    return st.lists(st.sampled_from(beginnings) | st.sampled_from(["a", "b"]), max_size=12)


STOPS_AND_PIECES = STOPS.flatmap(lambda stop: st.tuples(st.just(stop), pieces_like(stop)))


def first_stop(text: str, stop: list[str], after: int = 0) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends, and which: the longest of those that end there. Ends in the
    first `after` characters do not count."""
    for end in range(after + 1, len(text) + 1):
        if ending := [string for string in stop if text[:end].endswith(string)]:
            return end, max(ending, key=len)
    return None


def may_become_stop(text: str, stop: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max(n for n in range(len(text) + 1) for string in stop if n < len(string) and text.endswith(string[:n]))


@settings(max_examples=300)
@given(case=STOPS_AND_PIECES, include=st.booleans())
def test_every_piece_is_what_brute_force_would_release(case, include):
    stop, pieces = case
    checker, seen, shown = StopChecker(stop, include), "", ""
    for piece in pieces:
        ended = first_stop(seen, stop)
        seen += piece
        shown += checker.push(piece)
        if ended or (ended := first_stop(seen, stop)):
            end, string = ended
            assert checker.hit == string
            assert shown == seen[: end if include else end - len(string)]
        else:
            assert checker.hit is None
            assert shown == seen[: len(seen) - may_become_stop(seen, stop)]
    if first_stop(seen, stop) is None:
        assert shown + checker.finish() == seen
    else:
        assert checker.finish() == ""


def test_holds_back_no_more_than_it_must():
    checker = StopChecker(["\n\nUser:"])
    assert [checker.push(piece) for piece in ("Hi\n", "\n", "\nUs", "e", "d", "!")] == [
        "Hi",
        "",
        "\n",
        "",
        "\n\nUsed",
        "!",
    ]
    assert checker.hit is None


def test_a_near_miss_is_not_read_twice():
    """After aabaaa comes b where c would end it. What still counts is aa, the longest end of aabaaa that begins the
    string; it is found through aab's own beginning a, and with the b it makes aab."""
    checker = StopChecker(["aabaaac"])
    assert (checker.push("aabaaabaaac"), checker.hit) == ("aaba", "aabaaac")


def test_the_stop_that_ends_first_wins_and_of_those_the_longest():
    checker = StopChecker(["abc", "b", "ab"])
    assert (checker.push("xxabc"), checker.hit) == ("xx", "ab")


def test_nothing_comes_after_a_hit():
    checker = StopChecker(["."], include_stop=True)
    assert (checker.push("a.b"), checker.push("c."), checker.finish()) == ("a.", "", "")


def test_without_stop_strings_everything_passes():
    checker = StopChecker(())
    assert (checker.push("abc"), checker.finish(), checker.hit) == ("abc", "", None)


@pytest.mark.parametrize("stop", [("a", ""), "abc"])
def test_refuses_what_is_no_list_of_strings_with_content(stop):
    with pytest.raises(ValueError, match=r"stop=.* must be a sequence of strings, none of them empty"):
        StopChecker(stop)


def push_all(stream: TextStream, data: bytes) -> list[str]:
    pieces = []
    for byte in data:
        piece, stopped = stream.push(byte)
        pieces.append(piece)
        if stopped:
            break
    return pieces


def test_stream_says_which_token_ended_the_text():
    stream = TextStream(ByteTokenizer(), stop=("日", "END"))
    assert push_all(stream, "aE日b".encode()) == ["a", "", "", "", "E"]
    assert (stream.num_tokens, stream.stop_hit, stream.finish()) == (5, "日", "")
    assert stream.push(ord("b")) == ("", True)
    assert stream.num_tokens == 5  # tokens after the end are not counted


def test_stream_gives_what_was_held_back_when_it_ends_otherwise():
    stream = TextStream(ByteTokenizer(), stop=("END",))
    assert push_all(stream, b"EN\xe6") == ["", "", ""]
    assert (stream.finish(), stream.stop_hit, stream.num_tokens) == ("EN\ufffd", None, 3)


@given(case=STOPS_AND_PIECES, include=st.booleans(), min_tokens=st.integers(0, 20))
def test_stream_overlooks_stop_strings_that_end_too_early(case, include, min_tokens):
    stop, pieces = case
    text = "".join(pieces)
    stream = TextStream(ByteTokenizer(), stop=stop, include_stop=include, min_tokens=min_tokens)
    shown = "".join(push_all(stream, text.encode())) + stream.finish()
    end, string = first_stop(text, stop, after=min_tokens) or (len(text), "")
    assert shown == text[: end if include else end - len(string)]
    assert (stream.num_tokens, stream.stop_hit) == (end, string or None)


def test_stop_strings_before_min_tokens_by_hand():
    stream = TextStream(ByteTokenizer(), stop=("ab",), min_tokens=2)
    assert push_all(stream, b"abab") == ["", "ab", "", ""]
    assert (stream.num_tokens, stream.stop_hit) == (4, "ab")


def test_no_stop_string_begins_in_the_rest_of_a_text_that_ended():
    """The device has said "length" by then; what an incomplete character becomes is shown as it is."""
    stream = TextStream(ByteTokenizer(), stop=("\ufffd",))
    assert push_all(stream, b"a\xe2") == ["a", ""]
    assert (stream.finish(), stream.stop_hit) == ("\ufffd", None)


def test_stream_without_special_tokens_cannot_stop_at_one():
    for skip, expected in ((True, None), (False, "<eos>")):
        stream = TextStream(ByteTokenizer(), stop=("<eos>",), skip_special_tokens=skip)
        stream.push(257)
        assert stream.stop_hit == expected


@given(
    stop=st.lists(st.text("aé", min_size=1, max_size=3), max_size=2), data=st.binary(max_size=12), include=st.booleans()
)
def test_stream_equals_decoding_then_stopping(stop, data, include):
    stream, pieces = TextStream(ByteTokenizer(), stop=stop, include_stop=include), []
    pieces = push_all(stream, data)
    at_once = StopChecker(stop, include)
    whole = at_once.push(data.decode("utf-8", "replace")) + at_once.finish()
    assert "".join(pieces) + stream.finish() == whole
    assert stream.stop_hit == at_once.hit
