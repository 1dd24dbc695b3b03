"""Turns a checkpoint from outside into a model directory of ours, whole or not at all.

    <directory>/config.json       the model's config (`ModelConfig.to_json`)
    <directory>/conversion.json   what it was converted from, and to which dtype
    <directory>/weights/          the parameters (`jpaged.weights`)
    <directory>/…                 the tokenizer's files, if the checkpoint has a tokenizer

Joins sources, tables and the checkpoint; each of them is elsewhere.
"""

import contextlib
import errno
import hashlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jpaged import weights
from models import cache, tokenizers
from models.config import FORMAT, ModelConfig
from models.conversions import llama
from models.conversions.rules import array_dtypes, convert_tensors, plan
from models.errors import ModelError
from models.llama import parameter_shapes
from models.paths import sizes_below
from models.sources.base import BFLOAT16, FLOAT32, Source
from models.sources.fields import Faults, read_json
from models.sources.gguf_file import GGUFFile
from models.sources.huggingface import HuggingFaceDirectory

_CONFIG, _RECORD, _WEIGHTS = "config.json", "conversion.json", "weights"
_DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
_DECISIVE = (".json", ".safetensors", ".jinja", ".gguf")  # files of a directory that a conversion may read
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_POLL_SECONDS = 0.2


def convert(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    progress: bool | None = None,
    way_out: str = "convert into a folder that can be written and has room",
    notify: Callable[[str], None] = cache.say,
) -> Path:
    """Makes the model directory `target` from a checkpoint, unless it is there already.

    Args:
      source: a Hugging Face directory, a GGUF file, or a directory that holds one GGUF file.
      target: the directory to make. It may exist if it is empty, or if it came from this source at this dtype.
      dtype: "float32" or "bfloat16"; None keeps the source's precision: bfloat16 stays so, and everything else,
        float16 and quantised types included, becomes float32, which holds it exactly.
      progress: show a bar on standard error; None shows it on a terminal.
      way_out: what to do where `target` cannot be written.
      notify: takes remarks, such as that another process is being waited for.

    Returns:
      `target`.

    Raises:
      ModelError: the source cannot be converted, or `target` holds something else; nothing is left behind.
    """
    source, target = Path(source), Path(target)
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(
            f"{dtype=} must be one of {', '.join(_DTYPES)}, or be left out to keep the source's precision."
        )
    if not source.exists():
        raise ModelError(f"There is no {source}; give a Hugging Face directory or a GGUF file.")
    _refuse_foreign(target)
    record = {"source": source.resolve().name, "fingerprint": fingerprint(source), "dtype": dtype}
    cache.build_once(
        target,
        lambda work: _build(work, source, record, progress, notify),
        what=f"the conversion of {source}",
        fault=_fault,
        way_out=way_out,
        notify=notify,
    )
    made = read_json(target / _RECORD)
    same = made.get("fingerprint") == record["fingerprint"]
    changed = "" if same else ", whose files are others, or were written since"
    if not same or made.get("dtype") != dtype:
        raise ModelError(
            f"{target} holds {made.get('source')} converted with dtype={made.get('dtype') or 'auto'}, and wanted is "
            f"{source} with dtype={dtype or 'auto'}{changed}; remove it, or convert elsewhere."
        )
    return target


def is_converted(path: Path) -> bool:
    """Whether `path` says that it is a model directory of ours; whether it is whole is for `check` to say."""
    try:
        return read_json(path / _CONFIG).get("format") == FORMAT
    except ModelError:
        return False


def check(converted: Path) -> None:
    """Looks whether a converted directory has the weights that its config needs; reads no array. Nothing later would
    notice: of a layer that only the config has, indexing makes the last one, run twice.

    Raises:
      ModelError: the weights are others, or the config or the checkpoint is damaged.
    """
    config = ModelConfig.read(converted / _CONFIG)
    try:
        stored = weights.shapes(weights.abstract(converted / _WEIGHTS))
    except weights.CheckpointError as error:
        raise ModelError(str(error)) from error
    wanted = parameter_shapes(config)
    if wrong := [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]:
        one = f"{wrong[0]} is {stored.get(wrong[0], 'absent')} and should be {wanted.get(wrong[0], 'absent')}"
        fault = f"its weights do not fit its config ({len(wrong)} arrays): {one}"
        raise Faults(f"{converted}", [fault], "correct its config, or convert the checkpoint again")


def open_source(path: Path) -> Source:
    """A checkpoint, opened for reading.

    Raises:
      ModelError: it is of no known form, damaged, or of a model that is not supported.
    """
    if path.is_file():
        return GGUFFile(path)
    if (path / _CONFIG).exists():
        if is_converted(path):
            raise ModelError(f"{path} is converted already; give the checkpoint that it came from, or use it as it is.")
        return HuggingFaceDirectory(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return GGUFFile(found[0])
    if found:
        raise ModelError(f"{path} holds {len(found)} GGUF files; name one of them, such as {found[0]}.")
    raise ModelError(f"{path} holds neither {_CONFIG} nor a GGUF file; give a Hugging Face directory or a GGUF file.")


def fingerprint(source: Path) -> str:
    """A key of a source: sha256 over the names, sizes, times of change and evenly spaced samples of the files that
    matter. It is the cheap check, which reads a megabyte of a file however large.

    A file that was written in place has another time, so another key, wherever in it the change is. A source that was
    moved, or copied with its times, keeps its key. A copy with times of its own (`cp` without `-p`) has another key: it
    is converted once more, or refused where somebody named the target. What the key cannot tell is a change between the
    samples by somebody who then puts the time back.

    Raises:
      ModelError: it is neither a file nor a directory.
    """
    if not source.is_file() and not source.is_dir():
        raise ModelError(f"{source} is neither a file nor a directory; give a Hugging Face directory or a GGUF file.")
    digest = hashlib.sha256()
    files = [source] if source.is_file() else [f for f in source.iterdir() if f.suffix in _DECISIVE and f.is_file()]
    for file in sorted(files):
        status = file.stat()
        size = status.st_size
        digest.update(f"{file.name}\0{size}\0{status.st_mtime_ns}\0".encode())
        step = max(size // _SAMPLES, _SAMPLE_BYTES)
        with open(file, "rb") as data:
            for offset in range(0, size, step):
                data.seek(offset)
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _build(
    work: Path, path: Path, record: dict[str, Any], progress: bool | None, notify: Callable[[str], None]
) -> None:
    source = open_source(path)
    config, table, note = llama.settle_tie(source)
    if note:
        notify(note)
    shapes = parameter_shapes(config)
    steps = plan(source, table, shapes, config)
    dtypes = array_dtypes(steps, source, _DTYPES.get(record["dtype"]))
    size = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
    if (free := shutil.disk_usage(work).free) < size:
        raise OSError(errno.ENOSPC, f"{size / 1e6:,.0f} MB are wanted, {free / 1e6:,.0f} MB are free")
    _save_tokenizer(source, config, work)  # before the weights: what fails should fail soon
    hidden = None if progress is None else not progress
    with tqdm(total=2 * size, unit="B", unit_scale=True, desc="reading", disable=hidden) as bar:
        tree = convert_tensors(source, steps, shapes, dtypes, config, bar.update)
        bar.set_description("writing")
        with _growth(work, bar):
            weights.save(work / _WEIGHTS, tree)
    (work / _CONFIG).write_text(config.to_json() + "\n", encoding="utf-8")
    (work / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _save_tokenizer(source: Source, config: ModelConfig, work: Path) -> None:
    """Checkpoints without one are whole all the same: such a model runs on ids."""
    if isinstance(source, GGUFFile) and "tokenizer.ggml.model" not in source.metadata:
        return
    tokenizer = tokenizers.load_tokenizer(source.path)
    if tokenizer is not None:
        tokenizers.check_fit(tokenizer, config.vocab_size, source.path)  # what it remarks, loading will say
        tokenizer.save(work)


@contextlib.contextmanager
def _growth(folder: Path, bar: Any) -> Iterator[None]:
    """Moves the bar by what is on disk, since Orbax does not tell how far it is."""
    begin, done = bar.n, threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            bar.update(max(0, begin + sum(sizes_below(folder)) - bar.n))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        bar.update(bar.total - bar.n)
    finally:
        done.set()
        watcher.join()


def _refuse_foreign(target: Path) -> None:
    """What is not ours is never replaced."""
    ours = target.is_dir() and (not any(target.iterdir()) or is_converted(target))
    if target.exists() and not ours:
        raise ModelError(f"{target} exists and is not a converted model; choose a directory that is new or empty.")


def _fault(target: Path) -> str | None:
    """Why a target that is there cannot be used, or None."""
    if not any(target.iterdir()):
        return "it is empty"
    try:
        check(target)
        read_json(target / _RECORD)
    except Faults as error:
        return "; ".join(error.faults)
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    return None
