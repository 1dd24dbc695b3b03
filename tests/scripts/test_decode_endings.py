"""`decode.py` that is stopped: Ctrl-C and a reader who goes away."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.scripts.running import SECONDS, TINY, Script, abandon, finish

pytestmark = [pytest.mark.xdist_group("decode"), pytest.mark.one_python]

PROMPTS = 2000  # of 100 tokens, two at a time: more than any test waits for


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """What makes a long run of JSON lines and --stats."""
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt_token_ids": [{1 + i % 300}]}}\n' for i in range(PROMPTS)))
    return [*TINY, f"--prompts_file={tmp_path}/p.jsonl", "--max_tokens=100", "--ignore_eos", "--json", "--stats"]


@pytest.fixture
def long(decode: Script, asked: list[str]) -> subprocess.Popen[bytes]:
    """A long run that has printed nothing yet."""
    return decode.start(*asked)


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode()


def test_ctrl_c_prints_what_there_is(long: subprocess.Popen[bytes]):
    begun = first_line(long)
    time.sleep(0.2)
    long.send_signal(signal.SIGINT)
    done = finish(long)
    assert done.status == 130
    found = [json.loads(line) for line in [begun, *done.out.splitlines()]]
    reasons = [one["finish_reason"] for one in found]
    over = reasons.count("length")
    assert 1 <= over < PROMPTS
    assert reasons == ["length"] * over + ["abort"] * (len(reasons) - over)
    assert reasons.count("abort") <= 2  # none, if both have just begun
    assert all(0 < len(one["token_ids"]) < 100 for one in found[over:])
    assert [one["index"] for one in found] == list(range(len(found)))
    assert "KV blocks at peak" in done.err


def test_ctrl_c_while_starting_is_quiet(long: subprocess.Popen[bytes]):
    time.sleep(0.5)  # the import of jax alone takes longer
    long.send_signal(signal.SIGINT)
    done = finish(long)
    assert (done.status, done.out, done.err) == (130, "", "")


@pytest.mark.parametrize("sign", ["models/*", "xla/*"])  # the model is being converted, steps are being compiled
def test_ctrl_c_while_loading_is_quiet(decode: Script, asked: list[str], tmp_path: Path, sign: str):
    process = decode.start(*asked, environment={"XDG_CACHE_HOME": str(tmp_path)})
    until = time.monotonic() + SECONDS
    while not any((tmp_path / "jpaged").glob(sign)) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.status, done.out, done.err) == (130, "", "")


def test_waiting_for_standard_input_is_said(decode: Script):
    process = decode.start("--prompts_file=-", stdin=subprocess.PIPE)
    assert process.stderr is not None
    assert b"waiting for prompts on standard input" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.status, done.out, done.err) == (130, "", "")


def test_a_reader_who_goes_away_ends_it_quietly(long: subprocess.Popen[bytes]):
    first_line(long)
    done = abandon(long)
    assert (done.status, done.err) == (141, "")


def test_help_may_go_unread(decode: Script):
    done = abandon(decode.start("--help"))
    assert done.status == 141 and done.err == ""


def test_help_teaches_without_jax(decode: Script):
    begun = time.perf_counter()
    done = decode.run("--help")
    assert done.status == 0 and done.err == ""
    assert time.perf_counter() - begun < 1.5  # importing jax alone takes as long
    for word in ("python scripts/decode.py", "--prompts_file=TEXT", "Memory and batching:", "Default: 128."):
        assert word in done.out


def test_output_that_cannot_be_written_is_one_line(decode: Script):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:
        done = finish(decode.start("--help", stdout=full))
    assert (done.status, done.complaints) == (2, ["decode.py: [Errno 28] No space left on device"])
