"""Runs the real allocator and the model side by side, with a fake KV memory of one int a token, and compares them.

A `World` takes the module under test as an argument, so that mutants of it can be put to the same test.
"""

from collections import Counter
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import jax
import numpy as np

from tests.allocator.model import DEAD, Geometry, Model

POISON = -7  # what a free block holds
KEEPS, DROPS, ATTACHES, FORKS, PERMUTES = 3, 6, 2, 2, 3  # entries of the padded lists
COMPILE_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def jitted(tables: ModuleType) -> SimpleNamespace:
    """The functions of a module. JAX compiles each once for each geometry, however often they are wrapped."""
    return _functions(tables, lambda f, **static: jax.jit(f, compiler_options=COMPILE_FAST, **static))


def eager(tables: ModuleType) -> SimpleNamespace:
    """The functions of a module, run operation by operation: slow, but many modules share what is compiled."""

    def without_jit(function, **_):
        def run(*args, **kwargs):
            with jax.disable_jit():
                return function(*args, **kwargs)

        return run

    return _functions(tables, without_jit)


def _functions(tables: ModuleType, wrap) -> SimpleNamespace:
    return SimpleNamespace(
        append=wrap(tables.append, static_argnames="max_new"),
        copy_on_write=wrap(tables.copy_on_write),
        grow=wrap(tables.grow, static_argnames="max_new"),
        fork=wrap(tables.fork),
        attach=wrap(tables.attach),
        permute=wrap(tables.permute),
        truncate=wrap(tables.truncate),
        free=wrap(tables.free),
        take=wrap(tables.blocks.take, static_argnames="width"),
        retain=wrap(tables.blocks.retain),
        release=wrap(tables.blocks.release),
        apply=wrap(tables.apply, static_argnames="max_new"),
        slots=wrap(tables.slots),
    )


class World:
    def __init__(self, tables: ModuleType, geometry: Geometry, functions=jitted):
        num_blocks, num_slots, num_columns, block_size = geometry
        self.geometry = geometry
        self.model = Model(geometry)
        self.fns = functions(tables)
        self.state = tables.create(*geometry)
        self.plan = tables.idle_plan(self.state, keeps=KEEPS, drops=DROPS, attaches=ATTACHES, forks=FORKS)
        self.kv = np.full((num_blocks, block_size), POISON)
        self.cached_ids: list[int] = []  # beside model.cache, entry for entry
        self.name_of: dict[int, int] = {}
        # Every slot and position, and one beyond each end.
        seq, pos = np.mgrid[-1 : num_slots + 1, -1 : num_columns * block_size + 1]
        self.seq_T, self.pos_T = int32(seq.ravel()), int32(pos.ravel())
        self.grid = seq.shape
        self._settle(self.state, True, True)

    # Each command returns whether it fitted.

    def append(self, new) -> bool:
        """Copies on write, then appends: two transitions, of which the first may succeed alone."""
        if not self.copy_on_write([n > 0 for n in new]):
            return False
        state, ok = self.fns.append(self.state, int32(new), max_new=self.geometry.max_new)
        return self._settle(state, ok, self.model.append(new))

    def copy_on_write(self, writes) -> bool:
        state, copies, ok = self.fns.copy_on_write(self.state, np.array(writes))
        return self._settle(state, ok, self.model.copy_on_write(writes), copies)

    def grow(self, new) -> bool:
        state, copies, ok = self.fns.grow(self.state, int32(new), max_new=self.geometry.max_new)
        return self._settle(state, ok, self.model.grow(new), copies)

    def fork(self, src, dst) -> bool:
        state, ok = self.fns.fork(self.state, int32(src), int32(dst))
        return self._settle(state, ok, self.model.fork(src, dst))

    def attach(self, dst, ids, lengths) -> bool:
        state, ok = self.fns.attach(self.state, int32(dst), int32(ids), int32(lengths))
        return self._settle(state, ok, self.model.attach(dst, [self._names(row) for row in ids], lengths))

    def permute(self, dst, src) -> bool:
        state, ok = self.fns.permute(self.state, int32(dst), int32(src))
        return self._settle(state, ok, self.model.permute(dst, src))

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
        state, copies, ok = self.fns.apply(self.state, plan, max_new=self.geometry.max_new)
        rows = [self._names(row) for row in attach["ids"]]
        seats = {"dst": attach["dst"], "names": rows, "lengths": attach["lengths"]}
        expected = self.model.apply(self._names(keep), free, self._names(drop), seats, fork, new)
        if expected:
            self._cache(keep, drop)
        return self._settle(state, ok, expected, copies)

    # What a command's author may want to know.

    def full_blocks(self) -> list[int]:
        """The ids that a prefix cache might keep and a sequence might start from."""
        table = np.asarray(self.state.tables_SM)
        size = self.geometry.block_size
        return [int(b) for slot, text in enumerate(self.model.texts) for b in table[slot, : len(text) // size]]

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
        block, offset = self.fns.slots(self.state, self.seq_T, self.pos_T)
        place = np.stack([np.asarray(block), np.asarray(offset)]).reshape(2, *self.grid)
        for slot, position in self.model.written:
            block, offset = place[:, slot + 1, position + 1]
            assert block in self.name_of, "a new token has no place"
            self.kv[block, offset] = self.model.texts[slot][position]
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

    def _check_contents(self, place: np.ndarray) -> None:
        """``place`` holds the block and the offset of each cell of the grid."""
        expected = np.full(self.grid, POISON)
        for row, text in zip(expected[1:], self.model.texts, strict=False):
            row[1 : 1 + len(text)] = text
        exists = expected != POISON
        assert (place[0][~exists] == self.geometry.num_blocks).all(), "a token that does not exist has a place"
        assert (place[1][~exists] == 0).all(), "a token that does not exist has an offset"
        assert (self.kv[tuple(place[:, exists])] == expected[exists]).all(), "a sequence lost a token"
        for block, name in zip(self.cached_ids, self.model.cache, strict=True):
            assert self.kv[block].tolist() == self.model.cached_text[name], "a cached block changed"

    def _names(self, ids: Sequence[int]) -> list[int | None]:
        return [None if block == self.geometry.num_blocks else self.name_of.get(block, DEAD) for block in ids]

    def _cache(self, keep=(), drop=()) -> None:
        self.cached_ids += [block for block in keep if block != self.geometry.num_blocks]
        for block in drop:
            if block != self.geometry.num_blocks:
                self.cached_ids.remove(block)


def int32(values) -> np.ndarray:
    return np.asarray(values, np.int32)
