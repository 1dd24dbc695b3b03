"""Every picture that a script can draw is drawn."""

import struct

import pytest

from scripts.benchmarks import plot
from scripts.benchmarks.sharing import PAPER, Asked, Found
from scripts.inspection import drawing
from tests.benchmarks.made_up import results

TIMED = {"device": "v6e", "jax": "0.12", "share_of_copy": 0.5}
SHARES = [
    {**TIMED, "case": case, "backend": backend} for case, backend in [("one", "tpu"), ("one", "xla"), ("two", "tpu")]
]
SCHEDULES = [
    {"chip": chip, "case": "decode", "cycles_per_token": 1.5, "bandwidth_bound": 4.0} for chip in ("v6e", "tpu7x")
]
COPIED = [{"chip": chip, "case": case} for chip in ("A100", "H200") for case in ("decode_bf16_b16", "prefill_bf16_b16")]


@pytest.mark.parametrize("kind", [".png", ".svg", ".pdf"])
def test_every_picture(tmp_path, kind):
    shared = [Found(Asked(case, 4, 8, 8, 8), used=3, unshared=4) for case in PAPER]
    draw = {
        "rates": lambda path: plot.rates([results()], path),
        "saved": lambda path: plot.saved(shared, "title", path),
        "shares": lambda path: plot.shares(SHARES, path),
        "one share": lambda path: plot.shares(SHARES[:1], path),
        "schedules": lambda path: drawing.draw(SCHEDULES, path),
        "copies": lambda path: drawing.draw([*SCHEDULES, *COPIED], path),
    }
    for name, into in draw.items():
        path = tmp_path / f"{name}{kind}"
        plot.check(str(path))
        into(str(path))
        drawn = path.read_bytes()
        if kind == ".png":
            assert drawn.startswith(b"\x89PNG"), name
            assert all(side >= 200 for side in struct.unpack(">II", drawn[16:24])), name
        assert len(drawn) > 2000, name


def test_without_the_plotter_it_is_said_at_once(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plot.check("rates.png")
