"""Prompts from flags, files and standard input, in the order in which they were given.

A prompt that cannot be read keeps its place, with what is wrong with it. Knows no tokenizer: whether a prompt can be
served is not decided here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import stat
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from .command import complain

_PATIENCE_SECONDS = 2
_BOM = b"\xef\xbb\xbf"  # some editors begin a file with a byte order mark


@dataclasses.dataclass(frozen=True)
class Entry:
    """One prompt.

    Attributes:
      prompt: A text, or a mapping with "prompt" or "prompt_token_ids".
      where: "prompts.txt line 3"; empty for one that came as a flag.
      fault: Why it cannot be used; None if nothing is known against it.
    """

    prompt: Any
    where: str = ""
    fault: str | None = None

    @property
    def text(self) -> str | None:
        text = self.prompt.get("prompt") if isinstance(self.prompt, dict) else self.prompt
        return text if isinstance(text, str) else None

    @property
    def has_ids(self) -> bool:
        return isinstance(self.prompt, dict) and "prompt_token_ids" in self.prompt


def gather(given: Sequence[str], path: str | None) -> list[Entry]:
    """The prompts given as flags, then those of a file ("-" is standard input, one a line).

    With neither, standard input is one prompt, if it is a pipe or a file that has anything in it.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file has no prompt.
    """
    entries = [_checked(text, "") for text in given]
    if path is not None:
        entries += _from_file(path)
    elif not entries:
        entries += _from_standard_input()
    return entries


def read_lines(content: bytes, name: str) -> list[Entry]:
    """One prompt a line; blank lines are none."""
    return [_line_of_text(line, where) for line, where in _lines(content, name)]


def read_json_lines(content: bytes, name: str) -> list[Entry]:
    """One JSON object a line, with "prompt" or "prompt_token_ids" (which goes first); other keys are not looked at."""
    return [_line_of_json(line, where) for line, where in _lines(content, name)]


def _from_file(path: str) -> list[Entry]:
    if path == "-":
        name, content = "standard input", _standard_input() if sys.stdin else b""
    else:
        name = path
        with open(path, "rb") as file:
            content = file.read()
    entries = (read_json_lines if path.endswith(".jsonl") else read_lines)(content, name)
    if not entries:
        raise ValueError(f"{name} has no prompt; try one a line")
    return entries


def _from_standard_input() -> list[Entry]:
    """A terminal is not read, nor is /dev/null; an empty pipe is what programs that run scripts tend to leave there."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # closed
        return []
    if stat.S_ISCHR(mode) or sys.stdin is None:
        return []
    content = _standard_input()
    if not content:
        complain("standard input was empty, so here is a prompt of our own; try --prompt=…")
        return []
    return [_line_of_text(content.removeprefix(_BOM).removesuffix(b"\n").removesuffix(b"\r"), "standard input")]


def _standard_input() -> bytes:
    """All of it. A pipe that nobody closes would be waited for in silence."""
    if not select.select([0], [], [], _PATIENCE_SECONDS)[0]:
        complain("waiting for prompts on standard input; without any, try --prompt=… or </dev/null")
    os.set_blocking(0, True)  # whoever shares the pipe may have set it otherwise, and then a read ends early
    return sys.stdin.buffer.read()


def _lines(content: bytes, name: str) -> Iterable[tuple[bytes, str]]:
    for number, line in enumerate(content.removeprefix(_BOM).split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if line.strip():
            yield line, f"{name} line {number}"


def _line_of_text(line: bytes, where: str) -> Entry:
    try:
        return Entry(line.decode(), where)
    except UnicodeDecodeError as error:
        return Entry(None, where, _not_utf8(error))


def _line_of_json(line: bytes, where: str) -> Entry:
    try:
        value = json.loads(line.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return Entry(None, where, _not_utf8(error))
    except (ValueError, RecursionError) as error:
        return Entry(None, where, f"it is not JSON ({error})")
    if not isinstance(value, dict):
        return Entry(None, where, f'it must be a JSON object, not {_kind(value)}; try {{"prompt": "…"}}')
    wanted = {key: value[key] for key in ("prompt", "prompt_token_ids") if value.get(key) is not None}
    if not wanted:
        return Entry(None, where, 'it has neither "prompt" nor "prompt_token_ids"; give one of them')
    return _checked(wanted, where)


def _checked(prompt: Any, where: str) -> Entry:
    """Text may hold halves of characters: arguments that are not UTF-8, or escapes in JSON."""
    entry = Entry(prompt, where)
    try:
        (entry.text or "").encode()
    except UnicodeEncodeError as error:
        return Entry(
            _whole(prompt), where, f"it is not Unicode text (character {error.start} is half of one); try UTF-8"
        )
    return entry


def _whole(prompt: Any) -> Any:
    """With a mark for each half: it will be printed, as JSON too, and strict readers of JSON refuse a half."""
    if isinstance(prompt, dict):
        return {key: _whole(value) for key, value in prompt.items()}
    return prompt.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(prompt, str) else prompt


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"it is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); save the file as UTF-8"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
