"""Streaming text equals decoding at once, for any ids; and decoding is what the `tokenizers` library does."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.tokenizer import ByteTokenizer, HFTokenizer, IncrementalDetokenizer
from tests.tokenizer import backends

TOKENIZERS = {
    "byte_level": HFTokenizer(backends.byte_level()),
    "sentencepiece": HFTokenizer(backends.sentencepiece()),
    "sentencepiece_unprefixed": HFTokenizer(backends.sentencepiece(prefixed=False)),
    "metaspace": HFTokenizer(backends.metaspace()),
    "bytes": ByteTokenizer(),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)

# A few are beyond every vocabulary. Pieces with spaces and special tokens are among the last of each.
ANY_IDS = st.lists(st.integers(0, 280) | st.integers(255, 270), max_size=40)
# Mostly bytes that lead, continue and break characters of two to four bytes.
UTF8_BYTES = st.sampled_from([0x20, 0x41, 0x80, 0xA9, 0xBF, 0xC3, 0xE6, 0x97, 0xA5, 0xED, 0xF0, 0x9F, 0x98, 0xF5, 0xFF])
FIRST_BYTE = {"sentencepiece": 3, "bytes": 0}  # the id of byte 0; those of the others follow


@every_tokenizer
@given(ids=ANY_IDS, cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40), skip=st.booleans())
def test_pieces_join_to_the_whole(name, ids, cuts, skip):
    tokenizer, at, pieces = TOKENIZERS[name], 0, []
    stream = IncrementalDetokenizer(tokenizer, skip)
    for cut in cuts:
        pieces.append(stream.add(ids[at : at + cut]))
        at += cut
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", FIRST_BYTE)
@given(data=st.lists(UTF8_BYTES, max_size=12).map(bytes))
def test_bytes_one_by_one_are_read_as_utf8(name, data):
    stream = IncrementalDetokenizer(TOKENIZERS[name], continues=True)
    pieces = [stream.add([FIRST_BYTE[name] + byte]) for byte in data]
    assert "".join(pieces) + stream.finish() == data.decode("utf-8", "replace")


@given(ids=ANY_IDS, skip=st.booleans())
def test_byte_level_decodes_as_the_library_does(ids, skip):
    library = backends.byte_level().decode(ids, skip_special_tokens=skip)
    assert TOKENIZERS["byte_level"].decode(ids, skip_special_tokens=skip) == library


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece_unprefixed"])
@given(ids=ANY_IDS, skip=st.booleans())
def test_sentencepiece_decodes_as_the_library_does(name, ids, skip):
    """Where the library meets a run of lone bytes that is ill-formed, it writes U+FFFD for every byte of the run; here
    the well-formed part is kept. Elsewhere they agree."""
    library = TOKENIZERS[name]._backend.decode(ids, skip_special_tokens=skip)
    ours = TOKENIZERS[name].decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in library:
        assert ours == library
    else:
        assert "\ufffd" in ours


def test_worked_by_hand():
    """é is C3 A9; 日 is E6 97 A5. The tail E6 97 is one ill-formed part, so one U+FFFD."""
    stream = IncrementalDetokenizer(ByteTokenizer())
    assert [stream.add([byte]) for byte in b"\xc3\xa9A\xe6\x97\xa5"] == ["", "é", "A", "", "", "日"]
    assert stream.add(b"\xe6\x97") == ""
    assert stream.finish() == "\ufffd"
    broken = IncrementalDetokenizer(ByteTokenizer())
    assert [broken.add([byte]) for byte in b"\xe6A\xff"] == ["", "\ufffdA", "\ufffd"]


def test_a_special_token_inside_a_character_does_not_break_it():
    bos = 256
    assert ByteTokenizer().decode([0xC3, bos, 0xA9]) == "é"
    assert ByteTokenizer().decode([0xC3, bos, 0xA9], skip_special_tokens=False) == "\ufffd<bos>\ufffd"


def test_the_dummy_space_is_taken_off_a_text_but_not_off_its_continuation():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("he he")
    assert tokenizer.decode(ids) == "he he"
    alone = IncrementalDetokenizer(tokenizer)
    assert [alone.add([token_id]) for token_id in ids] == ["he", " he"]
    continuation = IncrementalDetokenizer(tokenizer, continues=True)
    assert continuation.add(ids) == " he he"


def test_a_token_costs_the_same_in_a_long_text():
    """Bytes that never make a character; decoding all of them again for each would take minutes."""
    stream, begin = IncrementalDetokenizer(ByteTokenizer()), time.process_time()
    for _ in range(30_000):
        stream.add([0xFF])
    assert time.process_time() - begin < 10
