"""Reads what setup.cfg, pyproject.toml and the Makefile declare. Knows no rule about it."""

import configparser
import re
import tomllib
from functools import cache
from typing import Any

from tests.house.tree import ROOT


@cache
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string((ROOT / "setup.cfg").read_text())
    return parser


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def extras() -> set[str]:
    return set(setup_cfg()["options.extras_require"])


def distribution(requirement: str) -> str:
    """The normalised name of what a requirement asks for: "Foo_bar[x]>=1" is "foo-bar"."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def required(extra: str | None = None) -> set[str]:
    """The distributions that jpaged, or an extra of it, requires."""
    section, option = ("options", "install_requires") if extra is None else ("options.extras_require", extra)
    return {distribution(line) for line in setup_cfg()[section][option].split("\n") if line}


def make_targets() -> set[str]:
    """The targets of the Makefile that a person may name."""
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
