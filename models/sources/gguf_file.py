"""A GGUF file: its metadata and its tensors, mapped into memory and dequantised one at a time.

Reads the table of tensors itself: the reader of the `gguf` package first builds array objects for each word of the
vocabulary, which takes longer than all the rest. Constants and dequantisation are that package's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import mmap
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from models.config import ModelConfig
from models.errors import ModelError
from models.gguf_metadata import Cursor
from models.sources.base import BFLOAT16, FLOAT32, TensorInfo
from models.sources.fields import Faults

_ROPE_DIVISORS = "rope_freqs.weight"
_DEFAULT_ALIGNMENT = 32


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    begin: int  # bytes from the start of the file
    size: int


class GGUFFile:
    """See `models.sources.base.Source`.

    Args:
      path: the file.

    Raises:
      ModelError: the file is missing, damaged, or not of a supported model; all faults are named.
    """

    form = "gguf"

    def __init__(self, path: Path):
        self.path = path
        self.metadata, self._entries = _read_header(path)
        self._data = np.memmap(path, np.uint8, mode="r")
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(entry.shape, entry.type.name, _dtype(entry.type)) for name, entry in self._entries.items()
        }
        divisors = self.tensors.get(_ROPE_DIVISORS)
        self.config = ModelConfig.from_gguf(
            self.metadata,
            {name: info.shape for name, info in self.tensors.items()},
            self.read(_ROPE_DIVISORS).ravel().tolist() if divisors and divisors.dtype else (),
            what=f"{path}",
        )

    def read(self, name: str) -> np.ndarray:
        """See `Source.read`."""
        entry = self._entries[name]
        data = self._data[entry.begin : entry.begin + entry.size]
        if entry.type == GGMLQuantizationType.BF16:
            return data.view(BFLOAT16).reshape(entry.shape)
        row_bytes = entry.size // max(1, math.prod(entry.shape[:-1]))
        return dequantize(data.reshape(*entry.shape[:-1], row_bytes), entry.type).reshape(entry.shape)


@cache
def _dtype(type: GGMLQuantizationType) -> np.dtype | None:
    """What a tensor of this type is read as; None if `gguf` cannot dequantise it, which only a trial tells."""
    if type == GGMLQuantizationType.BF16:
        return BFLOAT16
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[type][1]), np.uint8), type)
    except NotImplementedError:  # how the library says that it cannot read a type
        return None
    return FLOAT32


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, _Entry]]:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _TensorCursor(data)
            metadata = cursor.metadata()
            entries = cursor.entries(metadata)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    except (ValueError, RecursionError, struct.error) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch or convert it again.") from error
    length = path.stat().st_size
    cut = [name for name, entry in entries.items() if entry.begin + entry.size > length]
    if cut:
        last = max(entry.begin + entry.size for entry in entries.values())
        raise Faults(
            f"{path}",
            [f"it is cut off: {length:,} bytes where {last:,} are needed", f"{cut[0]} is lost"],
            "fetch it again",
        )
    return metadata, entries


class _TensorCursor(Cursor):
    """Reads on, behind the metadata."""

    def entries(self, metadata: dict[str, Any]) -> dict[str, _Entry]:
        (num_tensors,) = struct.unpack_from("<Q", self._data, 8)  # behind magic and version
        found = [(self._string(), self._entry()) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise ValueError(f"general.alignment={alignment!r}, where a multiple of 8 is wanted")
        start = -(-self._at // alignment) * alignment
        entries = {name: entry._replace(begin=start + entry.begin) for name, entry in found}
        if len(entries) < num_tensors:
            raise ValueError("two tensors have the same name")
        return entries

    def _entry(self) -> _Entry:
        num_axes = self._unpack("I")
        if not 1 <= num_axes <= 4:
            raise ValueError(f"a tensor of {num_axes} axes at byte {self._at}")
        shape = tuple(self._unpack("Q") for _ in range(num_axes))[::-1]  # the file names the fastest axis first
        type = GGMLQuantizationType(self._unpack("I"))
        block, block_bytes = GGML_QUANT_SIZES[type]
        if shape[-1] % block:
            raise ValueError(f"a row of {shape[-1]} does not divide into {type.name}'s blocks of {block}")
        return _Entry(shape, type, self._unpack("Q"), math.prod(shape) // block * block_bytes)
