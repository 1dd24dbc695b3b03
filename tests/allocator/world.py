"""Runs the real allocator and the model side by side, with a fake KV memory of one int a token, and compares them.

A `World` takes the module under test as an argument, so that mutants of it can be put to the same test.
"""

import functools
from collections import Counter
from types import ModuleType, SimpleNamespace

import jax
import numpy as np

from tests.allocator.model import DEAD, Geometry, Model

POISON = -7  # what a free block holds
KEEPS = DROPS = 3
ATTACHES = FORKS = 2


@functools.cache
def jitted(tables: ModuleType) -> SimpleNamespace:
    """The functions of one module under test, each compiled once for each geometry, whichever world calls it."""
    return SimpleNamespace(
        append=jax.jit(tables.append, static_argnums=2),
        copy_on_write=jax.jit(tables.copy_on_write),
        grow=jax.jit(tables.grow, static_argnums=2),
        fork=jax.jit(tables.fork),
        attach=jax.jit(tables.attach),
        truncate=jax.jit(tables.truncate),
        free=jax.jit(tables.free),
        retain=jax.jit(tables.blocks.retain),
        release=jax.jit(tables.blocks.release),
        apply=jax.jit(tables.apply, static_argnums=2),
        slots=jax.jit(tables.slots),
    )


class World:
    def __init__(self, tables: ModuleType, geometry: Geometry):
        num_blocks, num_slots, num_columns, block_size = geometry
        self.geometry = geometry
        self.model = Model(geometry)
        self.fns = jitted(tables)
        self.state = tables.create(*geometry)
        self.plan = tables.idle_plan(self.state, keeps=KEEPS, drops=DROPS, attaches=ATTACHES, forks=FORKS)
        self.kv = np.full((num_blocks, block_size), POISON)
        self.cached_ids: list[int] = []  # beside model.cache, entry for entry
        self.name_of: dict[int, int] = {}
        # Every slot and position, and one beyond each end.
        seq, pos = np.mgrid[-1 : num_slots + 1, -1 : num_columns * block_size + 1]
        self.seq, self.pos = int32(seq.ravel()), int32(pos.ravel())
        self._settle(self.state, True, True)

    # Each command returns whether it fitted.

    def append(self, new) -> bool:
        """Copies on write, then appends: two transitions, of which the first may succeed alone."""
        if not self.copy_on_write([n > 0 for n in new]):
            return False
        state, ok = self.fns.append(self.state, int32(new), self.geometry.max_new)
        return self._settle(state, ok, self.model.append(new))

    def copy_on_write(self, writes) -> bool:
        state, copies, ok = self.fns.copy_on_write(self.state, np.array(writes))
        return self._settle(state, ok, self.model.copy_on_write(writes), copies)

    def grow(self, new) -> bool:
        state, copies, ok = self.fns.grow(self.state, int32(new), self.geometry.max_new)
        return self._settle(state, ok, self.model.grow(new), copies)

    def fork(self, src, dst) -> bool:
        state, ok = self.fns.fork(self.state, int32(src), int32(dst))
        return self._settle(state, ok, self.model.fork(src, dst))

    def attach(self, dst, ids, lengths) -> bool:
        state, ok = self.fns.attach(self.state, int32(dst), int32(ids), int32(lengths))
        return self._settle(state, ok, self.model.attach(dst, self._names(ids), lengths))

    def truncate(self, lengths) -> bool:
        state, ok = self.fns.truncate(self.state, int32(lengths))
        return self._settle(state, ok, self.model.truncate(lengths))

    def free(self, done) -> bool:
        return self._settle(self.fns.free(self.state, np.array(done)), True, self.model.free(done))

    def keep(self, ids) -> bool:
        pool, ok = self.fns.retain(self.state.pool, int32(ids))
        expected = self.model.keep(self._names(ids))
        if expected:
            self._cache(keep=ids)
        return self._settle(self.state.replace(pool=pool), ok, expected)

    def drop(self, ids) -> bool:
        pool, ok = self.fns.release(self.state.pool, int32(ids))
        expected = self.model.drop(self._names(ids))
        if expected:
            self._cache(drop=ids)
        return self._settle(self.state.replace(pool=pool), ok, expected)

    def apply(self, keep, free, drop, attach, fork, new) -> bool:
        plan = self.plan.replace(
            keep=int32(keep),
            free_S=np.array(free),
            drop=int32(drop),
            attach_dst=int32(attach["dst"]),
            attach_ids=int32(attach["ids"]),
            attach_lengths=int32(attach["lengths"]),
            fork_src=int32(fork["src"]),
            fork_dst=int32(fork["dst"]),
            new_S=int32(new),
        )
        state, copies, ok = self.fns.apply(self.state, plan, self.geometry.max_new)
        named = {"dst": attach["dst"], "names": self._names(attach["ids"]), "lengths": attach["lengths"]}
        expected = self.model.apply(self._names(keep), free, self._names(drop), named, fork, new)
        if expected:
            self._cache(keep, drop)
        return self._settle(state, ok, expected, copies)

    # What a command's author may want to know.

    def empty_slots(self) -> list[int]:
        return [slot for slot, text in enumerate(self.model.texts) if not text]

    def full_blocks(self) -> list[int]:
        """The ids of the blocks that a prefix cache might keep."""
        table = np.asarray(self.state.tables_SM)
        size = self.geometry.block_size
        return [int(b) for slot, text in enumerate(self.model.texts) for b in table[slot, : len(text) // size]]

    def dead_ids(self) -> list[int]:
        """Free blocks, and what is no block at all."""
        null = self.geometry.num_blocks
        return [b for b in range(-2, null + 3) if b not in self.name_of and b != null]

    # The comparison.

    def _settle(self, state, ok, expected: bool, copies=None) -> bool:
        """Compares the outcome of a command with the model's, then lets it take effect on the KV memory."""
        assert bool(ok) == expected, f"ok is {bool(ok)}, the model says {expected}"
        if not expected:
            for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(self.state), strict=True):
                np.testing.assert_array_equal(new, old, "a refused command changed the state")
        assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(state))
        self.state = state
        self._check_pool_and_tables()
        self._match_names()
        if copies is not None:
            self._copy(copies, expected)
        block, offset = (np.asarray(x) for x in self.fns.slots(self.state, self.seq, self.pos))
        place = {(int(s), int(p)): (int(b), int(o)) for s, p, b, o in zip(self.seq, self.pos, block, offset)}  # noqa: B905
        for slot, position in self.model.written:
            self.kv[place[slot, position]] = self.model.texts[slot][position]
        self.kv[[b for b in range(len(self.kv)) if b not in self.name_of]] = POISON
        self._check_contents(place)
        self.model.copied, self.model.written = {}, []
        return expected

    def _check_pool_and_tables(self) -> None:
        null, size = self.geometry.num_blocks, self.geometry.block_size
        pool = self.state.pool
        refs, tables, lengths = (np.asarray(x) for x in (pool.refs_N, self.state.tables_SM, self.state.lengths_S))
        num_free = int(pool.num_free)
        assert 0 <= num_free <= null
        stack = np.asarray(pool.free_N)[:num_free].tolist()
        assert len(set(stack)) == num_free, "a block is on the stack twice"
        assert set(stack) == set(np.flatnonzero(refs == 0).tolist()), "free means without references"
        assert num_free == self.model.num_free(), "a block is held by nobody, or taken for nothing"

        assert lengths.tolist() == [len(text) for text in self.model.texts]
        for row, length in zip(tables, lengths, strict=True):
            used = -(-length // size)
            assert ((row[:used] >= 0) & (row[:used] < null)).all(), "a table must map every token"
            assert (row[used:] == null).all(), "a table must be NULL past its tokens"
        held = Counter(tables[tables < null].tolist()) + Counter(self.cached_ids)
        assert refs.tolist() == [held[block] for block in range(null)], "references are not holders"

    def _match_names(self) -> None:
        """Ids and names must correspond one to one, and a block must keep its id for as long as it lives."""
        tables = np.asarray(self.state.tables_SM)
        pairs = list(zip(self.cached_ids, self.model.cache, strict=True))
        for row, names in zip(tables, self.model.tables, strict=True):
            pairs += zip(row[: len(names)].tolist(), names, strict=True)
        id_of = {name: block for block, name in pairs}
        name_of = {block: name for block, name in pairs}
        assert all(id_of[name] == block and name_of[block] == name for block, name in pairs), "sharing differs"
        old = {name: block for block, name in self.name_of.items()}
        assert all(old.get(name, block) == block for name, block in id_of.items()), "a live block changed its id"
        self.name_of = name_of

    def _copy(self, copies, ok: bool) -> None:
        null = self.geometry.num_blocks
        src, dst = np.asarray(copies.src_S).tolist(), np.asarray(copies.dst_S).tolist()
        made = {slot: pair for slot, pair in enumerate(zip(src, dst, strict=True)) if pair != (null, null)}
        if not ok:
            assert not made, "a refused command asks for copies"
            return
        for slot, (a, b) in made.items():
            assert a in self.name_of and b in self.name_of, f"slot {slot} copies {a} to {b}, which are not both live"
        named = {slot: (self.name_of[a], self.name_of[b]) for slot, (a, b) in made.items()}
        assert named == self.model.copied, "a copy is missing, needless or wrong"
        targets = [b for _, b in made.values()]
        assert len(set(targets)) == len(targets), "two copies have one destination"
        assert not set(targets) & {a for a, _ in made.values()}, "a destination is a source"
        for a, b in made.values():
            self.kv[b] = self.kv[a]

    def _check_contents(self, place) -> None:
        null, size = self.geometry.num_blocks, self.geometry.block_size
        for (slot, position), where in place.items():
            text = self.model.texts[slot] if 0 <= slot < self.geometry.num_slots else []
            if 0 <= position < len(text):
                assert self.kv[where] == text[position], f"slot {slot} lost its token {position}"
            else:
                assert where == (null, 0), f"slot {slot} has no token {position}, yet it is at {where}"
        for block, name in zip(self.cached_ids, self.model.cache, strict=True):
            assert self.kv[block].tolist() == self.model.cached_text[name][:size], "a cached block changed"

    def _names(self, ids):
        if isinstance(ids, list):
            return [self._names(block) for block in ids]
        return None if ids == self.geometry.num_blocks else self.name_of.get(ids, DEAD)

    def _cache(self, keep=(), drop=()) -> None:
        self.cached_ids += [block for block in keep if block != self.geometry.num_blocks]
        for block in drop:
            if block != self.geometry.num_blocks:
                self.cached_ids.remove(block)


def int32(values) -> np.ndarray:
    return np.asarray(values, np.int32)
