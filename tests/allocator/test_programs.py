"""Programs of commands on the allocator and on the model of it: made up by hypothesis, or by a seed."""

from random import Random

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from jpaged import tables
from tests.allocator import commands
from tests.allocator.model import Geometry
from tests.allocator.world import World, eager

PLANS = ("apply", "truncate")  # these reach every function, and compile faster than all of them

MACHINES = {
    "ample": (commands.ALL, Geometry(num_blocks=16, num_slots=4, num_columns=4, block_size=4)),
    "scarce": (commands.ALL, Geometry(num_blocks=5, num_slots=4, num_columns=5, block_size=2)),
    "no partial blocks": (PLANS, Geometry(num_blocks=9, num_slots=4, num_columns=8, block_size=1)),
    "large blocks": (PLANS, Geometry(num_blocks=7, num_slots=5, num_columns=2, block_size=16)),
    "narrow tables": (PLANS, Geometry(num_blocks=20, num_slots=6, num_columns=2, block_size=2)),
}


class Programs(RuleBasedStateMachine):
    names: tuple[str, ...]
    geometry: Geometry

    @initialize()
    def start(self) -> None:
        self.world = World(tables, self.geometry)

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        arguments = commands.make(name, data.draw(st.randoms(use_true_random=False)), self.world)
        note(f"{name}(**{arguments})")
        getattr(self.world, name)(**arguments)


@pytest.mark.parametrize(("names", "geometry"), MACHINES.values(), ids=MACHINES.keys())
def test_allocator_does_what_the_model_does(names: tuple[str, ...], geometry: Geometry) -> None:
    machine = type("Machine", (Programs,), {"names": names, "geometry": geometry})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.parametrize("geometry", [Geometry(1, 1, 1, 1), Geometry(1, 3, 2, 4)], ids=str)
def test_a_pool_of_one_block(geometry: Geometry) -> None:
    for seed in range(8):
        commands.run_program(Random(seed), World(tables, geometry, eager), steps=20)
