"""Home folders that nobody knows, and folders whose files vanish while one looks."""

import os
import pwd
from pathlib import Path

import pytest

import models
from models.errors import ModelError
from models.paths import expand_home, sizes_below

NOBODY = "~no-such-user-of-this-machine/model"


def test_home_folders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expand_home("~/model") == Path("/home/somebody/model")
    for text in ("model", "./~/model", "/a/~/model"):
        assert expand_home(text) == Path(text)


def test_a_home_folder_that_nobody_knows(monkeypatch: pytest.MonkeyPatch):
    for use in (expand_home, models.load):
        with pytest.raises(ModelError, match=f"'{NOBODY}' begins with a home folder .* write that folder out, or './~"):
            use(NOBODY)

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")  # as in a container that runs as a number without a name
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ModelError, match="'~/model' begins with a home folder that cannot be found"):
        expand_home("~/model")


def test_sizes_below(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, size in (("one.whl", 1), ("a/two.whl", 20), ("a/b/three.log", 300)):
        (tmp_path / name).write_bytes(bytes(size))
    assert sorted(sizes_below(tmp_path)) == [1, 20, 300]
    assert sorted(sizes_below(tmp_path, ".whl")) == [1, 20]
    assert sizes_below(tmp_path / "nowhere") == []


def test_what_vanishes_while_one_looks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept").write_bytes(bytes(5))
    (tmp_path / "listed").symlink_to("gone")  # as a file that goes between the list and the look
    scandir = os.scandir

    def too_late(path):
        if os.fspath(path) == str(tmp_path / "folder"):
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", too_late)
    assert sizes_below(tmp_path) == [5]
    assert not (tmp_path / "folder").exists()
