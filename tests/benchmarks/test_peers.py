"""Talking to a peer, with a stand-in for it."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from models.errors import ModelError
from scripts.benchmarks import peers
from scripts.benchmarks.peers import Peer, PeerError
from scripts.benchmarks.workloads import Workload
from tests.models_tiny import tiny

WORKLOAD = Workload(((1, 2), (3,)), (4, 2), 2)

# Reads what it is given, answers each turn; the third line of a program is what a turn does.
GOOD = """
import json, sys
spec = json.load(open(sys.argv[1]))
print(json.dumps({"name": "stand-in " + spec["dtype"], "details": str(spec["threads"])}), flush=True)
for _ in sys.stdin:
    print(json.dumps({"seconds": 2.0, "outputs": [[0] * n for n in spec["outputs"]]}), flush=True)
"""
SHORT = GOOD.replace("[0] * n", "[0] * (n - 1)")
ABSENT = "import no_such_module_as_this"
DIES = GOOD.replace("    print", "    sys.exit('it gave up')\n    print")

Start = Callable[[str], AbstractContextManager[Peer]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def with_program(program: str) -> AbstractContextManager[Peer]:
        path = tmp_path / "peer.py"
        path.write_text(program)
        monkeypatch.setitem(peers.PROGRAMS, "transformers", str(path))
        return peers.start("transformers", sys.executable, tiny("llama"), None, "float32", 3, WORKLOAD)

    return with_program


def test_a_peer_takes_turns(start: Start):
    with start(GOOD) as peer:
        assert (peer.name, peer.details) == ("stand-in float32", "3")
        for _ in range(2):
            assert peer.run() == (2.0, [[0] * 4, [0] * 2])


def test_its_process_ends_with_the_context(start: Start):
    with start(GOOD) as peer:
        process = peer._process
        assert process.poll() is None
    assert process.poll() is not None


def test_other_numbers_of_tokens_are_noticed(start: Start):
    with start(SHORT) as peer, pytest.raises(PeerError, match=r"made 4 tokens instead of 6.*--peer_python"):
        peer.run()


def test_a_python_without_it_is_told_what_is_missing(start: Start):
    with pytest.raises(PeerError, match=r"No module named 'no_such_module_as_this'.*--peer_python"), start(ABSENT):
        pass


def test_a_peer_that_dies_says_its_last_words(start: Start):
    with start(DIES) as peer, pytest.raises(PeerError, match="it gave up"):
        peer.run()


def test_a_python_that_is_none():
    wanted = ("transformers", "/no/such/python", tiny("llama"), None, "float32", 2, WORKLOAD)
    with pytest.raises(PeerError, match="--peer_python=/no/such/python does not run"), peers.start(*wanted):
        pass


def test_llama_cpp_needs_a_gguf_file():
    wanted = ("llama.cpp", sys.executable, tiny("llama"), None, "float32", 2, WORKLOAD)
    with pytest.raises(ModelError, match="try --model=default"), peers.start(*wanted):
        pass


def test_which_models_come_from_a_gguf_file():
    assert peers.gguf_source("some/model.gguf") == Path("some/model.gguf")
    assert peers.gguf_source("some/folder") is None
