"""The benchmark scripts, with a cache folder of the tests' own."""

from collections.abc import Callable

import pytest

from tests.house.tree import ROOT
from tests.scripts.running import Script


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Script]:
    cache = tmp_path_factory.mktemp("cache")
    (cache / "jpaged").mkdir()
    kept = ROOT / ".cache" / "jax-tests"
    kept.mkdir(parents=True, exist_ok=True)
    (cache / "jpaged" / "xla").symlink_to(kept)
    return lambda name: Script(name, {"XDG_CACHE_HOME": str(cache)})
