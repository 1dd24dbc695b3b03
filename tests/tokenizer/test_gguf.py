"""Tokenizers rebuilt from GGUF files that are written here: both kinds, how text is cut, and damaged files."""

import itertools
import math
import re
import struct

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import ModelError
from models.gguf_metadata import read_metadata
from models.tokenizers import from_gguf
from models.tokenizers_gguf import pre_tokenizer
from tests.tokenizer import backends

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def test_token_types_are_those_of_the_format():
    names = ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
    assert [TokenType[name] for name in names] == [NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE]


def write(path, kind: str, tokens: list[str], types: list[int], **fields):
    """A GGUF file of metadata only. `fields` go under tokenizer.ggml, but for the chat template."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in fields.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path, **fields):
    tokens = [*backends.ALPHABET, "he", "hel", "12", "123", "<s>", "</s>", "<eot>", "<pad>", "two words"]
    types = [NORMAL] * 260 + [CONTROL, CONTROL, CONTROL, UNUSED, USER]
    known = {"pre": "gpt-2", "merges": ["h e", "he l", "1 2", "12 3"], "bos_token_id": 260, "eos_token_id": 261}
    return write(path, "gpt2", tokens, types, **{**known, **fields})


def test_byte_level(tmp_path):
    tokenizer = from_gguf(
        byte_level(tmp_path / "m.gguf", eot_token_id=262, chat_template="{{ bos_token }}!{{ eos_token }}")
    )
    assert tokenizer.encode("hel</s>two words123") == [257, 261, 264, 259]
    assert tokenizer.encode("<pad>") == [backends.ALPHABET.index(letter) for letter in "<pad>"]  # unused: only text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (260, (261, 262), 265)
    assert tokenizer.apply_chat_template([]) == "<s>!</s>"
    assert tokenizer.decode([257, 261, 264]) == "heltwo words"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [260]),
        ({"pre": "llama-bpe"}, [260]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ],
)
def test_bos_where_the_file_or_the_kind_wants_it(tmp_path, fields, expected):
    assert from_gguf(byte_level(tmp_path / "m.gguf", **fields)).encode("") == expected


def test_whole_words_go_before_merges_where_the_kind_wants_it(tmp_path):
    """ "hel" is a token, but without "he l" no merge leads to it."""
    letters = [backends.ALPHABET.index(letter) for letter in "hel"]
    for pre, expected in (("qwen2", [256, letters[2]]), ("llama-bpe", [257])):
        path = byte_level(tmp_path / f"{pre}.gguf", pre=pre, merges=["h e"], add_bos_token=False)
        assert from_gguf(path).encode("hel") == expected


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "It's 2024  I'LL", "It|'s| 2024| | I|'|LL"),
        ("smollm", "It's 2024  I'LL", "It|'s| |2|0|2|4| | I|'|LL"),
        ("llama-bpe", "It's 2024  I'LL", "It|'s| |202|4| | I|'LL"),
        ("qwen2", "It's 2024  I'LL", "It|'s| |2|0|2|4| | I|'LL"),
        ("gpt-4o", "It's 2024  I'LL", "It's| |202|4| | I'LL"),
        ("tekken", "It's 2024  I'LL", "It|'s| |2|0|2|4| | I|'LL"),
        ("default", "It's 2024", "It|'|s| |202|4"),
        ("gpt-2", "x/\n\n y", "x|/|\n\n| y"),
        ("llama-bpe", "x/\n\n y", "x|/\n\n| y"),
        ("gpt-4o", "fooBAR Bar/\n", "foo|BAR| Bar|/\n"),
        ("llama-bpe", "a+b", "a|+b"),
        ("gpt-2", "a+b", "a|+|b"),
        ("deepseek-v3", "日本語ab 1234", "日本語|ab| |123|4"),
        ("llama-bpe", "日本語ab 1234", "日本語ab| |123|4"),
    ],
)
def test_how_text_is_cut(name, text, pieces):
    assert [piece for piece, _ in pre_tokenizer(name).pre_tokenize_str(text)] == pieces.split("|")


def sentencepiece(path, pieces: dict[str, float], **fields):
    """Ids: 0 <unk>, 1 <s>, 2 </s>, 3 to 258 the bytes, then `pieces` with their scores, then two line feeds."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "\n\n"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER]
    scores = [0.0] * 259 + [*pieces.values(), 0.0]
    known = {"scores": scores, "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return write(path, "llama", tokens, types, **{**known, **fields})


def test_sentencepiece(tmp_path):
    """Scores by hand: `he` (−1) is joined before `▁h` (−2) can be; `▁he` (−3) then takes both."""
    pieces = {"▁": -10.0, "h": -10.0, "e": -10.0, "he": -1.0, "▁h": -2.0, "▁he": -3.0}
    tokenizer = from_gguf(sentencepiece(tmp_path / "m.gguf", pieces))
    first = 259
    assert tokenizer.encode("he") == [1, first + 5]  # BOS and the space in front are what this kind does
    assert tokenizer.encode("hhe", add_special_tokens=False) == [first + 4, first + 3]
    assert tokenizer.encode("é</s>\n\nhe", add_special_tokens=False) == [first, 3 + 0xC3, 3 + 0xA9, 2, 265, first + 5]
    assert tokenizer.decode(tokenizer.encode("he é")) == "he é"
    bare = from_gguf(sentencepiece(tmp_path / "b.gguf", pieces, add_space_prefix=False, add_bos_token=False))
    assert bare.encode("he") == [first + 3]
    assert bare.decode([first + 5]) == " he"


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's definition: join the neighbours whose joined piece scores best, the first such pair, until none
    is a piece."""
    pieces = list(text)
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]:
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


@settings(max_examples=60)
@given(
    longer=st.lists(
        st.tuples(st.text("abc", min_size=2, max_size=4), st.floats(-9, -1, width=16)),
        unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
        max_size=10,
    ),
    texts=st.lists(st.text("abc", min_size=1, max_size=10), min_size=1, max_size=10),
)
def test_sentencepiece_merges_by_score(tmp_path_factory, longer, texts):
    scores = {**dict(longer), "a": -10.0, "b": -10.0, "c": -10.0}
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    tokenizer = from_gguf(sentencepiece(path, scores, add_space_prefix=False, add_bos_token=False))
    for text in texts:
        assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == merge_by_score(text, scores)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "martian"}, "tokenizer.ggml.pre = 'martian' is not supported; supported are deepseek-r1-qwen, "),
        ({"merges": ["h e", "h z"]}, r"1 merges use tokens .* such as \('h', 'z'\)"),
        ({"eos_token_id": 999}, r"eos_token_id=999 must be an integer from 0 to 264"),
        ({"eot_token_id": "262"}, r"eot_token_id='262' must be an integer from 0 to 264"),
        ({"eom_token_id": 1.0}, r"eom_token_id=1.0 must be an integer"),
        ({"bos_token_id": [260]}, r"bos_token_id=\[260\] must be an integer"),
        ({"bos_token_id": True}, r"bos_token_id=True must be an integer"),
        ({"add_bos_token": "yes"}, r"add_bos_token='yes' must be true or false"),
        ({"pre": ["gpt-2"]}, r"pre=\['gpt-2'\] must be a string"),
        ({"merges": [1, 2]}, r"merges=\[1, 2\] must be one or several strings"),
        ({"merges": 7}, r"merges=7 must be one or several strings"),
        ({"chat_template": 7}, r"tokenizer.chat_template=7 must be a string"),
        ({"eos_token_id": 999, "pre": 7, "merges": 7}, r"eos_token_id=999 .*pre=7 .*merges=7 "),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, fields, message):
    path = byte_level(tmp_path / "m.gguf", **fields)
    with pytest.raises(ModelError, match=f"{re.escape(str(path))} cannot be used: .*{message}.*; fetch the file again"):
        from_gguf(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scores": [0.5]}, "260 tokens need as many tokenizer.ggml.scores, there are 1"),
        ({"scores": ["a"] * 260}, "scores=.* must be one or several finite numbers"),
        ({"scores": [math.nan] * 260}, "scores=.* must be one or several finite numbers"),
        ({"unknown_token_id": 260}, "tokenizer.ggml.unknown_token_id=260 must be an integer from 0 to 259"),
        ({"unknown_token_id": "<unk>"}, "unknown_token_id='<unk>' must be an integer"),
        ({"add_space_prefix": 1}, "add_space_prefix=1 must be true or false"),
    ],
)
def test_sentencepiece_needs_scores_and_ids_that_are_there(tmp_path, fields, message):
    with pytest.raises(ModelError, match=f"cannot be used: .*{message}.*; fetch"):
        from_gguf(sentencepiece(tmp_path / "m.gguf", {}, **fields))


@pytest.mark.parametrize(
    ("tokens", "types", "message"),
    [
        (["a", "b"], [NORMAL], "2 tokens need as many tokenizer.ggml.token_type, there are 1"),
        (["a", "b"], ["x", "y"], r"token_type=\['x', 'y'\] must be one or several integers"),
        ([1, 2], [NORMAL, NORMAL], r"tokens=\[1, 2\] must be one or several strings"),
    ],
)
def test_a_vocabulary_of_something_else_is_refused(tmp_path, tokens, types, message):
    with pytest.raises(ModelError, match=f"cannot be used: .*{message}.*; fetch"):
        from_gguf(write(tmp_path / "m.gguf", "gpt2", tokens, types))


@pytest.mark.parametrize("kind", ["bert", "t5", "no_vocab"])
def test_other_kinds_are_refused_by_name(tmp_path, kind):
    path = write(tmp_path / "m.gguf", kind, ["a"], [NORMAL])
    with pytest.raises(ModelError, match=f"tokenizer.ggml.model = '{kind}' with 1 tokens; supported are 'gpt2'"):
        from_gguf(path)


def test_every_way_to_cut_a_file_off_is_noticed(tmp_path):
    whole = byte_level(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(1, 64), *range(64, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf is not a whole GGUF file"):
            from_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a whole GGUF file"),
        (b"PK\x03\x04" + bytes(60), r"begins with b'PK"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 in little-endian order"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version 50331648 in little-endian order"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77) + bytes(60), "value type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 62), "is not a whole"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe", "is not a whole"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k\x09\0\0\0" + struct.pack("<IQ", 9, 1) * 5000, "is not"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_metadata(tmp_path / "m.gguf")


def test_absent_file(tmp_path):
    with pytest.raises(ModelError, match=r"m\.gguf cannot be read \(No such file or directory\)"):
        read_metadata(tmp_path / "m.gguf")


def test_metadata_of_every_type(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 1 << 31, "int32": -(1 << 31),
        "uint64": 1 << 63, "int64": -(1 << 63), "float32": 0.5, "float64": 0.1, "bool": True, "string": "é",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    arrays = {"ints": [1, 2], "floats": [0.5, -1.0], "strings": ["a", "", "日"], "bools": [True, False]}
    for name, value in arrays.items():
        writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_metadata(tmp_path / "m.gguf") == {"general.architecture": "llama", **values, **arrays}
