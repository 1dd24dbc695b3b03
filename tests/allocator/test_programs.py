"""Programs of commands, made up by hypothesis, on the allocator and on the model of it."""

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from jpaged import tables
from tests.allocator import commands
from tests.allocator.model import Geometry
from tests.allocator.world import World

GEOMETRIES = {
    "ample": Geometry(num_blocks=16, num_slots=4, num_columns=4, block_size=4),
    "scarce": Geometry(num_blocks=5, num_slots=4, num_columns=5, block_size=2),
    "no partial blocks": Geometry(num_blocks=9, num_slots=4, num_columns=8, block_size=1),
    "large blocks": Geometry(num_blocks=7, num_slots=5, num_columns=2, block_size=16),
    "narrow tables": Geometry(num_blocks=20, num_slots=6, num_columns=2, block_size=2),
    "one of each": Geometry(num_blocks=1, num_slots=1, num_columns=1, block_size=1),
    "one block to share": Geometry(num_blocks=1, num_slots=3, num_columns=2, block_size=4),
}


class Programs(RuleBasedStateMachine):
    geometry: Geometry

    @initialize()
    def start(self) -> None:
        self.world = World(tables, self.geometry)

    @rule(name=st.sampled_from(commands.NAMES), rng=st.randoms(use_true_random=False))
    def run(self, name: str, rng) -> None:
        arguments = getattr(commands, name)(rng, self.world)
        note(f"{name}(**{arguments})")
        getattr(self.world, name)(**arguments)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_allocator_does_what_the_model_does(geometry: Geometry) -> None:
    machine = type("Machine", (Programs,), {"geometry": geometry})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30))
