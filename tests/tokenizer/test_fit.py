"""Whether a tokenizer and a model belong together: what is refused, what is only said, and where."""

from pathlib import Path

import pytest

import models
from jpaged.tokenizer import HFTokenizer
from models.convert import convert
from models.errors import ModelError
from models.tokenizers import check_fit
from tests.tokenizer import backends
from tests.weights.checkpoints import CONFIG, write_hf

SIZE, BOS, EOS = 263, 260, 261  # of backends.byte_level


def tokenizer(**options) -> HFTokenizer:
    return HFTokenizer(backends.byte_level(), **options)


def checkpoint(folder: Path, rows: int) -> Path:
    """A Hugging Face directory with that tokenizer, and an embedding of so many rows."""
    write_hf(folder, CONFIG | {"vocab_size": rows})
    backends.byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("rows", [SIZE, SIZE + 1, 10 * SIZE])
def test_rows_without_an_id_are_usual(rows: int):
    assert check_fit(tokenizer(bos_token_id=BOS, eos_token_ids=(EOS,)), rows, Path("m")) is None


@pytest.mark.parametrize("rows", [SIZE - 1, 251])  # 105 % of 251 is 263.55
def test_a_few_ids_without_a_row_are_remarked(rows: int):
    remark = check_fit(tokenizer(), rows, Path("m"))
    expected = f"of m: it has {SIZE} ids, and the model's embedding has {rows} rows; the last {SIZE - rows} ids cannot"
    assert remark is not None and expected in remark


@pytest.mark.parametrize(
    ("rows", "ends", "reasons"),
    [
        (250, {}, ["it is another model's"]),  # 105 % of 250 is 262.5
        (EOS, {"bos_token_id": BOS, "eos_token_ids": (EOS,)}, ["its BOS or EOS 261 is past the last row"]),
        (BOS, {"bos_token_id": BOS, "eos_token_ids": (5, EOS)}, ["its BOS or EOS 260, 261 is past"]),
        (100, {"bos_token_id": BOS}, ["another model's", "its BOS or EOS 260 is past"]),
    ],
)
def test_the_tokenizer_of_another_model_is_refused(rows: int, ends: dict, reasons: list[str]):
    with pytest.raises(ModelError) as caught:
        check_fit(tokenizer(**ends), rows, Path("m"))
    for part in (f"has {SIZE} ids, and the model's embedding has {rows} rows", "; give the one that came", *reasons):
        assert part in str(caught.value)


def test_loading_says_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = checkpoint(tmp_path / "hf", SIZE - 1)
    for _ in ("converted", "found converted"):
        caplog.clear()
        loaded = models.load(str(folder), dtype="float32", progress=False)
        said = [record.getMessage() for record in caplog.records if record.name == "models"]
        assert len(said) == 1 and "263 ids" in said[0] and "262 rows" in said[0]
    assert loaded.sampled_vocab == SIZE - 1


def test_conversion_and_loading_refuse_alike(tmp_path: Path):
    with pytest.raises(ModelError, match=r"hf cannot be used: it has 263 ids.* 250 rows"):
        convert(checkpoint(tmp_path / "hf", 250), tmp_path / "target")
    assert not (tmp_path / "target").exists()
    (tmp_path / "hf" / "tokenizer.json").unlink()
    target = convert(tmp_path / "hf", tmp_path / "target")
    tokenizer().save(target)
    with pytest.raises(ModelError, match=r"target cannot be used: it has 263 ids.* 250 rows"):
        models.load(str(target), dtype="float32", progress=False)
