"""Makes up commands for a `World`: sensible ones, and some with one fault, which alone must be cause for a refusal.

Each takes a random number generator, which may be hypothesis in disguise, and returns the arguments of the `World`
method of the same name as plain ints and lists, so that a failing program can be read.
"""

from collections.abc import Sequence
from random import Random

from tests.allocator.world import ATTACHES, DROPS, FORKS, KEEPS, PERMUTES, World

# Growth and caching more often than the rest, so that memory gets full and there is something to attach.
SINGLE = (*("append", "grow", "fork", "attach", "keep", "drop", "free") * 2, "permute", "copy_on_write", "truncate")
PLANS = ("apply",) * 5
ALL = SINGLE + PLANS


def make(name: str, rng: Random, world: World) -> dict:
    """Returns arguments for the command of this name; one in three has a fault, if the command can have one."""
    return globals()[name](rng, world, rng.randrange(3) == 0)


def run_program(rng: Random, world: World, steps: int, names: Sequence[str] = ALL) -> None:
    for step in range(steps):
        name = "grow" if step < 2 else rng.choice(names)  # an empty pool has little to show
        getattr(world, name)(**make(name, rng, world))


def append(rng: Random, world: World, fault: bool) -> dict:
    geometry = world.geometry
    most = rng.choice([1, geometry.block_size, geometry.max_new])
    room = [geometry.num_columns * geometry.block_size - len(text) for text in world.model.texts]
    new = [min(r, rng.choice([0, rng.randint(1, most)])) for r in room]
    if fault:
        slot = rng.randrange(len(new))
        new[slot] = rng.choice([-1, geometry.max_new + 1, 2**31 - 1])
        fuller = [slot for slot, r in enumerate(room) if r < geometry.max_new]
        if fuller and rng.choice([False, True]):
            slot = rng.choice(fuller)
            new = [0] * len(new)
            new[slot] = room[slot] + 1
    return {"new": new}


grow = append


def copy_on_write(rng: Random, world: World, _fault: bool) -> dict:
    return {"writes": [rng.choice([False, True]) for _ in range(world.geometry.num_slots)]}


def fork(rng: Random, world: World, fault: bool) -> dict:
    num_slots = world.geometry.num_slots
    sources = [slot for slot, text in enumerate(world.model.texts) if text] or [0]
    src = [rng.choice(sources) for _ in range(FORKS)]
    dst = _destinations(rng, world, FORKS)
    if fault and rng.choice([False, True]):
        src[rng.randrange(FORKS)] = rng.choice([-1, num_slots])
    elif fault:
        dst = _faulty(rng, world, dst)
    return {"src": src, "dst": dst}


def permute(rng: Random, world: World, fault: bool) -> dict:
    """Slots of one length go on from each other; three in a row, so that blocks lose their last holder."""
    texts, num_slots = world.model.texts, world.geometry.num_slots
    length = len(rng.choice(texts))
    alike = [slot for slot, text in enumerate(texts) if len(text) == length]
    dst = rng.sample(alike, min(len(alike), PERMUTES))
    src = [rng.choice(alike) for _ in dst]
    if fault:
        row, others = rng.randrange(len(dst)), [slot for slot, text in enumerate(texts) if len(text) != length]
        match rng.randrange(4):
            case 0 if others:
                src[row] = rng.choice(others)
            case 1:
                dst[row] = rng.choice([-1, num_slots + 1])
            case 2 if len(dst) > 1:
                dst[row] = dst[row - 1]
            case _:
                src[row] = rng.choice([-1, num_slots])
    padding = PERMUTES - len(dst)
    return {"dst": dst + [num_slots] * padding, "src": src + [rng.choice([-1, 0, num_slots])] * padding}


def attach(rng: Random, world: World, fault: bool, evicted: Sequence[int] = ()) -> dict:
    null, _, num_columns, size = world.geometry
    full = [*world.cached_ids, *world.full_blocks()]
    used = [rng.randint(1, num_columns) if full else 0 for _ in range(ATTACHES)]
    ids = [[rng.choice(full) for _ in range(n)] + [null] * (num_columns - n) for n in used]
    lengths = [n * size for n in used]
    dst = _destinations(rng, world, ATTACHES)
    row = rng.choice([j for j, d in enumerate(dst) if d < world.geometry.num_slots] or [0])
    column = rng.randrange(max(1, used[row]))
    match rng.randrange(4) if fault else None:
        case 0:
            dst = _faulty(rng, world, dst)
        case 1:
            lengths[row] += rng.choice([-size, 1, size])
        case 2:
            ids[row][column] = null
        case 3:
            ids[row][column] = rng.choice([_dead_id(rng, world), *evicted])
    return {"dst": dst, "ids": ids, "lengths": lengths}


def truncate(rng: Random, world: World, fault: bool) -> dict:
    size = world.geometry.block_size
    lengths = [rng.choice([len(text), rng.randint(max(0, len(text) - size), len(text))]) for text in world.model.texts]
    if fault:
        slot = rng.randrange(len(lengths))
        lengths[slot] = rng.choice([-1, len(world.model.texts[slot]) + 1])
    return {"lengths": lengths}


def free(rng: Random, world: World, _fault: bool) -> dict:
    return {"done": [rng.randrange(4) == 0 for _ in range(world.geometry.num_slots)]}


def keep(rng: Random, world: World, fault: bool) -> dict:
    null = world.geometry.num_blocks
    ids = [rng.choice([null, *world.full_blocks(), *world.cached_ids]) for _ in range(KEEPS)]
    if fault:
        ids[rng.randrange(KEEPS)] = _dead_id(rng, world)
    return {"ids": ids}


def drop(rng: Random, world: World, fault: bool) -> dict:
    null = world.geometry.num_blocks
    few = rng.sample(world.cached_ids, min(rng.randint(0, 2), len(world.cached_ids)))
    ids = rng.sample(few + [null] * (DROPS - len(few)), DROPS)
    # More references than there are, even if the same plan keeps the block. Fewer would be somebody else's, which the
    # pool cannot tell apart: not to drop them is the host's part.
    overdrawn = [block for block, name in world.name_of.items() if world.model.holders(name) + KEEPS < DROPS]
    if fault and overdrawn and rng.choice([False, True]):
        ids = [rng.choice(overdrawn)] * DROPS
    elif fault:
        ids[rng.randrange(DROPS)] = _dead_id(rng, world)
    return {"ids": ids}


def apply(rng: Random, world: World, fault: bool) -> dict:
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
    faulty = rng.choice(["keep", "drop", "attach", "fork", "new"]) if fault else None
    chosen = {name for name in plan if name == faulty or rng.choice([False, True])}
    if "keep" in chosen:
        plan["keep"] = keep(rng, world, faulty == "keep")["ids"]
    if "free" in chosen:
        plan["free"] = free(rng, world, False)["done"]
    if "drop" in chosen:
        plan["drop"] = drop(rng, world, faulty == "drop")["ids"]
    if "attach" in chosen:
        plan["attach"] = attach(rng, world, faulty == "attach", plan["drop"])
    if "fork" in chosen:
        plan["fork"] = fork(rng, world, faulty == "fork")
    if "new" in chosen:
        plan["new"] = append(rng, world, faulty == "new")["new"]
    return plan


def _dead_id(rng: Random, world: World) -> int:
    """A free block, or what is no block at all: one too far, or a live one counted from the end."""
    null = world.geometry.num_blocks
    live = [*world.name_of]
    unused = [block for block in range(null) if block not in world.name_of]
    return rng.choice([null + 1, rng.choice(live or [0]) - null, rng.choice(unused or [-1])])


def _destinations(rng: Random, world: World, count: int) -> list[int]:
    """Distinct empty slots, as many as there are, and padding."""
    num_slots = world.geometry.num_slots
    empty = [slot for slot, text in enumerate(world.model.texts) if not text]
    dst = rng.sample(empty, min(count, len(empty))) + [num_slots] * count
    return rng.sample(dst[:count], count)


def _faulty(rng: Random, world: World, dst: list[int]) -> list[int]:
    """One destination that is no slot, or occupied, or named twice."""
    num_slots = world.geometry.num_slots
    wrong = [-1, num_slots + 1, *(slot for slot, text in enumerate(world.model.texts) if text)][:4]
    twice = [d for d in dst if d < num_slots]
    if twice and rng.choice([False, True]):
        return [rng.choice(twice)] * len(dst)
    return [rng.choice(wrong), *dst[1:]]
