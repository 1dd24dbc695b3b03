"""The strictness that tests/conftest.py promises is really there: each promise is broken once, on purpose."""

import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import TypeCheckError, install_import_hook

from tests.house.tree import ROOT

SOURCE = """
from __future__ import annotations

import dataclasses
import functools

import jax
from flax import struct
from jaxtyping import Array, Float32, Int32


@struct.dataclass
class FlaxPool:
    free_N: Int32[Array, " N"]
    refs_N: Int32[Array, " N"]
    block_size: int = struct.field(pytree_node=False, default=4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JaxPool:
    free_N: Int32[Array, " N"]
    refs_N: Int32[Array, " N"]
    block_size: int = dataclasses.field(default=4, metadata={"static": True})


@functools.partial(jax.jit, static_argnames="times")
def scale(x_ST: Float32[Array, "S T"], by_S: Float32[Array, " S"], *, times: float = 1) -> Float32[Array, "S T"]:
    return x_ST * by_S[:, None] * times


def lies(x_S: Float32[Array, " S"]) -> Int32[Array, ""]:
    return x_S
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module imported the way in which conftest has the packages imported."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "strictness_sample.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch, install_import_hook("strictness_sample", "tests.house.typecheck.check"):
        patch.syspath_prepend(folder)
        yield importlib.import_module("strictness_sample")


def pools(sample: ModuleType) -> list:
    five, zeros = jnp.arange(5, dtype=jnp.int32), jnp.zeros(5, jnp.int32)
    return [kind(free_N=five, refs_N=zeros) for kind in (sample.FlaxPool, sample.JaxPool)]


def test_twice_as_many_cpu_devices_as_tests_use():
    """See conftest.py."""
    assert jax.device_count() == 8


def test_types_do_not_promote():
    with pytest.raises(Exception, match="promotion"):
        _ = jnp.int32(1) + jnp.arange(2.0)


def test_ranks_do_not_promote():
    with pytest.raises(ValueError, match="rank"):
        _ = jnp.ones((2, 3)) + jnp.ones(3)


def test_warnings_are_errors():
    with pytest.raises(UserWarning):
        warnings.warn("a warning", stacklevel=1)


@pytest.mark.parametrize("package", ["jpaged", "models", "pallas_kernels"])
def test_packages_are_imported_through_the_hook(package: str):
    spec = importlib.util.find_spec(package)
    assert spec is not None and type(spec.loader).__name__ == "_JaxtypingLoader"


def test_packages_come_from_this_checkout():
    import jpaged

    assert Path(jpaged.__file__).is_relative_to(ROOT)


def test_shapes_of_arguments_are_checked_through_jit(sample: ModuleType):
    x_ST = jnp.ones((2, 3))
    assert sample.scale(x_ST, jnp.ones(2)).shape == (2, 3)
    assert sample.scale(x_ST, jnp.ones(2), times=2).shape == (2, 3)  # an int is a float
    with pytest.raises(TypeCheckError, match="by_S"):
        sample.scale(x_ST, jnp.ones(3))  # S is 2


def test_dtypes_and_results_are_checked(sample: ModuleType):
    with pytest.raises(TypeCheckError, match="x_ST"):
        sample.scale(jnp.ones((2, 3), jnp.int32), jnp.ones(2))
    with pytest.raises(TypeCheckError, match="return value"):
        sample.lies(jnp.ones(2))


def test_fields_of_dataclasses_are_checked_together(sample: ModuleType):
    for pool in pools(sample):
        with pytest.raises(TypeCheckError, match="refs_N"):
            type(pool)(free_N=jnp.arange(5, dtype=jnp.int32), refs_N=jnp.zeros(4, jnp.int32))


def test_transformations_may_rebuild_dataclasses_around_anything(sample: ModuleType):
    for pool in pools(sample):
        assert jax.tree.map(lambda _: PartitionSpec(), pool).free_N == PartitionSpec()
        assert jax.eval_shape(lambda pool: pool, pool).free_N.shape == (5,)
        assert jax.device_get(pool).free_N.shape == (5,)
        stacked = jax.vmap(lambda pool, _: pool, in_axes=(None, 0))(pool, jnp.zeros(3))
        assert stacked.free_N.shape == (3, 5)
        jax.jit(lambda pool: pool).lower(jax.eval_shape(lambda pool: pool, pool)).compile()


def compiles_kept(name: str) -> int:
    return len(list((ROOT / ".cache" / "jax-tests").glob(f"jit_{name}*-cache")))


def compile_slowly(name: str, salt: float) -> None:
    """A function of that name: other processes may be testing at the same time."""

    def slow(x):
        for i in range(40):
            x = jax.lax.sort(jnp.tanh(x @ x) + i) * salt
        return x

    slow.__name__ = name
    jax.jit(slow).lower(jnp.ones((8, 8))).compile()


def test_executables_are_not_kept_with_the_fixture(no_executable_cache: None):
    compile_slowly("never_kept", 0.5)
    assert compiles_kept("never_kept") == 0


def test_executables_are_kept_without_the_fixture():
    compile_slowly("always_kept", 0.25)
    assert compiles_kept("always_kept") >= 1


GROUP = """
import os, pathlib, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(6))
def test_one(number):
    pathlib.Path(f"{number}.pid").write_text(str(os.getpid()))
"""


def test_a_group_of_tests_shares_a_process(tmp_path: Path):
    """Or each process makes the engines of each module: all passes, and takes twice as long."""
    (tmp_path / "test_group.py").write_text(GROUP)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n2",
        "--dist=loadgroup",
        f"--rootdir={tmp_path}",
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run(command, cwd=tmp_path, env=outer, check=True, capture_output=True, timeout=120)
    pids = [file.read_text() for file in tmp_path.glob("*.pid")]
    assert len(pids) == 6 and len(set(pids)) == 1
