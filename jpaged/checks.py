"""What is wrong with one value of a setting, as sentences that end with a way out, and the form that it is brought to.

Values come from JSON and flags, so their types are judged too. Nothing here raises, or knows which settings there are.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # the device computes in float32
MOST_BIAS = 100.0  # the OpenAI API's range of a logit bias; what lies beyond is clamped to it, as in vLLM


def is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """An integer of another library as Python's, whose arithmetic has no width; anything else unchanged."""
    return int(value) if is_integer(value) and type(value) is not int else value


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    return bool(-FLOAT32_MAX <= value <= FLOAT32_MAX)  # false for NaN; no overflow for an integer of any size


def as_tuple(value: Any) -> Any:
    """None, one string or an iterable as a tuple without repeats; anything else unchanged, for `problems` to name."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (bytes, Mapping)):
        return value
    try:
        items = tuple(value)
    except TypeError:
        return value
    seen: set[tuple[type, str | Integral]] = set()  # by type too: True is not 1
    kept = []
    for item in map(plain, items):
        if isinstance(item, (str, Integral)):  # what can repeat; anything else is a fault, and each has its sentence
            if (type(item), item) in seen:
                continue
            seen.add((type(item), item))
        kept.append(item)
    return tuple(kept)


def as_pairs(value: Any) -> Any:
    """Token ids and biases as a tuple of pairs, the biases clamped; what does not have that form stays as it is."""
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    try:
        pairs = tuple(value.items() if isinstance(value, Mapping) else value)
    except TypeError:
        return value
    return tuple(
        (plain(id_from_json(pair[0])), clamped(pair[1])) if isinstance(pair, tuple) and len(pair) == 2 else pair
        for pair in pairs
    )


def id_from_json(key: Any) -> Any:
    """JSON has string keys only, so "17" is token id 17."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key


def clamped(bias: Any) -> Any:
    return max(-MOST_BIAS, min(MOST_BIAS, bias)) if is_number(bias) and is_finite(bias) else bias


def names(choices: tuple[str, ...]) -> str:
    return ", ".join(map(repr, choices))


def integer(name: str, value: Any, low: int, high: int, hint: str) -> list[str]:
    if not is_integer(value):
        return [f"{name}={value!r} must be an integer, not {type(value).__name__}; {hint}."]
    if not low <= value <= high:
        return [f"{name}={value!r} must be from {low} to {high}; {hint}."]
    return []


def number(name: str, value: Any, low: float, high: float | None, hint: str, *, above: bool = False) -> list[str]:
    """Faults of a number that must be finite and from `low` (or `above` it) to `high`, if there is one."""
    if not is_number(value):
        return [f"{name}={value!r} must be a number, not {type(value).__name__}; {hint}."]
    if not is_finite(value) or value < low or (above and value == low) or (high is not None and value > high):
        wanted = f"{'above' if above else 'at least'} {low}" + ("" if high is None else f" and at most {high}")
        return [f"{name}={value!r} must be finite, {wanted}; {hint}."]
    return []


def sequence(name: str, value: Any, most: int | None) -> list[str]:
    if not isinstance(value, tuple):
        return [f"{name}={value!r} must be a list, not {type(value).__name__}; leave it out to ask for nothing."]
    if most is not None and len(value) > most:
        return [f"{name} has {len(value)} entries and must have at most {most}; shorten it, or raise max_{name}."]
    return []


def strings(name: str, value: Any, most: int | None) -> list[str]:
    found = sequence(name, value, most)
    for item in value if isinstance(value, tuple) else ():
        if not isinstance(item, str):
            found.append(f"{name} has {item!r} and must have strings only; stop_token_ids and logit_bias take ids.")
        elif not item:
            found.append(f"{name} has an empty string, which every text contains; leave it out.")
    return found


def token_id(name: str, value: Any, vocab_size: int) -> list[str]:
    if not is_integer(value):
        return [f"{name} has {value!r} and must have integer token ids only; leave it out."]
    if not 0 <= value < vocab_size:
        return [f"{name} has {value!r} and must have token ids from 0 to {vocab_size - 1} only; leave it out."]
    return []


def token_ids(name: str, value: Any, vocab_size: int, most: int) -> list[str]:
    found = sequence(name, value, most)
    for item in value if isinstance(value, tuple) else ():
        found += token_id(name, item, vocab_size)
    return found


def bias(value: Any, vocab_size: int, most: int) -> list[str]:
    found = sequence("logit_bias", value, most)
    seen = set()
    for pair in value if isinstance(value, tuple) else ():
        if not isinstance(pair, tuple) or len(pair) != 2:
            found.append(f"logit_bias has {pair!r} and must map token ids to numbers; try {{17: -100.0}}.")
            continue
        token, bias = pair
        bad_id = token_id("logit_bias", token, vocab_size)
        if not bad_id and token in seen:
            found.append(f"logit_bias has token id {token!r} twice; give it one bias.")
        seen.update([] if bad_id else [token])
        found += bad_id + number(f"logit_bias[{token!r}]", bias, -MOST_BIAS, MOST_BIAS, "leave it out for none")
    return found
