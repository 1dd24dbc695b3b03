"""Typed reading of other people's metadata: what is wrong is collected, so that one error can name all of it.

Knows nothing of models. A value that cannot be used yields a harmless stand-in; whoever reads must look at `problems`
before trusting any value.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelError

_REQUIRED: Any = object()
_INT64 = range(-(2**63), 2**63)  # JSON has no limit, and arithmetic on floats has


class Faults(ModelError):
    """Everything that is wrong with one thing, in one error.

    Args:
      what: names the thing, by its path where it has one.
      faults: single sentences, without full stops.
      way_out: what to do about them; ends the message.

    Attributes:
      faults: as given.
    """

    def __init__(self, what: str, faults: Iterable[str], way_out: str):
        self.faults = tuple(faults)
        super().__init__(f"{what} cannot be used: {'; '.join(self.faults)}; {way_out}.")


class Fields:
    """A mapping whose entries are read with their types checked. A null entry counts as absent.

    Args:
      values: the metadata, such as a parsed config.json.
      problems: the list that receives one sentence for each fault; readers of related mappings share one.
      prefix: put before each name in those sentences.

    Attributes:
      readable: False once a stand-in was returned for a value that is missing or of the wrong type.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], *, prefix: str = ""):
        self._values = values
        self.problems = problems
        self.readable = True
        self._prefix = prefix

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def reject(self, name: str, wanted: str) -> None:
        """Collects that the value of `name` cannot be used; `wanted` ends the sentence."""
        self.note(f"{self._prefix}{name}={_short(self._values.get(name))} {wanted}")

    def note(self, problem: str) -> None:
        """Collects a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def integer(self, name: str, default: Any = _REQUIRED, *, within: range = _INT64) -> Any:
        """An int that is `within` a range; `default` where absent (None is a possible default)."""
        return self._typed(name, default, lambda v: type(v) is int and v in within, f"an integer{_ends(within)}", 1)

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite float; `default` where absent."""
        value = self._typed(name, default, _is_finite_number, "a finite number", 1.0)
        return value if value is None else float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """A bool; `default` where absent."""
        return self._typed(name, default, lambda v: isinstance(v, bool), "true or false", False)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string of whole characters; `default` where absent."""
        return self._typed(name, default, _is_text, "a string", "")

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A nested mapping, or None where absent."""
        return self._typed(name, None, lambda v: isinstance(v, Mapping), "an object", None)

    def inner(self, name: str) -> "Fields":
        """The entries of a nested mapping; none where absent."""
        return Fields(self.mapping(name) or {}, self.problems, prefix=f"{self._prefix}{name}.")

    # The lists may be a vocabulary: their entries are looked at without a call of Python for each.

    def integers(self, name: str, *, within: range = _INT64) -> tuple[int, ...]:
        """An int or a list of ints, each `within` a range, as a tuple; empty where absent."""
        found = self._several(name, {int}, f"integers{_ends(within)}")
        if found and (min(found) not in within or max(found) not in within):
            return self._unreadable(name, f"integers{_ends(within)}")
        return found

    def numbers(self, name: str) -> tuple[float, ...]:
        """A finite number or a list of them, as a tuple of floats; empty where absent."""
        found = self._several(name, {int, float}, "finite numbers")
        if not all(abs(value) <= sys.float_info.max for value in found):
            return self._unreadable(name, "finite numbers")
        return tuple(map(float, found))

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings, as a tuple; empty where absent."""
        return self._several(name, {str}, "strings")

    def reject_others(self, known: Iterable[str]) -> None:
        """Collects every name that is not known."""
        for name in sorted(self._values.keys() - set(known)):
            self.note(f"{self._prefix}{name} is unknown")

    def _several(self, name: str, types: set[type], what: str) -> tuple[Any, ...]:
        value = self.raw(name)
        several = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(several) if set(map(type, several)) <= types else self._unreadable(name, what)

    def _unreadable(self, name: str, what: str) -> tuple[Any, ...]:
        self.readable = False
        self.reject(name, f"must be one or several {what}")
        return ()

    def _typed(self, name: str, default: Any, valid: Callable[[Any], bool], wanted: str, stand_in: Any) -> Any:
        value = self.raw(name)
        if value is None:
            if default is not _REQUIRED:
                return default
            self.readable = False
            self.note(f"{self._prefix}{name} is missing")
            return stand_in
        if valid(value):
            return value
        self.readable = False
        self.reject(name, f"must be {wanted}")
        return stand_in


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _ends(within: range) -> str:
    return " of 64 bits" if within == _INT64 else f" from {within.start} to {within.stop - 1}"


def _is_finite_number(value: Any) -> bool:
    """Compared, not converted: an int may be too large for a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_text(value: Any) -> bool:
    """A JSON string may hold half a character (a lone surrogate), which nothing can write."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def read_json(path: Path, *, absent_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file; an empty one if the file is absent and that is `absent_ok`.

    Raises:
      ModelError: the file is missing, unreadable, not JSON, or not an object; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if absent_ok:
            return {}
        raise ModelError(f"{path} is missing; give a complete model directory.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); give a complete model directory.") from error
    except (ValueError, RecursionError) as error:  # RecursionError: brackets within brackets, thousands deep
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, holds {type(value).__name__}; fetch the file again.")
    return value
