"""Takes the README apart into its fenced blocks and their commands. Runs nothing."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    language: str
    line: int  # of the fence
    body: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, without the indentation that a list gives them."""
    found = []
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(line[indent:] if line[:indent].isspace() else line for line in match["body"].splitlines(True))
        found.append(Block(match["language"], text.count("\n", 0, match.start()) + 1, body))
    return found


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block, one line each: continued lines joined, comments and blank lines left out."""
    for line in block.body.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield re.sub(r"\s+", " ", command)
