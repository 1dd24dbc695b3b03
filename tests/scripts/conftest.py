"""`decode.py` with a cache folder of the tests' own, in which the tiny model is converted once."""

import pytest

from tests.house.tree import ROOT
from tests.scripts.running import Script


@pytest.fixture(scope="session")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(
        "decode.py",
        {
            "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
        },
    )
