"""HFTokenizer: special tokens, BOS, what it refuses, and its files."""

import json

import pytest
from tokenizers import decoders, processors

from jpaged.tokenizer import ByteTokenizer, HFTokenizer
from tests.tokenizer import backends

BOS, EOS, TWO_WORDS = 260, 261, 262  # of backends.byte_level


def make(**options) -> HFTokenizer:
    return HFTokenizer(backends.byte_level(), **{"bos_token_id": BOS, "eos_token_ids": (EOS,), **options})


def test_special_tokens_in_a_text_are_read():
    tokenizer = make()
    assert tokenizer.encode("hel</s><two words>") == [backends.byte_level().token_to_id("hel"), EOS, TWO_WORDS]
    assert tokenizer.decode([EOS, TWO_WORDS]) == "<two words>"  # a user's token is text, a special one is skipped
    assert tokenizer.decode([EOS, TWO_WORDS], skip_special_tokens=False) == "</s><two words>"


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [BOS]), (False, []), (None, [])])
def test_bos(add_bos, expected):
    tokenizer = make(add_bos=add_bos)
    assert tokenizer.encode("") == expected
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_without_a_word_on_bos_the_post_processor_decides():
    backend = backends.byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    assert HFTokenizer(backend, bos_token_id=BOS).encode("") == [BOS, EOS]
    assert HFTokenizer(backend, bos_token_id=BOS, add_bos=True).encode("") == [BOS]
    assert HFTokenizer(backend, bos_token_id=BOS, add_bos=False).encode("") == []


def test_truncation_and_padding_are_switched_off():
    backend = backends.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(HFTokenizer(backend).encode("abcd")) == 4


def test_vocab_size_reaches_past_the_last_added_token():
    assert make().vocab_size == TWO_WORDS + 1
    assert make().decode([TWO_WORDS + 1, 10**6]) == ""


def test_lone_surrogates_are_refused():
    for tokenizer in (make(), ByteTokenizer()):
        with pytest.raises(ValueError, match="surrogates"):
            tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos_token_ids": (EOS, 999)}, r"must be ids of this tokenizer; \[999\] are not"),
        ({"bos_token_id": -1}, r"\[-1\] are not"),
        ({"bos_token_id": 2**40}, r"\[1099511627776\] are not"),
        ({"bos_token_id": None, "add_bos": True}, "needs a BOS token"),
    ],
)
def test_refuses_ids_without_a_token(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_refuses_decoders_without_meaning_in_bytes():
    with pytest.raises(ValueError, match=r"it is \{\"type\": \"WordPiece\".*on token ids"):
        HFTokenizer(backends.word_piece())
    odd = backends.sentencepiece()
    odd.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    with pytest.raises(ValueError, match="must be ByteLevel, Metaspace"):
        HFTokenizer(odd)


def test_no_chat_template():
    assert not make().has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        make().apply_chat_template([])


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_saved_and_loaded(tmp_path, add_bos):
    make(chat_template="{{ bos_token }}é{{ eos_token }}", add_bos=add_bos).save(tmp_path)
    loaded = HFTokenizer.load(tmp_path)
    assert loaded.encode("hel w é</s>") == make(add_bos=add_bos).encode("hel w é</s>")
    assert (loaded.bos_token_id, loaded.eos_token_ids, loaded.vocab_size) == (BOS, (EOS,), TWO_WORDS + 1)
    assert loaded.apply_chat_template([]) == "<s>é</s>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("jpaged_tokenizer.json", "{"),
        ("jpaged_tokenizer.json", '{"colour": 1}'),
        ("jpaged_tokenizer.json", "[]"),
        ("jpaged_tokenizer.json", "\xff"),
        ("jpaged_tokenizer.json", '{"bos_token_id": true}'),
        ("jpaged_tokenizer.json", '{"eos_token_ids": 7}'),
        ("jpaged_tokenizer.json", '{"eos_token_ids": ["2"]}'),
        ("jpaged_tokenizer.json", '{"add_bos": "yes"}'),
        ("jpaged_tokenizer.json", '{"chat_template": 7}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content):
    make().save(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        HFTokenizer.load(tmp_path)


def test_files_are_plain_json(tmp_path):
    make().save(tmp_path)
    assert json.loads((tmp_path / "jpaged_tokenizer.json").read_text())["eos_token_ids"] == [EOS]
