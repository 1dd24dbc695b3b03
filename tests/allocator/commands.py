"""Makes up commands for a `World`: mostly sensible, now and then faulty in one place.

Each takes a random number generator, which may be hypothesis in disguise, and returns the arguments of the `World`
method of the same name as plain ints and lists, so that a failing program can be read.
"""

from collections.abc import Sequence
from random import Random

from tests.allocator.world import ATTACHES, DROPS, FORKS, KEEPS, World

NAMES = ("append", "grow", "copy_on_write", "fork", "attach", "truncate", "free", "keep", "drop", "apply")


def rarely(rng: Random) -> bool:
    return rng.randrange(12) == 0


def append(rng: Random, world: World) -> dict:
    geometry = world.geometry
    most = rng.choice([1, geometry.block_size, geometry.max_new])
    new = [rng.choice([0, rng.randint(1, most)]) for _ in range(geometry.num_slots)]
    if rarely(rng):
        new[rng.randrange(len(new))] = rng.choice([-1, geometry.max_new + 1, 2**31 - 1])
    return {"new": new}


def grow(rng: Random, world: World) -> dict:
    return append(rng, world)


def copy_on_write(rng: Random, world: World) -> dict:
    return {"writes": [rng.choice([False, True]) for _ in range(world.geometry.num_slots)]}


def fork(rng: Random, world: World) -> dict:
    num_slots = world.geometry.num_slots
    src = [rng.randrange(num_slots) for _ in range(FORKS)]
    dst = _destinations(rng, world, FORKS)
    if rarely(rng):
        src[rng.randrange(FORKS)] = rng.choice([-1, num_slots, num_slots + 1])
    return {"src": src, "dst": dst}


def attach(rng: Random, world: World, also_cached: Sequence[int] = ()) -> dict:
    null, _, num_columns, size = world.geometry
    cached = [*world.cached_ids, *also_cached]
    dst = _destinations(rng, world, ATTACHES)
    ids, lengths = [], []
    for _ in range(ATTACHES):
        used = rng.randint(0, num_columns) if cached else 0
        ids.append([rng.choice(cached) for _ in range(used)] + [null] * (num_columns - used))
        lengths.append(used * size)
    row = rng.randrange(ATTACHES)
    if rarely(rng):
        lengths[row] += rng.choice([-size, -1, 1, size])
    if rarely(rng):
        ids[row][rng.randrange(num_columns)] = rng.choice([null, *world.dead_ids()])
    return {"dst": dst, "ids": ids, "lengths": lengths}


def truncate(rng: Random, world: World) -> dict:
    lengths = [rng.choice([len(text), rng.randint(0, len(text))]) for text in world.model.texts]
    if rarely(rng):
        slot = rng.randrange(len(lengths))
        lengths[slot] = rng.choice([-1, len(world.model.texts[slot]) + 1])
    return {"lengths": lengths}


def free(rng: Random, world: World) -> dict:
    return {"done": [rng.randrange(3) == 0 for _ in range(world.geometry.num_slots)]}


def keep(rng: Random, world: World) -> dict:
    null = world.geometry.num_blocks
    ids = [rng.choice([null, *world.full_blocks(), *world.cached_ids]) for _ in range(KEEPS)]
    if rarely(rng):
        ids[rng.randrange(KEEPS)] = rng.choice(world.dead_ids())
    return {"ids": ids}


def drop(rng: Random, world: World) -> dict:
    null = world.geometry.num_blocks
    ids = rng.sample([null] * DROPS + world.cached_ids, DROPS)
    if rarely(rng):
        ids[rng.randrange(DROPS)] = rng.choice(world.dead_ids())
    # More references than there are, even if the same plan keeps the block. Fewer would be somebody else's, which the
    # pool cannot tell apart: not to drop them is the host's part.
    overdrawn = [block for block, name in world.name_of.items() if world.model.holders(name) + KEEPS < DROPS]
    if overdrawn and rarely(rng):
        ids = [rng.choice(overdrawn)] * DROPS
    return {"ids": ids}


def apply(rng: Random, world: World) -> dict:
    """Some of the others, and padding for the rest."""
    null, num_slots, num_columns, _ = world.geometry
    plan = {
        "keep": [null] * KEEPS,
        "free": [False] * num_slots,
        "drop": [null] * DROPS,
        "attach": {"dst": [num_slots] * ATTACHES, "ids": [[null] * num_columns] * ATTACHES, "lengths": [0] * ATTACHES},
        "fork": {"src": [num_slots] * FORKS, "dst": [num_slots] * FORKS},
        "new": [0] * num_slots,
    }
    if rng.choice([False, True]):
        plan["keep"] = keep(rng, world)["ids"]
    if rng.choice([False, True]):
        plan["free"] = free(rng, world)["done"]
    if rng.choice([False, True]):
        plan["drop"] = drop(rng, world)["ids"]
    if rng.choice([False, True]):
        plan["attach"] = attach(rng, world, [block for block in plan["keep"] if block in world.name_of])
    if rng.choice([False, True]):
        plan["fork"] = fork(rng, world)
    if rng.choice([False, True]):
        plan["new"] = append(rng, world)["new"]
    return plan


def _destinations(rng: Random, world: World, count: int) -> list[int]:
    """Distinct empty slots, then padding; rarely any slots, occupied ones and the same one twice among them."""
    num_slots = world.geometry.num_slots
    empty = world.empty_slots()
    dst = (rng.sample(empty, rng.randint(0, min(count, len(empty)))) + [num_slots] * count)[:count]
    rng.shuffle(dst)
    if rarely(rng):
        dst = [rng.randint(-1, num_slots + 1) for _ in range(count)]
    return dst


def run_program(rng: Random, world: World, steps: int) -> dict[str, int]:
    """Runs so many commands and returns how many of each kind were accepted."""
    accepted = dict.fromkeys(NAMES, 0)
    for _ in range(steps):
        name = rng.choice(NAMES)
        accepted[name] += getattr(world, name)(**globals()[name](rng, world))
    return accepted
