"""Setting up: `.ci/venv` as a person on a bare machine meets it, with stand-ins for Python that install nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.declared import setup_cfg
from tests.house.tree import ROOT

# Answers the questions of .ci/venv, and makes environments whose python is a copy of itself. What it was asked to do is
# in $LOG. $BROKEN lists what fails: ensurepip (making an environment with pip), pip (pip of its own), install.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    -c*) printf '%s\\n' "$VERSION" "$0" /usr "$NEW_ENOUGH"; exit ;;
    *--version) [[ $0 == */bin/python || $BROKEN != *pip* ]]; exit ;;
esac
echo "$*" >>"$LOG"
case "$*" in
    "-m venv --without-pip "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; [[ $BROKEN != *ensurepip* ]] ;;
    "-m pip --python "*) [[ $BROKEN != *pip,* ]] ;;
    "-m pip install "*) [[ $BROKEN != *install* ]] ;;
    *) false ;;
esac
"""
ABSENT = "#!/usr/bin/env bash\nexit 127\n"
MADE, INSTALLED, INSTALLED_DEV = "-m venv .venv", "install -e .", "install -e .[dev]"
TPU_COMPILER = "install --quiet --no-deps --target .venv/libtpu libtpu==0.0.52"
# The stand-in says the same to every question; a real Python would name its jax's version here.
GPU_COMPILER = (
    "install --quiet --no-deps --target .venv/cuda jax-cuda13-plugin==3.12.1 jax-cuda13-pjrt==3.12.1 "
    "nvidia-cuda-crt==13.5.37 nvidia-cuda-nvcc==13.5.37 nvidia-cuda-nvdisasm==13.5.37 nvidia-cuda-runtime==13.5.37 "
    "nvidia-nvvm==13.5.37"
)


class Machine:
    """A checkout and a `python3`, and what `.ci/venv` did with them."""

    def __init__(self, folder: Path):
        self.checkout = folder / "a checkout"  # people have spaces in their paths
        self.path = folder / "path"
        self.log = folder / "log"
        (self.checkout / "jpaged").mkdir(parents=True)
        self.path.mkdir()
        self.log.touch()
        for name in ("setup.cfg", "pyproject.toml", "jpaged/__init__.py", ".ci/venv"):
            (self.checkout / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        self.provide("python3", PYTHON)
        for name in ("virtualenv", "uv", *(f"python3.{minor}" for minor in range(11, 15))):
            self.provide(name, ABSENT)

    def provide(self, name: str, script: str) -> None:
        (self.path / name).write_text(script)
        (self.path / name).chmod(0o755)

    def set_up(
        self, *extras: str, python: str = "python3", version: str = "3.12.1", broken: str = "", new_enough: bool = True
    ) -> str:
        """What `.ci/venv` printed; `did` tells what it had Python do."""
        self.log.write_text("")
        done = subprocess.run(
            [self.checkout / ".ci/venv", ".venv", python, *extras],
            env={
                "PATH": f"{self.path}{os.pathsep}{os.environ['PATH']}",
                "LOG": str(self.log),
                "BROKEN": broken,
                "VERSION": version,
                "NEW_ENOUGH": str(int(new_enough)),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode == 0) is self.ready, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def ready(self) -> bool:
        return (self.checkout / ".venv" / ".ready").exists()

    @property
    def did(self) -> list[str]:
        """The steps, without pip's options."""
        return [
            line.replace("-m pip ", "").replace("--progress-bar off ", "") for line in self.log.read_text().splitlines()
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_time_makes_it_and_the_second_does_nothing(machine: Machine):
    assert "is ready" in machine.set_up()
    assert machine.did == [MADE, INSTALLED]
    assert machine.set_up() == ""
    assert machine.did == []


def test_extras_are_added_and_never_taken_away(machine: Machine):
    machine.set_up()
    machine.set_up("dev")
    assert machine.did == [INSTALLED_DEV, TPU_COMPILER, GPU_COMPILER]
    machine.set_up()
    assert machine.did == []


@pytest.mark.parametrize("name", ["setup.cfg", "pyproject.toml"])
def test_changed_declarations_are_installed_again(machine: Machine, name: str):
    machine.set_up("dev")
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    machine.set_up()
    assert machine.did == [INSTALLED_DEV, TPU_COMPILER, GPU_COMPILER]


def test_a_folder_of_somebody_else_is_left_alone(machine: Machine):
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv" / "thesis.tex").touch()
    assert ".venv is there already, and not from here. Move it away" in machine.set_up()
    assert machine.did == [] and (machine.checkout / ".venv" / "thesis.tex").exists()


def test_an_environment_named_by_the_environment_is_not_touched(machine: Machine):
    """VENV=/opt/venv is common in containers. What this test's own make was told is none of the matter."""
    shutil.copy(ROOT / "Makefile", machine.checkout)
    theirs = {"VENV": "/nonexistent/venv", "PATH": f"{machine.path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "--dry-run", "venv"], cwd=machine.checkout, env=theirs, capture_output=True, text=True, check=True
    )
    assert "'.venv'" in done.stdout and "nonexistent" not in done.stdout


def test_another_python_means_another_environment(machine: Machine):
    machine.set_up()
    machine.set_up(version="3.13.0")
    assert machine.did == [MADE, INSTALLED]


def test_a_moved_checkout_means_another_environment(machine: Machine):
    machine.set_up()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("moved"))
    machine.set_up()
    assert machine.did == [MADE, INSTALLED]


def test_an_environment_that_lost_its_python_is_made_anew(machine: Machine):
    machine.set_up()
    (machine.checkout / ".venv/bin/python").unlink()
    machine.set_up()
    assert machine.did == [MADE, INSTALLED]


def test_a_failed_install_does_not_count(machine: Machine):
    assert "pip could not install ." in machine.set_up(broken="install")
    (machine.checkout / ".venv/leftover").touch()
    machine.set_up()
    assert machine.did == [MADE, INSTALLED]
    assert not (machine.checkout / ".venv/leftover").exists()


def test_a_failed_change_does_not_count(machine: Machine):
    machine.set_up()
    machine.set_up("dev", broken="install")
    machine.set_up()
    assert machine.did == [MADE, INSTALLED]


def test_without_ensurepip_another_pip_serves(machine: Machine):
    machine.set_up(broken="ensurepip")
    assert machine.did == [
        MADE,
        "-m venv --without-pip .venv",
        "--python .venv/bin/python install pip",
        INSTALLED,
    ]


def test_without_any_pip_virtualenv_serves(machine: Machine):
    machine.provide("virtualenv", '#!/usr/bin/env bash\nmkdir -p "$3/bin" && cp "$2" "$3/bin/python"\n')
    machine.set_up(broken="ensurepip,pip,")
    assert machine.did[-1] == INSTALLED


def test_without_anything_it_says_what_to_install(machine: Machine):
    said = machine.set_up(broken="ensurepip,pip,")
    assert "apt install python3-venv" in said.splitlines()[-1]
    assert not (machine.checkout / ".venv").exists()


def test_an_old_python_is_refused_with_a_way_out(machine: Machine):
    said = machine.set_up(version="3.9.18", new_enough=False)
    oldest = setup_cfg()["options"]["python_requires"].removeprefix(">=")
    assert f"Python {oldest} or newer is needed, and PYTHON=python3 is 3.9.18" in said
    assert "PYTHON=python3.12" in said
    assert len(said.splitlines()) == 1
    assert not (machine.checkout / ".venv").exists()


def test_a_python_that_is_not_there_is_refused_with_one_that_is(machine: Machine):
    said = machine.set_up(python="python9")
    assert "PYTHON=python9 does not run (python9: command not found)" in said
    assert "try again with PYTHON=python3." in said
    assert len(said.splitlines()) == 1
