"""A package registry on this machine: one wheel with one file, in a folder for `--find-links` or behind a server that
can stop half-way."""

import hashlib
import random
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from models.default import PackagedFile
from tests.house.tree import ROOT

CONTENT = random.Random(1).randbytes(3 << 20)  # larger than any pip reads at once, so that a bar can be seen to move
_WHEEL = "jpaged_fake-1.0-py3-none-any.whl"
_DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: jpaged-fake\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


def make_wheel(folder: Path, content: bytes = CONTENT) -> PackagedFile:
    """Writes the wheel into `folder`. What is returned always asks for CONTENT."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("jpaged_fake/model.bin", content)
        for name, text in _DIST_INFO.items():
            archive.writestr(f"jpaged_fake-1.0.dist-info/{name}", text)
    return PackagedFile(
        name="Fake",
        package="jpaged-fake",
        version="1.0",
        wheel=_WHEEL,
        wheel_bytes=path.stat().st_size,
        member="jpaged_fake/model.bin",
        member_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


class SlowRegistry:
    """Serves `folder` as a simple index. The first download stops half-way until `go_on` is set."""

    def __init__(self, folder: Path):
        self.data = (folder / _WHEEL).read_bytes()
        self.half_sent, self.go_on, self.hung_up = (threading.Event() for _ in range(3))
        self.num_downloads = 0
        self.url = ""

    @property
    def pip_options(self) -> list[str]:
        return ["--isolated", "--index-url", self.url]

    def send(self, request: BaseHTTPRequestHandler) -> None:
        is_wheel = request.path.endswith(".whl")
        body = self.data if is_wheel else f'<!DOCTYPE html><a href="/{_WHEEL}">{_WHEEL}</a>'.encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        self.num_downloads += is_wheel
        if is_wheel and self.num_downloads == 1:
            request.wfile.write(body[: len(body) // 2])
            request.wfile.flush()
            self.half_sent.set()
            self.go_on.wait(60)
            body = body[len(body) // 2 :]
        request.wfile.write(body)


@contextmanager
def serve(folder: Path) -> Iterator[SlowRegistry]:
    registry = SlowRegistry(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                registry.send(self)
            except ConnectionError:  # the downloader is no more
                self.close_connection = True
                registry.hung_up.set()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield registry
        finally:
            registry.go_on.set()
            server.shutdown()
            thread.join()


def start_fetch(cache_dir: Path, source: PackagedFile, pip_options: list[str]) -> subprocess.Popen[str]:
    """`models.default.fetch` in a process of its own, which hears Ctrl-C even if the tests run in the background."""
    program = (
        "import pathlib, signal, sys; from models.default import PackagedFile, fetch; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"fetch(pathlib.Path(sys.argv[1]), source={source!r}, pip_options=sys.argv[2:])"
    )
    command = [sys.executable, "-c", program, str(cache_dir), *pip_options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
