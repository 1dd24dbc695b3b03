"""What lets something pass has its reason on the same line: a broad except, a suppressed error, a rule not kept."""

import re

import pytest

from tests.house.tree import ROOT, files

# What must have a reason, and what one looks like there.
RULES = {
    r"#\s*(noqa|pyright: ignore|type: ignore)\b": r"# (noqa: [A-Z0-9, ]+|pyright: ignore\[\w+\]) \(.{4,}\)$",
    r"^\s*except(\s+(Base)?Exception\b[^:]*)?:": r":  # .{4,}$",
    r"^\s*with .*\bsuppress\(": r":  # .{4,}$",
}


def without_reason(text: str) -> list[str]:
    return [
        line.strip()
        for line in text.splitlines()
        if any(re.search(what, line) and not re.search(reason, line) for what, reason in RULES.items())
    ]


def test_what_lets_something_pass_has_its_reason_beside_it():
    bare = {
        str(path): found
        for path in files()
        if path.suffix == ".py"
        and path.name != "test_exceptions.py"
        and (found := without_reason((ROOT / path).read_text()))
    }
    assert not bare


@pytest.mark.parametrize(
    ("bare", "reasoned"),
    [
        ("import x  # noqa: F401", "import x  # noqa: F401 (a fixture)"),
        ("x = 1  # type: ignore", "x = 1  # pyright: ignore[reportFoo] (wrong on purpose)"),
        ("except:", "except:  # as JAX does it"),
        ("    except Exception as error:", "    except Exception as error:  # it raises nothing narrower"),
        ("with contextlib.suppress(OSError):", "with contextlib.suppress(OSError):  # nobody reads it"),
    ],
)
def test_a_missing_reason_is_seen(bare: str, reasoned: str):
    assert without_reason(bare) == [bare.strip()]
    assert without_reason(reasoned) == []
