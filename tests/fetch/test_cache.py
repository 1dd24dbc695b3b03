"""Folders that are made once and appear whole."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from models.cache import build_once, default_cache_dir
from models.errors import ModelError


def write_file(work: Path) -> None:
    (work / "file").write_text("whole")


def never(work: Path) -> None:
    raise AssertionError("built although it is there")


def hidden(folder: Path) -> list[str]:
    """Working folders that were left behind."""
    return [path.name for path in folder.iterdir() if ".tmp-" in path.name]


def test_built_once(tmp_path):
    target = tmp_path / "not" / "there" / "yet"
    assert build_once(target, write_file, what="it") == target
    assert build_once(target, never, what="it") == target
    assert [path.name for path in target.iterdir()] == ["file"]
    assert hidden(target.parent) == []
    assert target.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_a_sound_target_needs_no_writing(tmp_path):
    (tmp_path / "target").mkdir()
    build_once(tmp_path / "target", never, what="it")
    assert os.listdir(tmp_path) == ["target"]  # not even a lock


def test_appears_only_when_whole(tmp_path):
    def build(work: Path) -> None:
        write_file(work)
        assert work.parent == tmp_path
        assert not (tmp_path / "target").exists()

    build_once(tmp_path / "target", build, what="it")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, ModelError])
def test_a_failed_build_leaves_nothing(tmp_path, error):
    def build(work: Path) -> None:
        write_file(work)
        raise error("stop")

    with pytest.raises(error, match="stop"):
        build_once(tmp_path / "target", build, what="it")
    assert not (tmp_path / "target").exists()
    assert hidden(tmp_path) == []
    build_once(tmp_path / "target", write_file, what="it")


def test_a_thread_of_a_failed_build_that_still_writes_leaves_nothing(tmp_path):
    threads = []

    def build(work: Path) -> None:
        def write_on() -> None:
            for number in range(20):
                (work / f"{number}").mkdir(parents=True, exist_ok=True)
                time.sleep(0.01)

        threads.append(threading.Thread(target=write_on))
        threads[0].start()
        raise ModelError("stop")

    with pytest.raises(ModelError, match="stop"):
        build_once(tmp_path / "target", build, what="it")
    threads[0].join()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    for name in (".target.tmp-0123", ".other.tmp-0123", "target.tmp-0123"):
        write_folder(tmp_path / name)
    build_once(tmp_path / "target", write_file, what="it")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.tmp-0123",
        "target",
        "target.tmp-0123",
    ]


def test_the_lock_goes_with_its_holder_and_one_that_was_removed_meanwhile_does_not_count(tmp_path):
    """A waiter gets the lock of a file that is no longer there; by then a third process may have locked a new one."""
    inside, most = [0], [0]

    def build(work: Path) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        write_file(work)
        inside[0] -= 1

    def several() -> None:
        for _ in range(5):  # a fault each time, so that everybody builds
            build_once(tmp_path / "target", build, what="it", fault=lambda _: "old", notify=lambda _: None)

    threads = [threading.Thread(target=several) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def write_folder(folder: Path) -> None:
    folder.mkdir()
    write_file(folder)


def test_a_second_builder_waits_says_so_and_uses_the_result(tmp_path):
    """Two threads hold two locks, as two processes do: a flock belongs to the opened file."""
    building, waiting, notes = threading.Event(), threading.Event(), []

    def build(work: Path) -> None:
        building.set()
        assert waiting.wait(20)
        assert hidden(tmp_path) == [work.name]  # the one who waits must not take it for a leftover
        write_file(work)

    def note(message: str) -> None:
        notes.append(message)
        waiting.set()

    first = threading.Thread(target=build_once, args=(tmp_path / "target", build), kwargs={"what": "the first"})
    first.start()
    assert building.wait(20)
    build_once(tmp_path / "target", never, what="the second", notify=note)
    first.join()
    assert notes == [f"Waiting for another process to finish the second in {tmp_path}."]
    assert (tmp_path / "target" / "file").read_text() == "whole"


def fault(folder: Path) -> str | None:
    return None if (folder / "file").exists() else "no file"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to(path)])
def test_a_faulty_target_is_made_anew(tmp_path, make):
    notes, target = [], tmp_path / "target"
    make(target)
    build_once(target, write_file, what="it", fault=fault, notify=notes.append)
    assert (target / "file").exists()
    assert hidden(tmp_path) == []
    assert len(notes) == 1
    assert notes[0].startswith(f"{target} cannot be used (")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_a_place_elsewhere(tmp_path, there):
    disk, link = tmp_path / "disk", tmp_path / "here" / "target"
    disk.mkdir()
    link.parent.mkdir()
    link.symlink_to(disk / "large")
    if there:
        (disk / "large").mkdir()
    assert build_once(link, write_file, what="it", fault=fault, notify=lambda _: None) == link
    assert link.is_symlink() and not (disk / "large").is_symlink()
    assert [path.name for path in (disk / "large").iterdir()] == ["file"]
    assert (os.listdir(disk), os.listdir(link.parent)) == (["large"], ["target"])


@pytest.mark.parametrize("name", [".", "../target", "../link"])
def test_the_current_folder_is_not_pulled_away(tmp_path, monkeypatch, name):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path / "target")
    with pytest.raises(ModelError, match=f"^{tmp_path}/target is the current folder .*; name a folder in it"):
        build_once(Path(name), never, what="it", fault=fault)
    assert (sorted(os.listdir(tmp_path)), os.listdir(".")) == (["link", "target"], [])
    build_once(Path("model"), write_file, what="it", fault=fault)  # the way out
    write_file(Path("."))
    assert build_once(Path(name), never, what="it", fault=fault) == Path(name)  # nothing to replace


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "target")
    with pytest.raises(ModelError, match=f"^{tmp_path}/target is a mount point .*; name a folder in it"):
        build_once(tmp_path / "target", never, what="it", fault=fault)
    assert os.listdir(tmp_path) == ["target"]
    build_once(tmp_path / "target" / "model", write_file, what="it", fault=fault)


def test_a_target_that_cannot_be_moved_after_all_stays_and_nothing_else_does(tmp_path, monkeypatch):
    target, replace = tmp_path / "target", Path.replace
    target.mkdir()
    (target / "old").touch()

    def busy(path: Path, to: Path) -> Path:
        if path == target:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", busy)
    with pytest.raises(ModelError, match=rf"^The folder {tmp_path} cannot be written \(Device or resource busy\)"):
        build_once(target, write_file, what="it", fault=fault, notify=lambda _: None)
    assert (os.listdir(tmp_path), os.listdir(target)) == (["target"], ["old"])


@pytest.mark.parametrize("there", [True, False])
def test_what_somebody_put_there_meanwhile_is_theirs(tmp_path, there):
    target = tmp_path / "target"
    if there:
        target.mkdir()

    def build(work: Path) -> None:
        write_file(work)
        target.mkdir(exist_ok=True)
        (target / "thesis").touch()

    with pytest.raises(ModelError, match=rf"^The folder {tmp_path} cannot be written \(Directory not empty\)"):
        build_once(target, build, what="it", fault=fault, notify=lambda _: None)
    assert (os.listdir(tmp_path), os.listdir(target)) == (["target"], ["thesis"])


def test_a_faulty_target_stays_when_its_successor_fails(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(AssertionError):
        build_once(tmp_path / "target", never, what="it", fault=fault, notify=lambda _: None)
    assert (tmp_path / "target").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(tmp_path, number):
    def build(work: Path) -> None:
        write_file(work)
        raise OSError(number, os.strerror(number))

    with pytest.raises(ModelError, match=rf"^No room left in {tmp_path} \(.*XDG_CACHE_HOME"):
        build_once(tmp_path / "target", build, what="it")
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written(tmp_path, number):
    def build(work: Path) -> None:
        raise OSError(number, os.strerror(number), str(work / "file"))

    with pytest.raises(ModelError, match=rf"^The folder {tmp_path} cannot be written \(.*XDG_CACHE_HOME"):
        build_once(tmp_path / "target", build, what="it")


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_place_of_the_cache_folder(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot be written .*XDG_CACHE_HOME"):
        build_once(tmp_path / "file" / below / "target", write_file, what="it")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT])
@pytest.mark.parametrize("elsewhere", ["/somewhere/else", "source/weights", ".targets/file"])
def test_trouble_elsewhere_is_not_the_cache_folders(tmp_path, number, elsewhere):
    def build(work: Path) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / elsewhere))

    with pytest.raises(OSError, match=elsewhere) as error:
        build_once(tmp_path / "target", build, what="it")
    assert not isinstance(error.value, ModelError) and error.value.filename == str(tmp_path / elsewhere)


def test_too_many_open_files_are_no_fault_of_the_folder(tmp_path):
    def build(work: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(work / "file"))

    with pytest.raises(OSError, match="Too many open files") as error:
        build_once(tmp_path / "target", build, what="it")
    assert not isinstance(error.value, ModelError)


def test_a_folder_that_the_system_does_not_make():
    with pytest.raises(ModelError, match=r"^The folder /proc/nope cannot be written \(No such file.*XDG_CACHE_HOME"):
        build_once(Path("/proc/nope/target"), never, what="it")


def test_a_lock_that_is_no_file_is_named(tmp_path):
    (tmp_path / ".target.lock").mkdir()
    with pytest.raises(ModelError, match=rf"cannot be written \({tmp_path}/.target.lock: Is a directory\); set XDG"):
        build_once(tmp_path / "target", never, what="it")


def test_default_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "jpaged"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == tmp_path / ".cache" / "jpaged"
