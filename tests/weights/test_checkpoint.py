"""jpaged.weights: what is saved comes back to the bit, where and as it is asked for, or with a clear error."""

import errno
import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, make_single_device_sharding

from jpaged import weights
from jpaged.weights import CheckpointError

TREE: dict[str, Any] = {
    "embed": {"weight": np.arange(8 * 12, dtype=np.float32).reshape(8, 12) / 7},
    "layers": {
        "attn": {"qkv": {"weight": (np.arange(2 * 4 * 8 * 3) % 251).reshape(2, 4, 8, 3).astype(ml_dtypes.bfloat16)}},
        "norm": {"scale": np.array([1.0, np.nan, -0.0, np.inf], np.float32)},
    },
    "steps": np.arange(4, dtype=np.int32),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    weights.save(tmp_path / "w", TREE)
    return tmp_path / "w"


@pytest.fixture
def mesh() -> Mesh:
    devices = jax.devices()
    assert len(devices) >= 2
    return Mesh(np.array(devices[:2]), ("model",))


def assert_same_bits(found: Any, expected: Any) -> None:
    def check(a: Any, b: np.ndarray) -> None:
        a = np.asarray(a)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()

    jax.tree.map(check, found, expected)


def test_round_trip(saved: Path):
    found = weights.restore(saved)
    assert_same_bits(found, TREE)
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(found))


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """As on a disk that is full: a larger file cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files_only")
def test_a_disk_that_takes_no_more_is_an_error_of_the_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(OSError, match="File too large") as error:
        weights.save(tmp_path / "w", {"a": np.zeros(100_000, np.float32)})
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path / "w"))
    assert not (tmp_path / "w").exists()
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_the_default_device_is_the_callers(saved: Path):
    with jax.default_device(jax.devices()[1]):
        found = weights.restore(saved)
    assert found["steps"].devices() == {jax.devices()[1]}


def test_saving_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        weights.save(tmp_path / "w", TREE)
        weights.restore(tmp_path / "w")
    assert not caplog.records
    assert not logging.getLogger("absl").filters


def test_abstract_reads_no_array(saved: Path):
    for part in saved.glob("*/0*"):  # every array's data
        part.write_bytes(bytes(part.stat().st_size))
    tree = weights.abstract(saved)
    assert tree["layers"]["attn"]["qkv"]["weight"] == jax.ShapeDtypeStruct((2, 4, 8, 3), ml_dtypes.bfloat16)
    assert weights.shapes(tree) == {
        "embed.weight": (8, 12),
        "layers.attn.qkv.weight": (2, 4, 8, 3),
        "layers.norm.scale": (4,),
        "steps": (4,),
    }


def test_one_sharding_for_all(saved: Path):
    found = weights.restore(saved, shardings=make_single_device_sharding(jax.devices()[1]))
    assert_same_bits(found, TREE)
    assert all(leaf.devices() == {jax.devices()[1]} for leaf in jax.tree.leaves(found))


def test_shardings_by_name_and_shape(saved: Path, mesh: Mesh):
    asked = {}

    def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
        asked[name] = shape
        return NamedSharding(mesh, PartitionSpec(None, "model") if "qkv" in name else PartitionSpec())

    found = weights.restore(saved, shardings=place)
    assert asked == weights.shapes(TREE)
    assert_same_bits(found, TREE)
    qkv = found["layers"]["attn"]["qkv"]["weight"]
    assert [shard.data.shape for shard in qkv.addressable_shards] == [(2, 2, 8, 3)] * 2
    for shard in qkv.addressable_shards:  # each device holds its own heads
        expected = TREE["layers"]["attn"]["qkv"]["weight"][shard.index]
        assert np.asarray(shard.data).tobytes() == expected.tobytes()
    assert found["embed"]["weight"].sharding.is_fully_replicated


def test_a_tree_of_shardings(saved: Path, mesh: Mesh):
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec("model")), TREE)
    found = weights.restore(saved, shardings=shardings)
    assert_same_bits(found, TREE)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == shardings


def test_sharded_arrays_can_be_saved(saved: Path, mesh: Mesh, tmp_path: Path):
    sharded = weights.restore(saved, shardings=NamedSharding(mesh, PartitionSpec("model")))
    weights.save(tmp_path / "again", sharded)
    assert_same_bits(weights.restore(tmp_path / "again"), TREE)


def test_chunks_do_not_show(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 64)
    weights.save(tmp_path / "w", TREE)
    assert len(list((tmp_path / "w" / "embed.weight").iterdir())) > 2
    assert_same_bits(weights.restore(tmp_path / "w", shardings=NamedSharding(mesh, PartitionSpec("model"))), TREE)


@pytest.mark.parametrize("dtype", ["bfloat16", np.dtype(ml_dtypes.bfloat16), jax.numpy.bfloat16])
def test_floats_are_cast_and_integers_are_not(saved: Path, dtype: Any):
    found = weights.restore(saved, dtype=dtype)
    expected = TREE["embed"]["weight"].astype(ml_dtypes.bfloat16)  # to nearest, ties to even
    assert_same_bits(found["embed"]["weight"], expected)
    assert found["steps"].dtype == np.int32
    assert weights.restore(saved, dtype="float32")["layers"]["attn"]["qkv"]["weight"].dtype == np.float32


def test_what_cannot_be_saved(saved: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="exists already"):
        weights.save(saved, TREE)
    with pytest.raises(CheckpointError, match=r"Only arrays can be saved; a.b are none. Try np.asarray"):
        weights.save(tmp_path / "x", {"a": {"b": "text"}})
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_restored(saved: Path, mesh: Mesh, tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        weights.restore(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty holds no whole checkpoint"):
        weights.restore(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="dtype='int8' must be a floating-point type"):
        weights.restore(saved, dtype="int8")
    everywhere = NamedSharding(mesh, PartitionSpec("model"))
    with pytest.raises(CheckpointError, match=r"lacks \['embed.weight', .*has \['other'\] too many. Give one"):
        weights.restore(saved, shardings={"steps": everywhere, "other": everywhere})
    with pytest.raises(CheckpointError, match=r"not fit the checkpoint\. layers\.attn\.qkv\.weight: .* Replicate"):
        # The last axis of qkv has 3 entries, for 2 devices.
        weights.restore(
            saved,
            shardings=lambda name, shape: (
                NamedSharding(mesh, PartitionSpec(*[None] * 3, "model")) if "qkv" in name else everywhere
            ),
        )


def test_damage_is_named(saved: Path):
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert len(files) > 8
    for file in files:
        whole = file.read_bytes()
        if not whole:
            continue
        name = str(file.relative_to(saved))
        file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=r"damaged|not valid JSON") as caught:
            weights.restore(saved)
        assert file.name in str(caught.value) and "again" in str(caught.value), name
        file.unlink()
        if file.name != "inventory.json":
            with pytest.raises(CheckpointError, match=f"{name} is missing"):
                weights.restore(saved)
        file.write_bytes(whole)
    assert_same_bits(weights.restore(saved), TREE)


def test_all_damage_comes_in_one_error(saved: Path):
    sizes = json.loads((saved / "inventory.json").read_text())
    for name in list(sizes)[:3]:
        (saved / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        weights.abstract(saved)
    assert str(caught.value).count("is missing") == 3


@pytest.mark.parametrize("content", ["[]", '{"a": "1"}', "7"])
def test_an_inventory_of_something_else(saved: Path, content: str):
    (saved / "inventory.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"inventory.json is not valid JSON of sizes; save or convert"):
        weights.restore(saved)


def test_checkpoints_of_others_have_no_inventory(saved: Path):
    (saved / "inventory.json").unlink()
    assert_same_bits(weights.restore(saved), TREE)
