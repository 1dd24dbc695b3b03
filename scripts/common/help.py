"""`--help`: what the script is for, with examples, and its flags in groups. Knows no flag by name."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from absl import flags

_COLUMN = 30  # where the explanations begin
_KINDS = {"int": "N", "multi int": "N", "float": "X"}


def render(doc: str, groups: dict[str, Sequence[str]]) -> str:
    """The text of `--help`: the docstring, then each title with its flags."""
    width = min(100, shutil.get_terminal_size().columns)
    parts = [doc.strip()]
    for title, names in groups.items():
        parts.append("\n".join([f"{title}:", *(_entry(flags.FLAGS[name], width) for name in names)]))
    return "\n\n".join(parts)


def _entry(flag: flags.Flag, width: int) -> str:
    head = f"  --{_usage(flag)}"
    text = textwrap.wrap(_explained(flag), max(20, width - _COLUMN)) or [""]
    lines = [f"{head:<{_COLUMN}}{text[0]}"] if len(head) < _COLUMN else [head, " " * _COLUMN + text[0]]
    return "\n".join([*lines, *(" " * _COLUMN + line for line in text[1:])])


def _usage(flag: flags.Flag) -> str:
    return flag.name if flag.boolean else f"{flag.name}={_KINDS.get(flag.parser.flag_type(), 'TEXT')}"


def _explained(flag: flags.Flag) -> str:
    """absl adds to the help of flags that have choices or may be repeated; here that is said in our words."""
    said = flag.help or ""
    if choices := getattr(flag.parser, "enum_values", None):
        said = f"{said.partition('>: ')[2]} One of {', '.join(choices)}."
    if isinstance(flag, flags.MultiFlag):
        said = said.partition(";\n")[0] + " Repeatable."
    if flag.default is not None and not flag.boolean:
        default = ",".join(flag.default) if isinstance(flag.default, list) else flag.default  # as it would be typed
        said += f" Default: {default}."
    return said
