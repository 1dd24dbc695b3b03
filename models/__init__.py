"""Model families and how to load them: `load(name_or_path)` gives what `jpaged.LLM` runs.

A name is "default", the small model that is fetched once; a path is a Hugging Face directory, a GGUF file, or a
directory that scripts/convert.py has made. The first two are converted once into the cache folder.
"""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from jpaged import dtypes, weights
from jpaged.config import DType
from jpaged.model import LoadedModel
from models import cache, convert, default, stacks, tokenizers
from models.config import ModelConfig
from models.errors import ModelError
from models.llama import Llama
from models.paths import expand_home

__all__ = ["LoadedModel", "ModelConfig", "ModelError", "load"]

log = logging.getLogger(__name__)

_FORMS = {"cpu": stacks.unstack, "gpu": stacks.apart}  # of layers, where a stack of them is not what suits a platform


def load(name: str, *, dtype: DType = "auto", progress: bool | None = None) -> LoadedModel:
    """Loads a model onto the device, fetching and converting it first if need be.

    Args:
      name: "default" (SmolLM2-135M-Instruct), a Hugging Face directory, a GGUF file or a converted directory.
      dtype: "float32", "bfloat16", or "auto" for what suits the machine.
      progress: Whether to show progress bars; None shows them on a terminal.

    Raises:
      ModelError: there is no such model, or it cannot be fetched, read or converted.
    """
    folder = _converted(name, progress)
    config = ModelConfig.read(folder / "config.json")
    tokenizer = tokenizers.load_tokenizer(folder)
    if tokenizer is not None and (remark := tokenizers.check_fit(tokenizer, config.vocab_size, folder)):
        log.warning("%s", remark)
    model = Llama(config, name=name if name == "default" else Path(name).name)
    restored = weights.restore(folder / "weights", dtype=dtypes.resolve(dtype))
    if suited := _FORMS.get(jax.default_backend()):
        restored = {**restored, "layers": suited(restored["layers"])}
    return LoadedModel(model, restored, tokenizer, config)


def _converted(name: str, progress: bool | None) -> Path:
    """The converted directory of a model."""
    root = cache.default_cache_dir()
    if name == "default":
        source = default.fetch(root, progress=progress)
    else:
        if not name:
            raise ModelError("model='' names nothing; try --model=default, or the path of a model")
        source = expand_home(name)
        if not source.exists():
            raise ModelError(f"model={name!r} is neither 'default' nor an existing path; try --model=default")
        if convert.is_converted(source):
            convert.check(source)
            return source
    target = root / "models" / f"{source.resolve().stem}-{convert.fingerprint(source)[:16]}"
    convert.convert(source, target, progress=progress, way_out=cache.CACHE_ELSEWHERE)
    return target
