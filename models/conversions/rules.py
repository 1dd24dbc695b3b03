"""The engine of conversions: walks a table of rules, reports all that does not fit, and fills our arrays in place.

A rule says where one tensor of a checkpoint belongs: which array of ours, which part of it, after which transform. What
the expected shape of the tensor is follows from that. Knows neither families nor file formats.

Each of our arrays is allocated once at its full size and filled tensor by tensor, so that a conversion holds little
more than the finished parameters.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from models.config import ModelConfig
from models.sources.base import BFLOAT16, FLOAT32, Source
from models.sources.fields import Faults

Part = tuple[int | slice, ...]
_LAYER = "{layer}"
_LISTED = 6  # names of one kind of fault that a message spells out
_MOST_NUMBERS = 2**50  # of a model: far more than any has, and NumPy can count them


def whole(config: ModelConfig) -> Part:
    """All of the array (of a layer's share of it, where layers are stacked)."""
    return ()


def unchanged(tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
    """No transform."""
    return tensor


@dataclass(frozen=True)
class Rule:
    """One row of a conversion table.

    Attributes:
      source: the tensor's name; `{layer}` stands for each layer's number.
      target: the dotted path of our array. A target ending in ".weight" takes matrices, any other takes vectors.
      part: which part of the array (behind the layer axis) the tensor fills, as an index; its leading axes, flattened,
        are the tensor's rows.
      transform: applied to the tensor as read; keeps its shape.
    """

    source: str
    target: str
    part: Callable[[ModelConfig], Part] = whole
    transform: Callable[[np.ndarray, ModelConfig], np.ndarray] = unchanged


@dataclass(frozen=True)
class Table:
    """How one form of one family's checkpoints becomes our parameters.

    Attributes:
      rules: rules whose target the config's parameters lack are not used.
      ignored: regular expressions of tensor names that carry nothing which the config does not say.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()


class Step(NamedTuple):
    """One tensor's way: its name, its rule, and the index in the rule's target that it fills, layer axis included."""

    name: str
    rule: Rule
    at: Part


def plan(source: Source, table: Table, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> list[Step]:
    """Every step of a conversion, once it is sure that all of them can be taken and nothing is left over.

    Args:
      source: the open checkpoint.
      table: its family's and form's rules.
      shapes: dotted path → shape of each of our arrays; those below "layers." are stacked on axis 0.
      config: what the rules' parts depend on.

    Raises:
      ModelError: tensors are missing, unexpected, of another shape, or of a type that cannot be read; all are counted
        and the first few named.
    """
    _refuse_impossible(source, shapes, config)
    steps = list(_steps(table.rules, shapes, config))
    missing, misshapen, unreadable = [], [], []
    for step in steps:
        expected, found = _expected_shape(step, shapes[step.rule.target]), source.tensors.get(step.name)
        if found is None:
            missing.append(step.name)
        elif found.shape != expected:
            misshapen.append(f"{step.name} is {list(found.shape)} and should be {list(expected)}")
        elif found.dtype is None:
            unreadable.append(f"{step.name} ({found.kind})")
    known = {step.name for step in steps}
    extra = [n for n in source.tensors if n not in known and not any(re.fullmatch(p, n) for p in table.ignored)]
    kinds = {
        "missing": missing,
        "unexpected": extra,
        "misshapen": misshapen,
        "of a type that cannot be read": unreadable,
    }
    faults = [f"tensors {kind} ({len(names)}): {_listed(names)}" for kind, names in kinds.items() if names]
    if faults:
        wanted = f"wanted is what family {config.family!r} with {config.num_layers} layers and the config's numbers has"
        raise Faults(f"{source.path}", [*faults, wanted], "correct its config, or fetch the model again")
    return steps


def array_dtypes(steps: Sequence[Step], source: Source, dtype: np.dtype | None = None) -> dict[str, np.dtype]:
    """The dtype of each array of ours: `dtype`, or the widest (bfloat16 or float32) among the tensors that fill it."""
    found: dict[str, set[np.dtype | None]] = {}
    for step in steps:
        found.setdefault(step.rule.target, set()).add(source.tensors[step.name].dtype)
    widest = {path: BFLOAT16 if kinds == {BFLOAT16} else FLOAT32 for path, kinds in found.items()}
    return widest if dtype is None else dict.fromkeys(widest, dtype)


def convert_tensors(
    source: Source,
    steps: Sequence[Step],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype],
    config: ModelConfig,
    advance: Callable[[int], Any] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Our parameters, as nested dicts of NumPy arrays of the given shapes and dtypes, by the steps of `plan`.

    `advance` is told after each tensor how many bytes of the result that filled.
    """
    arrays = {path: np.empty(shape, dtypes[path]) for path, shape in shapes.items()}
    for name, rule, at in steps:
        part = arrays[rule.target][at]
        part[...] = rule.transform(source.read(name), config).reshape(part.shape)
        advance(part.nbytes)
    return _nested(arrays)


def _steps(rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> Iterator[Step]:
    for rule in rules:
        if rule.target in shapes:
            part = rule.part(config)
            layers = range(config.num_layers) if _LAYER in rule.source else [None]
            for layer in layers:
                yield Step(
                    rule.source if layer is None else rule.source.replace(_LAYER, str(layer)),
                    rule,
                    part if layer is None else (layer, *part),
                )


def _refuse_impossible(source: Source, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """What only a damaged config can mean, before a step is made for each of its layers."""
    held, found = sum(math.prod(shape) for shape in shapes.values()), len(source.tensors)
    faults = []
    if config.num_layers > found:
        faults.append(f"its config says {config.num_layers} layers, and it has {found} tensors in all")
    if held >= _MOST_NUMBERS:
        faults.append(f"its config asks for {held:.1e} numbers")
    if faults:
        raise Faults(f"{source.path}", faults, "correct its config, or fetch the model again")


def _expected_shape(step: Step, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The tensor's own shape: the part's leading axes are one in the checkpoint."""
    part = np.broadcast_to(np.zeros((), np.int8), shape)[step.at].shape  # no memory: only its shape is of interest
    if step.rule.target.endswith(".weight"):
        return (math.prod(part[:-1]), part[-1])
    return (math.prod(part),)


def _listed(names: Sequence[str]) -> str:
    ordered = sorted(names, key=lambda name: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", name)])
    rest = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + rest


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return tree
