"""What a checkpoint is to the conversion: a config, and named tensors that are read one at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from models.config import ModelConfig

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


class TensorInfo(NamedTuple):
    """A tensor that has not been read.

    Attributes:
      shape: slowest axis first.
      kind: how the file stores it, in the file's own words, such as "BF16" or "Q4_1".
      dtype: what `Source.read` gives: bfloat16 where stored so, float32 for all else that can be read (float16 fits
        into float32 exactly, and into bfloat16 not); None where it cannot be read.
    """

    shape: tuple[int, ...]
    kind: str
    dtype: np.dtype | None


@runtime_checkable
class Source(Protocol):
    """A checkpoint that is open for reading.

    Attributes:
      path: the file or directory, for messages.
      form: "hf" or "gguf"; which names and which row order its tensors have.
      config: what the checkpoint says of the model.
      tensors: everything in it, by name.
    """

    path: Path
    form: str
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its `TensorInfo.dtype`; perhaps a read-only view of the file.

        Raises:
          ModelError: its file cannot be read.
        """
        ...
