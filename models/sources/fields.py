"""Typed reading of other people's metadata: what is wrong is collected, so that one error can name all of it.

Knows nothing of models. A value that cannot be used yields a harmless stand-in; whoever reads must look at `problems`
before trusting any value.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelError

_REQUIRED: Any = object()


class Faults(ModelError):
    """Everything that is wrong with one thing, in one error.

    Attributes:
      faults: the single sentences, without full stops.
    """

    def __init__(self, what: str, faults: Iterable[str]):
        self.faults = tuple(faults)
        super().__init__(f"{what} cannot be used: {'; '.join(self.faults)}.")


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

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """An int; `default` where absent (None is a possible default)."""
        return self._typed(name, default, _is_integer, "an integer", 1)

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite float; `default` where absent."""
        value = self._typed(name, default, _is_finite_number, "a finite number", 1.0)
        return value if value is None else float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """A bool; `default` where absent."""
        return self._typed(name, default, lambda v: isinstance(v, bool), "true or false", False)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string; `default` where absent."""
        return self._typed(name, default, lambda v: isinstance(v, str), "a string", "")

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A nested mapping, or None where absent."""
        return self._typed(name, None, lambda v: isinstance(v, Mapping), "an object", None)

    def integers(self, name: str) -> tuple[int, ...]:
        """An int or a list of ints, as a tuple; empty where absent."""
        return self._several(name, _is_integer, "integer")

    def numbers(self, name: str) -> tuple[float, ...]:
        """A finite number or a list of them, as a tuple of floats; empty where absent."""
        return tuple(float(v) for v in self._several(name, _is_finite_number, "finite number"))

    def reject_others(self, known: Iterable[str]) -> None:
        """Collects every name that is not known."""
        for name in sorted(self._values.keys() - set(known)):
            self.note(f"{self._prefix}{name} is unknown")

    def _several(self, name: str, valid: Callable[[Any], bool], what: str) -> tuple[Any, ...]:
        value = self.raw(name)
        several = value if isinstance(value, list) else [] if value is None else [value]
        if all(valid(v) for v in several):
            return tuple(several)
        self.readable = False
        self.reject(name, f"must be one or several {what}s")
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


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ModelError: the file is missing, unreadable, not JSON, or not an object; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); give a complete model directory.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, holds {type(value).__name__}; fetch the file again.")
    return value
