"""The converted directory: it restores to what the checkpoint held, appears at once, and replaces nothing."""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import models
from jpaged import weights
from models import convert as module
from models.config import ModelConfig
from models.convert import convert, fingerprint, is_converted
from models.errors import ModelError
from models.tokenizers import load_tokenizer
from tests.fixtures import GOLDEN, smollm2_gguf
from tests.scripts.running import Script, finish
from tests.weights.checkpoints import CONFIG, L, converted, flat, tensors, write_gguf, write_hf

SCRIPT = Script("convert.py", {})


def notes() -> tuple[list[str], dict]:
    found: list[str] = []
    return found, {"notify": found.append, "progress": False}


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_what_is_in_it(form: str, tmp_path: Path):
    source = write_hf(tmp_path / "hf") if form == "hf" else write_gguf(tmp_path / "model.gguf")
    target = tmp_path / "deep" / "down" / "target"
    assert not is_converted(target)
    assert convert(source, target) == target
    assert is_converted(target)
    config, expected = converted(source)
    assert ModelConfig.read(target / "config.json") == config
    found = flat(weights.restore(target / "weights"))
    assert found.keys() == expected.keys()
    for path, array in found.items():
        assert np.asarray(array).tobytes() == expected[path].tobytes(), path
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "conversion.json", "weights"]


def test_golden_weights_keep_their_precision(tmp_path: Path):
    convert(GOLDEN / "tiny" / "llama", tmp_path / "kept")
    convert(GOLDEN / "tiny" / "llama", tmp_path / "wide", dtype="float32")
    kept, wide = (flat(weights.restore(tmp_path / name / "weights")) for name in ("kept", "wide"))
    for path in kept:
        assert kept[path].dtype == ml_dtypes.bfloat16 and wide[path].dtype == np.float32
        np.testing.assert_array_equal(np.asarray(kept[path]).astype(np.float32), np.asarray(wide[path]))


def test_rounding_to_bfloat16(tmp_path: Path):
    convert(write_hf(tmp_path / "hf"), tmp_path / "target", dtype="bfloat16")
    found = flat(weights.restore(tmp_path / "target" / "weights"))
    expected = tensors()["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    assert np.asarray(found["embed.weight"]).tobytes() == expected.tobytes()
    with pytest.raises(ModelError, match="dtype='float16' must be one of float32, bfloat16"):
        convert(tmp_path / "hf", tmp_path / "other", dtype="float16")


def test_again_is_at_once_and_touches_nothing(tmp_path: Path):
    source, target = write_hf(tmp_path / "hf"), tmp_path / "target"
    convert(source, target)
    before = {file: file.stat().st_mtime_ns for file in target.rglob("*")}
    shutil.copytree(source, tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "moved")
    said, options = notes()
    convert(source, target, **options)
    convert(tmp_path / "moved", target, **options)  # the same model at another place
    assert before == {file: file.stat().st_mtime_ns for file in target.rglob("*")}
    assert not said


def test_a_target_of_another_source_or_dtype_is_refused(tmp_path: Path):
    source, target = write_hf(tmp_path / "hf"), tmp_path / "target"
    convert(source, target)
    other = write_hf(tmp_path / "other", held={name: tensor + 1 for name, tensor in tensors().items()})
    with pytest.raises(
        ModelError, match=r"target holds hf .*, whose files are others, or were written since; remove it"
    ):
        convert(other, target)
    with pytest.raises(ModelError, match=r"with dtype=auto, and wanted is .* with dtype=float32; remove it"):
        convert(source, target, dtype="float32")
    assert_usable(target)


@pytest.mark.parametrize("source", ["/dev/null", "pipe"])
def test_what_is_neither_file_nor_directory_is_refused(tmp_path: Path, source: str):
    os.mkfifo(tmp_path / "pipe")  # which would be waited for
    with pytest.raises(ModelError, match=f"{source} is neither a file nor a directory"):
        convert(tmp_path / source, tmp_path / "target")
    with pytest.raises(ModelError, match=f"{source} is neither a file nor a directory"):
        models.load(str(tmp_path / source))
    with pytest.raises(ModelError, match="model='' names nothing"):
        models.load("")


def assert_usable(target: Path) -> None:
    assert module._fault(target) is None


def test_keys_of_checkpoints(tmp_path: Path):
    a = write_hf(tmp_path / "a")
    b = Path(shutil.copytree(a, tmp_path / "b"))
    assert fingerprint(a) == fingerprint(b)
    (a / "README.md").write_text("no part of a conversion")
    assert fingerprint(a) == fingerprint(b)
    held = tensors()
    held["model.norm.weight"][-1] += 1  # a small file is sampled whole
    write_hf(b, held=held)
    for file in b.iterdir():
        shutil.copystat(a / file.name, file)  # so that the times do not tell
    assert fingerprint(a) != fingerprint(b)


def test_a_change_that_no_sample_reads_is_another_key(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 23))  # 256 samples of 4 KiB, 32 KiB apart
    before, changed = fingerprint(file), file.stat().st_mtime_ns
    assert fingerprint(file) == before
    with open(file, "r+b") as data:
        data.seek(5000)  # between the first sample and the second
        data.write(b"x")
    os.utime(file, ns=(changed, changed + 1))
    assert fingerprint(file) != before
    os.utime(file, ns=(changed, changed))  # what the key cannot tell
    assert fingerprint(file) == before
    file.write_bytes(bytes((1 << 23) + 1))
    os.utime(file, ns=(changed, changed))
    assert fingerprint(file) != before


def test_a_source_that_changed_in_place_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SAMPLES", 1)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 8)  # of the weights, the length of their table
    source = write_hf(tmp_path / "hf")
    for step in (0, 1):
        write_hf(source, held={name: tensor + step for name, tensor in tensors().items()})
        os.utime(source / "model.safetensors", ns=(step, step))
        loaded = models.load(str(source), dtype="float32", progress=False)
        expected = tensors()["model.norm.weight"] + step
        np.testing.assert_array_equal(np.asarray(loaded.weights["final_norm"]["scale"]), expected)


def test_a_copy_with_times_of_its_own_is_refused_where_the_target_was_named(tmp_path: Path):
    source, target = write_hf(tmp_path / "hf"), convert(tmp_path / "hf", tmp_path / "target")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(
        ModelError, match=r"whose files are others, or were written since; remove it, or convert elsewhere"
    ):
        convert(source, target)
    assert_usable(target)


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_not_ours_is_never_replaced(kind: str, tmp_path: Path):
    source, target = write_hf(tmp_path / "hf"), tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    else:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("mine")
        (tmp_path / "mine").rename(target) if kind == "directory" else target.symlink_to(tmp_path / "mine")
    with pytest.raises(ModelError, match="exists and is not a converted model"):
        convert(source, target)
    assert (target if kind == "file" else target / "thesis.txt").read_text() == "mine"
    with pytest.raises(ModelError, match="exists and is not a converted model"):
        convert(source, source)


def test_an_empty_directory_serves(tmp_path: Path):
    (tmp_path / "target").mkdir()
    convert(write_hf(tmp_path / "hf"), tmp_path / "target", notify=lambda note: None)
    assert_usable(tmp_path / "target")


@pytest.mark.parametrize("name", [".", "../link"])
def test_the_current_folder_is_refused_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, target = write_hf(tmp_path / "hf", CONFIG, {}), tmp_path / "target"  # without tensors: reading would tell
    target.mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(target)
    with pytest.raises(ModelError, match=r"target is the current folder .*; name a folder in it that does not exist"):
        convert(source, Path(name))
    assert sorted(file.name for file in tmp_path.rglob("*") if file.parent != source) == ["hf", "link", "target"]
    write_hf(source)
    assert_usable(convert(source, Path("model")))


def test_a_link_to_an_empty_directory_fills_that(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "target").symlink_to("disk")
    source = write_hf(tmp_path / "hf")
    assert convert(source, tmp_path / "target", notify=lambda note: None) == tmp_path / "target"
    assert (tmp_path / "target").is_symlink()
    assert_usable(tmp_path / "disk")
    convert(source, tmp_path / "target")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["disk", "hf", "target"]


@pytest.mark.parametrize("more", [-1, 1])
def test_a_directory_that_is_named_must_fit_its_config(more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = convert(write_hf(tmp_path / "hf"), tmp_path / "target")
    (target / "conversion.json").unlink()  # where it came from is of no interest here
    models.load(str(target), dtype="float32")
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | {"num_layers": L + more}))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("read before it was checked")

    monkeypatch.setattr(weights, "restore", never)
    told = rf"target cannot be used: its weights do not fit its config \(6 arrays\): .* is \({L}, .* be \({L + more}, "
    with pytest.raises(ModelError, match=told):
        models.load(str(target), dtype="float32")


@pytest.mark.parametrize(("gone", "reason"), [("weights", "is no directory"), ("weights/embed.weight", "is missing")])
def test_a_directory_that_is_named_must_be_whole(gone: str, reason: str, tmp_path: Path):
    target = convert(write_hf(tmp_path / "hf"), tmp_path / "target")
    shutil.rmtree(target / gone)
    with pytest.raises(ModelError, match=f"weights.* {reason}"):
        models.load(str(target), dtype="float32")


@pytest.mark.parametrize("damage", ["version", "weights", "record", "half a record"])
def test_a_damaged_conversion_is_made_anew(damage: str, tmp_path: Path):
    source, target = write_hf(tmp_path / "hf"), tmp_path / "target"
    convert(source, target)
    if damage == "version":
        values = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(values | {"version": 0}))
    elif damage == "weights":
        shutil.rmtree(target / "weights" / "embed.weight")
    elif damage == "record":
        (target / "conversion.json").unlink()
    else:
        (target / "conversion.json").write_text('{"source": "hf"')
    said, options = notes()
    convert(source, target, **options)
    assert len(said) == 1 and "making it anew" in said[0]
    assert_usable(target)


def test_a_head_that_contradicts_the_config_is_noted(tmp_path: Path):
    tied = CONFIG | {"tie_word_embeddings": True}
    held = tensors(tied) | {"lm_head.weight": tensors()["lm_head.weight"]}
    said, options = notes()
    target = convert(write_hf(tmp_path / "hf", tied, held), tmp_path / "target", **options)
    assert len(said) == 1 and "says tie_word_embeddings and holds an lm_head.weight of its own" in said[0]
    assert not ModelConfig.read(target / "config.json").tie_word_embeddings


def test_a_failed_conversion_leaves_nothing(tmp_path: Path):
    source = write_hf(tmp_path / "hf", CONFIG | {"num_hidden_layers": 3}, tensors(CONFIG))
    with pytest.raises(ModelError, match="missing"):
        convert(source, tmp_path / "out" / "target")
    assert [file.name for file in (tmp_path / "out").iterdir()] == []


def test_no_room_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ModelError, match=r"No room left in .* are wanted"):
        convert(write_hf(tmp_path / "hf"), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_sources_that_are_no_checkpoint(tmp_path: Path):
    with pytest.raises(ModelError, match=r"There is no .*nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "target")
    done = convert(write_hf(tmp_path / "hf"), tmp_path / "done")
    with pytest.raises(ModelError, match="is converted already"):
        convert(done, tmp_path / "target")


class TestScript:
    """scripts/convert.py, as people run it."""

    # Large enough to be met in the middle: 4 matrices of 64 MB.
    LARGE = CONFIG | {"vocab_size": 32_768, "hidden_size": 512, "num_hidden_layers": 1, "tie_word_embeddings": False}

    def large(self, folder: Path) -> Path:
        held = tensors(self.LARGE)
        return write_hf(folder, self.LARGE, held)

    def test_converts_and_says_where(self, tmp_path: Path):
        done = SCRIPT.run(f"--source={GOLDEN / 'tiny' / 'llama3-rope'}", f"--target={tmp_path / 'target'}")
        assert (done.status, done.out, done.err) == (0, f"{tmp_path / 'target'}\n", "")
        assert_usable(tmp_path / "target")

    def test_help_teaches_and_does_not_wait_for_jax(self):
        done = SCRIPT.run("--help", environment={"JAX_PLATFORMS": "none", "PYTHONPROFILEIMPORTTIME": "1"})
        assert done.status == 0 and "--source" in done.out and "scripts/decode.py --model" in done.out
        imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
        assert "absl" in imported and not imported & {"jax", "numpy", "models", "jpaged"}

    def test_a_source_that_is_not_there_is_said_before_jax_is_met(self, tmp_path: Path):
        arguments = f"--source={tmp_path}/nowhere", f"--target={tmp_path}/t"
        done = SCRIPT.run(*arguments, environment={"PYTHONPROFILEIMPORTTIME": "1"})
        assert done.status == 2 and f"There is no {tmp_path}/nowhere; give a" in done.err
        imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
        assert "absl" in imported and not imported & {"jax", "numpy", "models", "jpaged"}

    def test_smollm2(self, tmp_path: Path):
        target = tmp_path / "smollm2"
        done = SCRIPT.run(f"--source={smollm2_gguf()}", f"--target={target}")
        assert done.status == 0
        tokenizer = load_tokenizer(target)
        assert tokenizer is not None and tokenizer.encode("Hello") == [19556]
        shapes = weights.shapes(weights.abstract(target / "weights"))
        assert sum(math.prod(shape) for shape in shapes.values()) == 134_515_008

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ([], "must both be given; try --help"),
            (["--source=nowhere", "--target=t"], "There is no nowhere"),
            (["--source=nowhere", "--target=t", "--dtype=int8"], "dtype"),
            (["--sauce=nowhere"], "sauce"),
            (["--source=~no-such-user-of-this-machine/m", "--target=t"], "There is no ~no-such-user"),
            ([f"--source={GOLDEN}", "--target=~no-such-user-of-this-machine/t"], "write that folder out"),
        ],
    )
    def test_errors_are_one_line_and_status_2(self, arguments: list[str], reason: str):
        done = SCRIPT.run(*arguments)
        assert done.status == 2 and done.out == ""
        assert len(done.complaints) == 1 and reason in done.complaints[0]

    def test_two_at_once_make_one(self, tmp_path: Path):
        source, target = self.large(tmp_path / "hf"), tmp_path / "target"
        running = [SCRIPT.start(f"--source={source}", f"--target={target}") for _ in range(2)]
        done = [finish(process) for process in running]
        assert [one.status for one in done] == [0, 0], [one.err for one in done]
        assert_usable(target)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "target"]

    def interrupted(self, tmp_path: Path, by: signal.Signals) -> subprocess.Popen[bytes]:
        """A conversion that gets a signal as soon as its working folder shows."""
        source = self.large(tmp_path / "hf")
        process = SCRIPT.start(f"--source={source}", f"--target={tmp_path / 'target'}")
        limit = time.monotonic() + 120
        while not list(tmp_path.glob(".target.tmp-*")):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.002)
        process.send_signal(by)
        return process

    def test_ctrl_c_leaves_nothing(self, tmp_path: Path):
        done = finish(self.interrupted(tmp_path, signal.SIGINT))
        assert (done.status, done.out, done.err) == (130, "", "")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"]

    def test_a_killed_conversion_never_shows_and_is_swept_up(self, tmp_path: Path):
        process = self.interrupted(tmp_path, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert not (tmp_path / "target").exists()
        convert(tmp_path / "hf", tmp_path / "target", progress=False)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "target"]
        assert_usable(tmp_path / "target")
