"""A Hugging Face directory: config.json, and model.safetensors or the shards that model.safetensors.index.json names.

Opens files lazily and reads one tensor at a time. Knows nothing of what the tensors mean.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from models.config import ModelConfig
from models.errors import ModelError
from models.sources.base import BFLOAT16, FLOAT32, TensorInfo
from models.sources.fields import Faults, Fields, read_json

_DTYPES = {"BF16": BFLOAT16, "F16": FLOAT32, "F32": FLOAT32}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HuggingFaceDirectory:
    """See `models.sources.base.Source`.

    Args:
      path: the directory.

    Raises:
      ModelError: config.json or weight files are missing, damaged, or not of a supported model; the files are named.
    """

    form = "hf"

    def __init__(self, path: Path):
        self.path = path
        self.config = _config(path)
        self._shards, promised = _shards(path)
        self._home: dict[str, Any] = {}  # tensor name → the open shard that holds it
        self.tensors: Mapping[str, TensorInfo] = self._scan()
        lost = sorted(name for name in promised if name not in self.tensors)
        if lost:
            raise ModelError(
                f"{path / _INDEX} promises {len(lost)} tensors that its shards do not hold, the first {lost[0]}; "
                "fetch the model again."
            )

    def read(self, name: str) -> np.ndarray:
        """See `Source.read`."""
        with _naming(self._shards, self._home[name]):
            return self._home[name].get_tensor(name).astype(self.tensors[name].dtype, copy=False)

    def _scan(self) -> Mapping[str, TensorInfo]:
        tensors, faults = {}, []
        for file in self._shards:
            try:
                shard = safe_open(str(file), framework="numpy")
            except (OSError, SafetensorError) as error:
                faults.append(f"{file} is not a whole safetensors file ({error})")
                continue
            self._shards[file] = shard
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                piece = shard.get_slice(name)
                if name in tensors:
                    faults.append(f"{name} is in two shards, the second {file.name}")
                tensors[name] = TensorInfo(tuple(piece.get_shape()), piece.get_dtype(), _DTYPES.get(piece.get_dtype()))
                self._home[name] = shard
        if faults:
            raise Faults("The model's weights", faults, "fetch the model again")
        return tensors


def _config(path: Path) -> ModelConfig:
    """Where a model says more on how it ends, generation goes by generation_config.json."""
    values, what = read_json(path / "config.json"), f"{path / 'config.json'}"
    more = path / "generation_config.json"
    generation = Fields(read_json(more, absent_ok=True), [])
    if generation.has("eos_token_id"):
        values["eos_token_id"] = list(generation.integers("eos_token_id"))
        what += f", with the eos_token_id of {more.name},"
    if generation.problems:
        raise Faults(f"{more}", generation.problems, "correct it or fetch it again")
    return ModelConfig.from_hf(values, what=what)


def _shards(path: Path) -> tuple[dict[Path, Any], list[str]]:
    """The weight files, none opened yet, and the tensors that an index says are in them."""
    if not (path / _INDEX).exists():
        if (path / _SINGLE).exists():
            return {path / _SINGLE: None}, []
        other = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        raise ModelError(
            f"{path} has neither {_SINGLE} nor {_INDEX}"
            + (f", only {', '.join(other[:4])}; save the model as {_SINGLE} first." if other else "; fetch it again.")
        )
    weight_map = read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{path / _INDEX} has no weight_map of tensor names to file names; fetch it again.")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    missing = [name for name in names if not (path / name).is_file()]
    if outside or missing:
        raise ModelError(f"{path} lacks the weight files {', '.join(outside or missing)}; fetch the model again.")
    return {path / name: None for name in names}, list(weight_map)


@contextlib.contextmanager
def _naming(shards: Mapping[Path, Any], shard: Any):
    try:
        yield
    except (OSError, SafetensorError) as error:
        file = next(file for file, opened in shards.items() if opened is shard)
        raise ModelError(f"{file} cannot be read ({error}); fetch it again.") from error
