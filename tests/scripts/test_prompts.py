"""Prompts as scripts read them: what is good, what is bad, and where it stood."""

import os
from pathlib import Path

import pytest

from scripts.common import prompts
from scripts.common.prompts import Entry


def faults(entries: list[Entry]) -> dict[str, str]:
    return {entry.where: entry.fault for entry in entries if entry.fault is not None}


def test_flags_come_before_the_file(tmp_path: Path):
    (tmp_path / "more.txt").write_text("three\n")
    found = prompts.gather(["one", "two"], str(tmp_path / "more.txt"))
    assert [entry.text for entry in found] == ["one", "two", "three"]
    assert [entry.where for entry in found] == ["", "", f"{tmp_path}/more.txt line 1"]


def test_a_text_file_has_a_prompt_a_line():
    content = "\ufeffone\r\n\n  two \u2028 still two\n\x85 three".encode()
    found = prompts.read_lines(content, "f")
    assert [(entry.text, entry.where) for entry in found] == [
        ("one", "f line 1"),
        ("  two \u2028 still two", "f line 3"),
        ("\x85 three", "f line 4"),
    ]
    assert not faults(found)


def test_a_line_that_is_not_utf8_is_named_and_keeps_its_place():
    found = prompts.read_lines(b"one\ncaf\xe9\nthree", "f")
    assert [entry.text for entry in found] == ["one", None, "three"]
    assert faults(found) == {"f line 2": "it is not UTF-8 (byte 3 is 0xe9); save the file as UTF-8"}


def test_json_lines():
    content = b'{"prompt": "a", "text": 1}\n\n{"prompt_token_ids": [1, 2], "prompt": null}\n{"prompt": 5}'
    found = prompts.read_json_lines(content, "f")
    assert [entry.prompt for entry in found] == [{"prompt": "a"}, {"prompt_token_ids": [1, 2]}, {"prompt": 5}]
    assert [entry.has_ids for entry in found] == [False, True, False]
    assert [entry.text for entry in found] == ["a", None, None]  # that 5 is no text is the engine's to say
    assert not faults(found)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON"),
        (b"[1, 2]", "must be a JSON object, not a list"),
        (b"7", "not a number"),
        (b"null", "not null"),
        (b"true", "not true or false"),
        (b"{}", "neither"),
        (b'{"prompt": null}', "neither"),
        (b'{"prompt_token_ids": [NaN]}', "NaN is no number"),
        (b'{"prompt_token_ids": [-Infinity]}', "-Infinity is no number"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud83d"}', "character 0 is half of one"),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json_lines_that_are_wrong(line: bytes, why: str):
    found = prompts.read_json_lines(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n', "f")
    assert len(found) == 3
    assert list(faults(found)) == ["f line 2"]
    assert why in (found[1].fault or "")


def test_an_argument_that_is_not_utf8_is_bad():
    (entry,) = prompts.gather([os.fsdecode(b"caf\xe9")], None)
    assert entry.fault == "it is not Unicode text (character 3 is half of one); try UTF-8"
    assert entry.text == "caf\N{REPLACEMENT CHARACTER}"  # as JSON, half a character is an error to strict readers


def test_half_a_character_in_json_is_marked():
    (entry,) = prompts.read_json_lines(b'{"prompt": "a\\ud83d\\ud83d\\ude00", "prompt_token_ids": [1]}', "f")
    assert entry.prompt == {"prompt": "a\N{REPLACEMENT CHARACTER}\N{GRINNING FACE}", "prompt_token_ids": [1]}


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str):
    (tmp_path / "f.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"f\.jsonl has no prompt; try one a line"):
        prompts.gather([], str(tmp_path / "f.jsonl"))
