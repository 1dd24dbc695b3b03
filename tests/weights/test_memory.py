"""A conversion holds little more than its result, whatever the size of the checkpoint."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.weights.checkpoints import CONFIG, tensors

pytestmark = pytest.mark.one_python

WIDE = CONFIG | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}  # 810 MB in float32

# Prints by how many bytes the process's own memory grew at most, and how large the result is. The pages of the
# checkpoint that are mapped into memory do not count: the system takes them back when it needs them.
MEASURE = """
import sys, threading
from pathlib import Path
from tests.weights.checkpoints import converted

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

before, over = own(), threading.Event()
peak = before
def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, own())
watcher = threading.Thread(target=watch)
watcher.start()
_, arrays = converted(Path(sys.argv[1]))
over.set()
watcher.join()
print(max(peak, own()) - before, sum(array.nbytes for array in arrays.values()))
"""


def write_hollow(folder: Path) -> None:
    """A checkpoint whose numbers are all zero and take no room on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE))
    header, end = {}, 0
    thin = tensors(WIDE | {"intermediate_size": 1})  # only names and, but for F, shapes are wanted
    for name, tensor in thin.items():
        shape = [WIDE["intermediate_size"] if size == 1 else size for size in tensor.shape]
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what memory is a process's own")
def test_peak(tmp_path: Path):
    write_hollow(tmp_path / "hollow")
    command = [sys.executable, "-c", MEASURE, tmp_path / "hollow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    grown, size = map(int, done.stdout.split())
    assert size > 8e8
    assert grown < 1.2 * size
