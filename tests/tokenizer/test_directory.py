"""A tokenizer from a checkpoint folder: which file says what."""

import json
import re
import shutil

import pytest

from models.errors import ModelError
from models.tokenizers import from_directory, load_tokenizer
from tests.fixtures import GOLDEN
from tests.tokenizer import backends

BOS, EOS, TWO_WORDS = 260, 261, 262  # of backends.byte_level


@pytest.fixture
def folder(tmp_path):
    backends.byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name: str, **content) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_tokenizer_json_alone(folder):
    tokenizer = from_directory(folder)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.has_chat_template) == (None, (), False)


def test_end_of_text_is_gathered(folder):
    """The chat's end of turn from tokenizer_config, the rest from generation_config, which hides config's."""
    write(folder, "tokenizer_config", bos_token={"content": "<s>"}, eos_token="<two words>")
    write(folder, "generation_config", eos_token_id=[EOS, TWO_WORDS])
    write(folder, "config", eos_token_id=5, bos_token_id=7)
    tokenizer = from_directory(folder)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (TWO_WORDS, EOS))


def test_config_is_the_last_resort(folder):
    write(folder, "config", eos_token_id=EOS, bos_token_id=BOS)
    write(folder, "generation_config", eos_token_id=None)
    tokenizer = from_directory(folder)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOS,))


def test_special_tokens_map_is_older_than_tokenizer_config(folder):
    write(folder, "special_tokens_map", bos_token="<s>", eos_token={"content": "</s>"})
    write(folder, "tokenizer_config", bos_token=None, eos_token="<two words>")
    tokenizer = from_directory(folder)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (TWO_WORDS,))


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [BOS]), (False, []), (None, [])])
def test_use_of_bos(folder, add_bos, expected):
    write(folder, "tokenizer_config", bos_token="<s>", add_bos_token=add_bos)
    tokenizer = from_directory(folder)
    assert tokenizer is not None
    assert tokenizer.encode("") == expected


def test_chat_templates(folder):
    write(folder, "tokenizer_config", chat_template="one")
    assert rendered(folder) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    write(folder, "tokenizer_config", chat_template=named)
    assert rendered(folder) == "three"
    (folder / "chat_template.jinja").write_text("fôur", encoding="utf-8")
    assert rendered(folder) == "fôur"


def rendered(folder) -> str:
    tokenizer = from_directory(folder)
    assert tokenizer is not None
    return tokenizer.apply_chat_template([])


def test_what_jpaged_saved_goes_before_the_rest(folder):
    write(folder, "tokenizer_config", eos_token="<two words>")
    write(folder, "jpaged_tokenizer", eos_token_ids=[EOS])
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == (EOS,)


def test_a_checkpoint_without_a_tokenizer():
    assert load_tokenizer(GOLDEN / "tiny" / "llama") is None


def test_another_form_is_refused_with_the_way_out(folder):
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelError, match=r"only as tokenizer\.model; tokenizer\.json is wanted.*save_pretrained"):
        from_directory(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_files_are_named(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        from_directory(folder)


@pytest.mark.parametrize(
    ("name", "field", "value", "wanted"),
    [
        ("tokenizer_config", "eos_token", 7, "a string"),
        ("tokenizer_config", "bos_token", ["<s>"], "a string"),
        ("tokenizer_config", "eos_token", "\ud800", "a string"),
        ("special_tokens_map", "bos_token", 1.5, "a string"),
        ("tokenizer_config", "add_bos_token", "yes", "true or false"),
        ("tokenizer_config", "chat_template", 7, "a string"),
        ("tokenizer_config", "chat_template", {"default": "one"}, "a string"),
        ("tokenizer_config", "chat_template", ["one"], "a list of objects with a name and a template"),
        ("tokenizer_config", "chat_template", [{"template": "one"}], "a list of objects with a name and a template"),
        ("tokenizer_config", "chat_template", [{"name": "default"}], "a list of objects with a name and a template"),
        ("tokenizer_config", "chat_template", [{"name": "a", "template": 7}], "a list of objects with a name"),
        ("generation_config", "eos_token_id", "2", "one or several integers"),
        ("generation_config", "eos_token_id", [2, -1], "one or several integers from 0 to 2147483647"),
        ("generation_config", "eos_token_id", [None], "one or several integers"),
        ("generation_config", "bos_token_id", [1], "an integer from 0 to 2147483647"),
        ("config", "eos_token_id", 2**40, "one or several integers"),
        ("config", "bos_token_id", True, "an integer"),
    ],
)
def test_fields_that_mean_nothing_are_named(folder, name, field, value, wanted):
    write(folder, name, **{field: value})
    told = f"{name}.json: {field}={value!r} must be"
    with pytest.raises(ModelError, match=f"{folder.name} cannot be used: {re.escape(told)}.*{wanted}.*; correct"):
        from_directory(folder)


def test_a_token_without_a_text_is_named(folder):
    write(folder, "tokenizer_config", eos_token={"content": 7})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: eos_token\.content=7 must be a string"):
        from_directory(folder)


def test_all_fields_that_mean_nothing_come_in_one_error(folder):
    write(folder, "tokenizer_config", eos_token=7, add_bos_token=1)
    write(folder, "generation_config", eos_token_id="2")
    with pytest.raises(ModelError) as caught:
        from_directory(folder)
    for reason in ("eos_token=7", "add_bos_token=1", "generation_config.json: eos_token_id='2'"):
        assert reason in str(caught.value)


def test_a_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read as a template .*; fetch it again"):
        from_directory(folder)


def test_a_decoder_that_is_not_supported_names_the_folder(folder):
    backends.word_piece().save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match=f"{folder.name} cannot be used: .*WordPiece"):
        from_directory(folder)


def test_a_path_that_is_not_there(tmp_path):
    shutil.rmtree(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)
