"""The type checker that `tests/conftest.py` puts around every function of the packages: beartype, told two things.

- An int is a float, as PEP 484 has it (beartype's default says no).
- A dataclass is checked when somebody builds one, not when JAX or Flax rebuilds it. A transformation flattens a pytree
  and puts it together again around whatever it holds at the time: tracers with one axis more, `ShapeDtypeStruct`,
  `PartitionSpec`, None. Those are not arrays and need not be.
"""

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
_REBUILDERS = ("jax.", "jaxlib.", "flax.")


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn`, which jaxtyping made from a signature: it returns nothing, or its last keyword argument unchanged."""
    checked = _beartype(fn)
    if fn.__name__ != "__init__":
        return checked

    @functools.wraps(fn)
    def unless_rebuilt(*args: Any, **kwargs: Any) -> Any:
        return (fn if _caller_outside_jaxtyping().startswith(_REBUILDERS) else checked)(*args, **kwargs)

    return unless_rebuilt


def _caller_outside_jaxtyping() -> str:
    """The module that called the constructor: the first frame that belongs neither to jaxtyping nor to this file.

    A generated dataclass subclass may call up through `__init__` of the packages; those frames count as the caller's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and not module.startswith("jaxtyping."):
            return module
        frame = frame.f_back
    return ""
