"""`decode.py` with a cache folder of the tests' own: the tiny model is converted once, executables are kept."""

import pytest

from tests.house.tree import ROOT
from tests.scripts.running import Script


@pytest.fixture(scope="session")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Script:
    cache = tmp_path_factory.mktemp("cache")
    (cache / "jpaged").mkdir()
    kept = ROOT / ".cache" / "jax-tests"
    kept.mkdir(parents=True, exist_ok=True)
    (cache / "jpaged" / "xla").symlink_to(kept)
    return Script("decode.py", {"XDG_CACHE_HOME": str(cache)})
