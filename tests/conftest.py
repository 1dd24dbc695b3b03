"""How every test runs: on four CPU devices, strictly, and with the types and shapes of the packages checked.

- Types promote and ranks broadcast only where the code says so. Warnings are errors (pyproject.toml).
- Each function of the packages checks its arguments and results against its annotations, array shapes included. In
  production the annotations cost nothing.
- Executables are kept in `.cache/jax-tests`, so that a second run compiles little. A test about compiling asks for the
  fixture `no_executable_cache`.
"""

import os
import sys
from collections.abc import Iterator

if "jax" in sys.modules:
    raise RuntimeError(
        "jax was imported before tests/conftest.py could say how many devices it has; find the plugin that did"
    )

# Read when jax is imported and when it first meets a device; subprocesses (README, scripts) inherit them.
# Tests use four devices. XLA has a thread for each that it is told of: with jax 0.10, kernels that are interpreted on
# four need more than four, or three wait for the fourth, and that for a thread.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".lstrip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda or tpu: the same tests on a device

import jax
import jaxtyping
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

from scripts.common import compile_cache
from tests.house import typecheck
from tests.house.tree import ROOT

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

EXECUTABLES = ROOT / ".cache" / "jax-tests"
EXECUTABLES.mkdir(parents=True, exist_ok=True)
compile_cache.mend(EXECUTABLES)
jax.config.update("jax_compilation_cache_dir", str(EXECUTABLES))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# A limit makes JAX lock the folder. Without it, two test processes would read each other's half-written files.
jax.config.update("jax_compilation_cache_max_size", 2**30)

install_import_hook(["pallas_kernels", "jpaged", "models"], f"{typecheck.__name__}.check")

# A slow machine is no failure, and CI finds the same examples each time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture
def no_executable_cache() -> Iterator[None]:
    """Compiles for real, whatever an earlier run has left in the cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX decides once whether it uses a cache; this makes it decide anew
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def annotations_unchecked() -> Iterator[None]:
    """As a user's process is: without the check of annotations, which answers before ours could."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Fixtures that several folders of tests share stand below, those that load a model last.
