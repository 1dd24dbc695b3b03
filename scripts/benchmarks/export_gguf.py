"""A GGUF file's tensors, dequantised and written again as float32 or float16, with all of its metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys
from gguf.quants import dequantize


def export(source: Path, target: Path, dtype: type[np.float32] | type[np.float16]) -> None:
    """Writes ``target``. Vectors (norms, biases) stay float32, as llama.cpp wants them."""
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    writer = GGUFWriter(target, architecture)
    own = {Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE, Keys.General.QUANTIZATION_VERSION}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in own:
            kind, inner = field.types[0], field.types[-1]
            if kind == GGUFValueType.ARRAY:
                writer.add_key_value(name, field.contents(), kind, sub_type=inner)
            else:
                writer.add_key_value(name, field.contents(), kind)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
