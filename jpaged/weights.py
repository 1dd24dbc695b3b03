"""Weights on disk: an Orbax checkpoint of nested dicts of arrays, restored straight into shardings and a dtype.

Knows neither models nor names of parameters. Arrays are stored uncompressed (weights hardly compress, and decompressing
them would take most of a restore) and in chunks, so that each device reads its own part. They are plain Zarr, not
Orbax's default OCDBT, which held nearly all of a 7 GB checkpoint in memory once more while it was saved (measured).
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, make_single_device_sharding

_CHUNK_BYTES = 1 << 24
_INVENTORY = "inventory.json"  # file → size; without it, Orbax meets a cut file as an error that names neither


class CheckpointError(ValueError):
    """A checkpoint is missing or damaged, or does not have what was asked of it."""


def save(path: Path, tree: Any) -> None:
    """Writes a checkpoint; it appears whole or not at all.

    Args:
      path: the directory to make. It must not exist.
      tree: nested dicts with string keys; leaves are NumPy or JAX arrays, which may be sharded.

    Raises:
      CheckpointError: `path` exists already, or a leaf is no array.
      OSError: the system refuses to write it, such as a full disk.
    """
    path = Path(path).absolute()
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already; remove it, or save elsewhere.")
    wrong = [name for name, leaf in _named(tree) if not isinstance(leaf, (np.ndarray, jax.Array))]
    if wrong:
        raise CheckpointError(f"Only arrays can be saved; {', '.join(wrong)} are none. Try np.asarray on them.")
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    types = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),  # nobody changes them meanwhile
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=types)
    with _quiet(), _system_errors(path), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=chunks))
    if jax.process_index() == 0:
        (path / _INVENTORY).write_text(json.dumps(_sizes(path), indent=1), encoding="utf-8")


def abstract(path: Path) -> Any:
    """The checkpoint's tree with `jax.ShapeDtypeStruct` leaves; reads no array.

    Raises:
      CheckpointError: there is no checkpoint at `path`, or it is damaged.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory, so it holds no checkpoint; check the path.")
    _check_inventory(path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata
    if metadata is None:
        raise CheckpointError(f"{path} holds no whole checkpoint; save or convert it again.")
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), metadata.tree)


def restore(path: Path, *, shardings: Any = None, dtype: Any = None) -> Any:
    """The checkpoint's arrays, each put where it belongs as it is read.

    Args:
      path: the directory that `save` made.
      shardings: one `Sharding` for all arrays, or a tree of them like the checkpoint's, or a function of an array's
        dotted name and shape, such as ("layers.attn.qkv.weight", (32, 8, 768, 4096)). None: all on the default device.
      dtype: cast floating-point arrays to it; None keeps what was saved, bit for bit.

    Returns:
      The tree, with `jax.Array` leaves.

    Raises:
      CheckpointError: there is no checkpoint at `path`, it is damaged, `shardings` is another tree or does not divide
        an array, or `dtype` is not a floating-point one.
    """
    path = Path(path).absolute()
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise CheckpointError(f"{dtype=} must be a floating-point type, such as 'float32' or 'bfloat16'.")
    stored = abstract(path)
    placed = _shardings_like(stored, shardings)
    _check_divisible(stored, placed)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, _cast(leaf.dtype, dtype), sharding=sharding),
        stored,
        placed,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Dotted name → shape of each leaf of a tree of arrays, abstract or real."""
    return {name: tuple(leaf.shape) for name, leaf in _named(tree)}


@contextlib.contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """TensorStore reports the system's refusals as ValueErrors."""
    try:
        yield
    except ValueError as error:
        if code := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns that there was no OCDBT to merge, which is as it should be, and prints errors that it also raises."""

    def is_news(record: logging.LogRecord) -> bool:
        told = record.getMessage()
        return "Skipping merge of OCDBT" not in told and "raised an exception" not in told

    logger = logging.getLogger("absl")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def _cast(stored: Any, wanted: Any) -> Any:
    return stored if wanted is None or not jnp.issubdtype(stored, jnp.floating) else jnp.dtype(wanted)


def _shardings_like(stored: Any, shardings: Any) -> Any:
    if shardings is None:
        (device,) = jnp.zeros(()).devices()  # whatever the caller made the default
        shardings = make_single_device_sharding(device)
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda _: shardings, stored)
    if callable(shardings):
        place: Callable[..., Any] = shardings
        return jax.tree.map_with_path(lambda path, leaf: place(_name(path), tuple(leaf.shape)), stored)
    wanted, given = {name for name, _ in _named(stored)}, {name for name, _ in _named(shardings)}
    if wanted != given:
        raise CheckpointError(
            f"`shardings` must have one leaf for each array of the checkpoint; it lacks {sorted(wanted - given)} and "
            f"has {sorted(given - wanted)} too many. Give one `Sharding` for all, or a tree like `abstract(path)`."
        )
    return shardings


def _check_divisible(stored: Any, shardings: Any) -> None:
    faults = []
    for (name, leaf), sharding in zip(_named(stored), jax.tree.leaves(shardings), strict=True):
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise CheckpointError(
            f"`shardings` does not fit the checkpoint. {'; '.join(faults)}. Replicate these, or use fewer devices."
        )


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Sharding))
    return [(_name(path), leaf) for path, leaf in leaves]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _sizes(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}


def _check_inventory(path: Path) -> None:
    """Checkpoints that something other than `save` has written have none, and are taken as they are."""
    if not (path / _INVENTORY).exists():
        return
    try:
        expected = json.loads((path / _INVENTORY).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # RecursionError: brackets within brackets, thousands deep
        expected = None
    if not isinstance(expected, dict) or not all(type(size) is int for size in expected.values()):
        raise CheckpointError(f"{path / _INVENTORY} is not valid JSON of sizes; save or convert the model again.")
    found = _sizes(path)
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [
        f"{name} has {found[name]:,} bytes instead of {size:,}"
        for name, size in expected.items()
        if name in found and found[name] != size
    ]
    if faults:
        raise CheckpointError(f"{path} is damaged: {'; '.join(faults)}. Save or convert the model again.")
