"""The key–value part of a GGUF file, as plain Python values. Knows no key, and does not look at tensors.

The `gguf` package's reader makes array objects for every string and every length, which takes seconds for a
vocabulary; a tokenizer needs only this part, and in milliseconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from gguf import GGUFValueType

from models.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of the GGUF file at `path`: numbers, strings, and lists of them.

    Raises:
      ModelError: there is no such file, or it is not GGUF, or cut off, or of another version or byte order.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Cursor(data).metadata()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    # ValueError: an empty file, a bad magic, text that is not UTF-8. RecursionError: lists in lists, thousands deep.
    except (ValueError, RecursionError, struct.error) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch or convert it again.") from error


class Cursor:
    """Reads a GGUF file from its start: the header and all metadata, in the one order that there is."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if (magic := self._take(4)) != _MAGIC:
            raise ValueError(f"it begins with {magic!r} instead of {_MAGIC!r}")
        version = self._unpack("I")
        if version not in (2, 3):  # a big-endian 3 reads as 3 << 24
            raise ValueError(f"version {version} in little-endian order, where 2 or 3 is wanted")
        _num_tensors, num_keys = self._unpack("Q"), self._unpack("Q")
        return {self._string(): self._value(self._unpack("I")) for _ in range(num_keys)}

    def _take(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"cut off at byte {len(self._data)}, {self._at} needed")
        return self._data[begin : self._at]

    def _unpack(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._unpack("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            item, length = self._unpack("I"), self._unpack("Q")
            if item in _SCALARS:
                layout = f"<{length}{_SCALARS[item]}"
                return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
            return [self._value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} at byte {self._at} is unknown")
        return self._unpack(_SCALARS[kind])
