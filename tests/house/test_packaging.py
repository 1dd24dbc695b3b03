"""What pip installs is what setup.cfg says, whole and no more, and the scripts answer at once."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.declared import distribution, extras, pyproject, required, setup_cfg
from tests.house.imports import imports
from tests.house.tree import PACKAGES, ROOT, SCRIPTS, files

# Distributions that no module imports: why each is required all the same.
REQUIRED_UNSEEN = {
    "jaxlib": "the compiled half of jax, whose oldest release we name",
}
# What a benchmark in scripts/ uses if the reader has installed it: peers to compare us with, and a plotter.
OPTIONAL_IN_SCRIPTS = {"llama_cpp", "matplotlib", "torch", "transformers", "xllamacpp"}
TOP_LEVEL = {"absl-py": "absl", "orbax-checkpoint": "orbax"}  # where the module's name is not the distribution's


# The folders beside the scripts, which a script imports by their bare names: its own folder comes first on its path.
SCRIPT_ROOMS = {path.parent.name for path in (ROOT / SCRIPTS).glob("*/__init__.py")}


def entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.distribution("jpaged").entry_points.select(group="jpaged.models")


def test_installed_version_is_the_one_in_the_source():
    source = ast.parse((ROOT / "jpaged/__init__.py").read_text())
    [version] = [
        node.value.value
        for node in source.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__version__"
        and isinstance(node.value, ast.Constant)  # a literal: setuptools reads it without importing jax
    ]
    assert importlib.metadata.version("jpaged") == version


def test_extras_are_installed_metadata():
    assert extras() == {"tpu", "gpu", "inspect", "inspect-gpu", "plot", "dev"}
    declared = importlib.metadata.metadata("jpaged").get_all("Provides-Extra")
    assert set(declared or ()) == extras()


@pytest.mark.parametrize("extra", ["tpu", "gpu"])
def test_accelerator_extras_are_extras_of_jax(extra: str):
    [requirement] = setup_cfg()["options.extras_require"][extra].split()
    name = requirement.removeprefix("jax[").removesuffix("]")
    assert name in (importlib.metadata.metadata("jax").get_all("Provides-Extra") or ())


def test_every_loader_of_models_can_be_loaded():
    assert "default" in entry_points().names
    for entry in entry_points():
        assert callable(entry.load())


def test_the_oldest_python_is_one_fact():
    oldest = setup_cfg()["options"]["python_requires"].removeprefix(">=")
    assert importlib.metadata.metadata("jpaged")["Requires-Python"] == f">={oldest}"
    assert pyproject()["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert pyproject()["tool"]["pyright"]["pythonVersion"] == oldest


def test_what_is_imported_is_required_and_the_other_way_round():
    found = {one.imported.partition(".")[0] for one in imports(ROOT, PACKAGES)}
    found |= {one.imported.partition(".")[0] for one in imports(ROOT, (SCRIPTS,))} - OPTIONAL_IN_SCRIPTS
    found -= {*PACKAGES, SCRIPTS, *SCRIPT_ROOMS, *sys.stdlib_module_names}
    named = {TOP_LEVEL.get(name, name.replace("-", "_")) for name in required() - REQUIRED_UNSEEN.keys()}
    assert found - named == set(), "imported, and not in install_requires of setup.cfg"
    assert named - found == set(), "in install_requires of setup.cfg, and imported nowhere"


def test_a_wheel_holds_the_packages_whole_and_nothing_else(tmp_path: Path):
    source = tmp_path / "source"
    for path in files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."],
        cwd=source,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        check=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {str(path) for path in files() if path.parts[0] in PACKAGES and path.name != "README.md"}
    assert packed == wanted, (
        "a file of a package that is not code needs its kind in [options.package_data] of setup.cfg"
    )


SCRIPT_FILES = sorted(path.name for path in (ROOT / SCRIPTS).glob("*.py") if not path.name.startswith("_"))


def test_there_are_scripts():
    assert "decode.py" in SCRIPT_FILES


@pytest.mark.parametrize("script", SCRIPT_FILES)
def test_help_comes_without_importing_jax(script: str, tmp_path: Path):
    (tmp_path / "jax.py").write_text(
        "raise SystemExit('--help imported jax, which takes seconds: import it in main()')"
    )
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert script in done.stdout and "--" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_requirements_are_read():
    assert distribution("Foo_bar[x,y]>=1.0") == "foo-bar"
    assert {"jax", "orbax-checkpoint"} <= required()
    assert {"pytest", "pyright"} <= required("dev")


def test_a_program_beside_a_checkout_finds_the_package_and_its_rooms(tmp_path: Path):
    (tmp_path / "jpaged").mkdir()  # as a checkout is called
    program = tmp_path / "program.py"
    lines = "import jpaged", "layout = jpaged.cache.KVLayout(1, 2, 8, 1, 64)"
    program.write_text("\n".join((*lines, "print(jpaged.attention.best_layout(layout).order)")))
    told = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(program)], env=told, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["LCKNBD"], done.stderr
