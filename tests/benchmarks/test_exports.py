"""A model that is written for a peer is the same model."""

from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

import models
from models.errors import ModelError
from models.gguf_metadata import read_metadata
from models.rope_config import RopeConfig
from scripts.benchmarks import export_gguf, export_hf
from tests.models_tiny import apart, stacked, tiny

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize("family", ["llama", "llama3-rope"])
def test_a_hugging_face_directory_comes_back(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded, folder = tiny(family), tmp_path / "exported"
    folder.mkdir()
    export_hf.export(loaded, folder)
    again = models.load(str(folder), dtype="float32", progress=False)
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.weights, loaded.weights)


@pytest.mark.parametrize("form", [stacked, apart], ids=lambda form: form.__name__)
def test_however_layers_are_held_they_are_exported_alike(form):
    loaded = tiny("llama")
    one, other = (export_hf.hf_tensors(each.config, each.weights) for each in (loaded, form(loaded)))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_what_hugging_face_cannot_say_is_refused():
    import dataclasses

    config = tiny("llama").config
    odd = dataclasses.replace(config, rope=RopeConfig(type="divisors", divisors=(1.0,) * (config.head_dim // 2)))
    with pytest.raises(ModelError, match="rope type 'divisors'"):
        export_hf.hf_config(odd)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_gguf_file_keeps_metadata_and_values(dtype: type, tmp_path: Path):
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    values = np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 32)
    packed = quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "\n"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_uint32("general.quantization_version", 2)
    writer.add_tensor("matrix", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    export_gguf.export(source, target, dtype)
    before, after = read_metadata(source), read_metadata(target)
    assert after == {name: value for name, value in before.items() if name != "general.quantization_version"}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    assert tensors["matrix"].data.dtype == dtype
    assert tensors["vector"].data.dtype == np.float32
    exact = dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(tensors["matrix"].data, exact.astype(dtype))
    np.testing.assert_array_equal(tensors["vector"].data, values[0])
