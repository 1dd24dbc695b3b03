"""The model test is itself put to the test: it must find every mistake of a list, and none in the allocator."""

from collections.abc import Sequence
from random import Random
from types import ModuleType

import pytest

from jpaged import tables
from tests.allocator import commands
from tests.allocator.model import Geometry
from tests.allocator.mutants import MUTANTS, Mutant, load, source
from tests.allocator.world import World, eager, jitted

# Minutes, for what changes only with what faults are planted in.
pytestmark = [pytest.mark.every_setting, pytest.mark.one_python]

GEOMETRY = Geometry(num_blocks=10, num_slots=6, num_columns=3, block_size=2)
MAX_PROGRAMS, STEPS = 40, 40


def run_programs(module: ModuleType, names: Sequence[str], functions=eager) -> None:
    for seed in range(MAX_PROGRAMS):
        commands.run_program(Random(seed), World(module, GEOMETRY, functions), STEPS, names)


@pytest.mark.parametrize("names", [commands.SINGLE, commands.ALL], ids=["single", "all"])
def test_the_programs_find_no_fault_in_the_allocator(names: Sequence[str]) -> None:
    run_programs(tables, names, jitted)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    for old, _ in mutant.edits:
        assert source(mutant.module).count(old) == 1, f"{old!r} must occur exactly once in {mutant.module.__name__}"
    with pytest.raises(AssertionError):
        run_programs(load(mutant), mutant.names)
