"""What scripts share: work in threads, and files that are replaced whole."""

import os
import threading

import pytest

from scripts.common import at_once, whole_file


def test_results_come_as_they_are_there():
    first_may_go_on = threading.Event()

    def slow():
        yield "slow 1"
        assert first_may_go_on.wait(30)
        yield "slow 2"

    found = at_once.merged([slow, lambda: ["quick"], lambda: ["third"]], 2)
    seen = [next(found) for _ in range(3)]
    assert set(seen) == {"slow 1", "quick", "third"}
    first_may_go_on.set()
    assert list(found) == ["slow 2"]
    assert list(at_once.merged([], 2)) == []


def test_what_a_part_raises_is_raised():
    def bad():
        yield 1
        raise ValueError("no")

    found = at_once.merged([bad], 2)
    assert next(found) == 1
    with pytest.raises(ValueError, match="no"):
        next(found)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    whole_file.write(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        whole_file.write(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    whole_file.write(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o444 == 0o444


def test_where_no_file_can_be(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        whole_file.check(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        whole_file.check(tmp_path / "no" / "file")
    with pytest.raises(ValueError, match="cannot be written to"):
        whole_file.check(type(tmp_path)("/proc/file"))
    whole_file.check(tmp_path / "file")
    assert not list(tmp_path.iterdir())
