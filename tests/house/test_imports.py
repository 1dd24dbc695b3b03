"""Imports point one way: between the packages, and between the rooms of jpaged."""

import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.imports import Import, imports, modules
from tests.house.tree import PACKAGES, ROOT, SCRIPTS

# A package may import those before it.
ORDER_OF_PACKAGES = (*PACKAGES, SCRIPTS)

# The rooms of jpaged: a room is a module of it or a package in it. On a line, every room may import every room that
# stands left of a `<`, and through the lines together, every room that those may. Rooms between the same two `<` do not
# know each other. Only jpaged/__init__.py, which is the front door and no room, may import them all.
ORDER_OF_ROOMS = """
    checks < config
    types config < blocks < tables sharding < cache quantisation < xla_attention
    xla_attention < trees < gpu_attention tpu_attention < backends
    backends < misfits < attention
    attention < model sampling
    model sampling < beam < plan < state < step
    types config < prefix < groups ledger < schedule seats < scheduler
    tables scheduler < audit < engine
    types config < tokenizer weights < model
    types config tokenizer < outputs < asked < request hypotheses
    config tokenizer attention model < dtypes < sizing < validate
    outputs scheduler < stats
    prefix groups request hypotheses < intake
    buckets plan schedule sizing intake < packing < reading
    step scheduler < reading
    schedule step < swap
    dtypes packing reading stats swap < engine
    intake engine < turns
    weights validate turns < llm
"""

# The host plans without a device: these do not use JAX.
HOST_ROOMS = (
    "checks",
    "config",
    "prefix",
    "groups",
    "ledger",
    "schedule",
    "seats",
    "scheduler",
    "stats",
    "buckets",
    "outputs",
    "asked",
    "request",
    "hypotheses",
    "intake",
)
JAX = {"jax", "jaxlib", "flax", "orbax"}

# The kernels know arrays and JAX, and could be lifted out.
KERNELS_MAY_IMPORT = {"jax", "jaxtyping", "numpy", "pallas_kernels", *sys.stdlib_module_names}


def may_import(lines: str) -> dict[str, set[str]]:
    """For each room of the table, the rooms that it may import."""
    direct: dict[str, set[str]] = {}
    for line in lines.strip().splitlines():
        groups = [group.split() for group in line.split("<")]
        for i, group in enumerate(groups):
            for room in group:
                direct.setdefault(room, set()).update(*groups[:i])
    reach: dict[str, set[str]] = {}
    for room in TopologicalSorter(direct).static_order():  # raises CycleError if the table contradicts itself
        reach[room] = direct[room].union(*(reach[below] for below in direct[room]))
    return reach


def package_of(module: str) -> str:
    return module.partition(".")[0]


def room_of(module: str) -> str:
    """The room of a module of jpaged; "" is the front door."""
    return module.split(".")[1] if "." in module else ""


def arrows_between_packages(found: Iterable[Import]) -> list[str]:
    """What is wrong: imports of a package by one that stands before it."""
    rank = {package: i for i, package in enumerate(ORDER_OF_PACKAGES)}
    return [
        f"{one.where}: {one.importer} imports {one.imported}; the order is {' -> '.join(ORDER_OF_PACKAGES)}"
        for one in found
        if package_of(one.imported) in rank and rank[package_of(one.imported)] > rank[package_of(one.importer)]
    ]


def arrows_between_rooms(found: Iterable[Import], lines: str = ORDER_OF_ROOMS) -> list[str]:
    """What is wrong: imports between rooms of jpaged that the table does not allow."""
    allowed = may_import(lines)
    wrong = []
    for one in found:
        if package_of(one.importer) != "jpaged" or package_of(one.imported) != "jpaged":
            continue
        importer, imported = room_of(one.importer), room_of(one.imported)
        if importer in ("", imported):
            continue
        if imported == "":
            wrong.append(
                f"{one.where}: {one.importer} imports the front door, jpaged/__init__.py; import the room itself"
            )
        elif imported not in allowed.get(importer, set()):
            wrong.append(f"{one.where}: room {importer} may not import room {imported}")
    return wrong


def rooms_without_a_place(known: Iterable[str], lines: str = ORDER_OF_ROOMS) -> list[str]:
    """Rooms of jpaged that the table does not name."""
    rooms = {room_of(module) for module in known if package_of(module) == "jpaged"}
    return sorted(rooms - {""} - set(may_import(lines)))


def cycles(found: Iterable[Import], known: Iterable[str]) -> str:
    """A cycle of modules that import each other, or nothing. Written imports count; parent packages do not."""
    graph: dict[str, set[str]] = {module: set() for module in known}
    for one in found:
        if one.imported in graph and one.imported != one.importer:
            graph[one.importer].add(one.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


@pytest.fixture(scope="module")
def known() -> dict[str, Path]:
    return modules(ROOT, ORDER_OF_PACKAGES)


@pytest.fixture(scope="module")
def found() -> list[Import]:
    return imports(ROOT, ORDER_OF_PACKAGES)


def test_there_is_something_to_check(known: dict[str, Path], found: list[Import]):
    assert {package_of(module) for module in known} == set(ORDER_OF_PACKAGES)
    assert any(package_of(one.imported) == "jax" for one in found)


def test_packages_point_one_way(found: list[Import]):
    assert not arrows_between_packages(found)


def test_rooms_point_one_way(found: list[Import]):
    assert not arrows_between_rooms(found)


def test_every_room_has_a_place(known: dict[str, Path]):
    lost = rooms_without_a_place(known)
    assert not lost, f"put {lost} of jpaged into ORDER_OF_ROOMS in {__file__}, between what it uses and what uses it"


def test_no_modules_import_each_other(found: list[Import], known: dict[str, Path]):
    assert not cycles(found, known)


def test_host_rooms_do_not_use_jax(found: list[Import]):
    assert set(HOST_ROOMS) <= set(may_import(ORDER_OF_ROOMS))
    assert not [
        f"{one.where}: {one.importer} imports {one.imported}"
        for one in found
        if package_of(one.importer) == "jpaged"
        and room_of(one.importer) in HOST_ROOMS
        and package_of(one.imported) in JAX
    ]


def test_kernels_know_only_jax(found: list[Import]):
    assert not [
        f"{one.where}: {one.importer} imports {one.imported}"
        for one in found
        if package_of(one.importer) == "pallas_kernels" and package_of(one.imported) not in KERNELS_MAY_IMPORT
    ]


# What follows tests the tests above, on a small tree with arrows that point back.

PLANTED = {
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/tpu/__init__.py": "",
    "pallas_kernels/tpu/decode.py": "def deferred():\n    from jpaged import tables\n",
    "jpaged/__init__.py": "from jpaged.step import run\n",
    "jpaged/blocks.py": "from .tables import append\n",
    "jpaged/tables.py": "import jpaged.blocks\nfrom jpaged import VERSION\n",
    "jpaged/step/__init__.py": "from jpaged.step.plan import Plan\n",
    "jpaged/step/plan.py": "from ..blocks import take\nfrom . import shapes\n",
    "jpaged/step/shapes.py": "",
    "jpaged/attic.py": "",
    "models/__init__.py": "import importlib\nimportlib.import_module('scripts.decode')\n",
    "scripts/decode.py": "from models import load\n",
}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    for name, source in PLANTED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


def wheres(messages: list[str]) -> list[str]:
    return [message.partition(": ")[0] for message in messages]


def test_planted_arrows_are_found(planted: Path):
    found = imports(planted, ORDER_OF_PACKAGES)
    assert wheres(arrows_between_packages(found)) == ["pallas_kernels/tpu/decode.py:2", "models/__init__.py:2"]
    assert wheres(arrows_between_rooms(found)) == ["jpaged/blocks.py:1", "jpaged/tables.py:2"]
    assert rooms_without_a_place(modules(planted, ORDER_OF_PACKAGES)) == ["attic"]


def test_planted_cycle_is_found(planted: Path):
    (planted / "jpaged" / "__init__.py").write_text("")
    (planted / "pallas_kernels/tpu/decode.py").write_text("")
    (planted / "models/__init__.py").write_text("")
    known = modules(planted, ORDER_OF_PACKAGES)
    cycle = cycles(imports(planted, ORDER_OF_PACKAGES), known)
    assert set(cycle.split(" imports ")) == {"jpaged.blocks", "jpaged.tables"}


def test_names_are_resolved(planted: Path):
    by_step = {one.imported for one in imports(planted, ("jpaged",)) if one.importer.startswith("jpaged.step")}
    assert by_step == {"jpaged.step.plan", "jpaged.blocks", "jpaged.step.shapes"}


def test_the_table_is_read_as_it_says():
    allowed = may_import("a < b c < d \n d < e")
    assert allowed == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"a", "b", "c"}, "e": {"a", "b", "c", "d"}}
    with pytest.raises(CycleError):
        may_import("a < b \n b < a")
