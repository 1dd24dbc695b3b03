"""The outside of scripts: sizes, the bar, Ctrl-C."""

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from scripts.common import command, progress
from scripts.common.interrupt import Interrupt
from tests.house.tree import ROOT


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_asks_and_the_second_insists():
    reached = []
    with Interrupt() as asked:
        asked.worth_saving = True
        interrupt()
        reached.append(asked.wanted)
        interrupt()
        reached.append("not this")
    assert reached == [True]
    assert asked.wanted


def test_an_interrupt_with_nothing_to_save_does_not_wait():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as asked:
        interrupt()
        pytest.fail("went on")
    assert asked.wanted
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_came_back_as_another_error_is_one():
    with Interrupt() as asked:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise ImportError("while initializing the extension") from None
    assert asked.wanted


def test_an_interrupt_that_was_dropped_is_raised_again(capsys: pytest.CaptureFixture[str]):
    class Deaf:
        def __del__(self) -> None:
            interrupt()

    with Interrupt() as asked:
        Deaf()
        for _ in range(1000):
            time.sleep(0.001)
        pytest.fail("went on")
    assert asked.wanted
    assert capsys.readouterr().err == ""


def test_an_interrupt_that_was_swallowed_is_met_by_the_next_context():
    with Interrupt() as asked:
        try:
            interrupt()
        except KeyboardInterrupt:
            reached = True
        with Interrupt():
            reached = False
    assert asked.wanted and reached


def test_an_interrupt_that_was_swallowed_is_raised_again():
    with Interrupt() as asked:
        try:
            interrupt()
        except:  # noqa: E722 (as JAX does it)
            reached = True
        for _ in range(1000):
            time.sleep(0.001)
        pytest.fail("went on")
    assert asked.wanted and reached
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_whoever_cleans_up_is_not_disturbed():
    cleaned = []

    @contextlib.contextmanager
    def folder() -> Iterator[None]:
        try:
            yield
        finally:
            time.sleep(0.2)
            cleaned.append("in finally")

    with Interrupt() as asked:
        try:
            with folder():
                interrupt()
        except BaseException as error:  # whatever gets through is what the test asks about
            time.sleep(0.2)
            cleaned.append("in except")
            raise ValueError("as it came back") from error
    assert asked.wanted
    assert cleaned == ["in finally", "in except"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_of_given_up_work_fail_silently(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        logging.getLogger("theirs").error("cannot go on")
        raise ValueError("my files are gone")

    def run() -> None:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    before = threading.excepthook
    heard = []
    threading.excepthook = lambda failed: heard.append(failed.exc_value)
    try:
        with Interrupt():
            run()
            assert len(heard) == len(caplog.messages) == 1
            try:
                interrupt()
            finally:
                run()
    finally:
        threading.excepthook = before
    assert len(heard) == len(caplog.messages) == 1
    assert capsys.readouterr().err == ""
    logging.getLogger("theirs").error("heard again")
    assert len(caplog.messages) == 2


def test_other_errors_pass():
    with pytest.raises(ValueError, match="mine"), Interrupt():
        raise ValueError("mine")


@pytest.mark.parametrize(("number", "way_out"), [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "free some room")])
def test_what_the_system_refuses_comes_with_a_way_out(number: int, way_out: str, capsys: pytest.CaptureFixture[str]):
    assert command._report(OSError(number, os.strerror(number), "a/file")) == command.FAULT
    said = capsys.readouterr().err
    assert f"{os.strerror(number)}: a/file; " in said and way_out in said


def test_a_bar_comes_late_on_a_terminal_and_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.05)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    before = threading.active_count()
    with progress.Progress("quick"):
        pass
    assert capsys.readouterr().err == ""
    with progress.Progress("waiting", 7, "prompts") as bar:
        bar.done = 3
        time.sleep(0.4)
        with bar.aside():
            print("text")
    drawn = capsys.readouterr().err
    assert "waiting 3 of 7 prompts" in drawn
    assert drawn.endswith("\r")
    assert threading.active_count() <= before + 1  # tqdm has a thread of its own


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.01)
    with progress.Progress("waiting") as bar:
        time.sleep(0.1)
        with bar.aside():
            print("text")
    assert capsys.readouterr() == ("text\n", "")


@pytest.mark.parametrize("status", [130, 141])
def test_an_interrupted_script_leaves_without_tidying_up(status: int):
    """The compiler or a step may be at work still, and then Python's own end is a segmentation fault."""
    program = f"""
import atexit
from common import command
atexit.register(print, "tidying up")
print("what there is")
command.run(lambda: {status}, "", {{}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "what there is\n", "")
