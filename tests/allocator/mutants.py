"""Mistakes that somebody could make in the allocator, each as an edit of its source.

`test_mutants` lets the programs of `commands` find every one of them. The old text of an edit must occur exactly once
in the file, so that this list cannot rot; a mutant that survives means that the model test has a hole.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import jpaged
from jpaged import blocks, tables
from tests.allocator import commands


class Mutant(NamedTuple):
    name: str
    why: str  # what would go wrong
    module: ModuleType
    edits: tuple[tuple[str, str], ...]

    @property
    def names(self) -> Sequence[str]:
        """The commands that may show it: plans, which cost most, only if it takes one."""
        return commands.ALL if any("plan" in old or "after" in old for old, _ in self.edits) else commands.SINGLE


def mutant(name: str, why: str, module: ModuleType, *edits: tuple[str, str]) -> Mutant:
    return Mutant(name, why, module, edits)


MUTANTS = (
    # blocks.take
    mutant(
        "rank not exclusive",
        "each row starts where it should end, so the first blocks of the stack are skipped and others reached twice",
        blocks,
        ("(ends_S - counts_S)[:, None]", "ends_S[:, None]"),
    ),
    mutant(
        "NULL clamped",
        "padding of the ids becomes a block that somebody holds",
        blocks,
        (
            'pool.free_N.at[place_SA].get(mode="fill", fill_value=pool.null)',
            'pool.free_N.at[place_SA].get(mode="clip")',
        ),
    ),
    mutant(
        "last block refused",
        "the pool is full one block early",
        blocks,
        ("total <= pool.num_free", "total < pool.num_free"),
    ),
    mutant(
        "part of a request served",
        "a request that does not fit takes what there is",
        blocks,
        ("wanted_SA = ok & (", "wanted_SA = (depth_SA < pool.num_free) & ("),
    ),
    # blocks.retain, blocks.release
    mutant(
        "negative id counted from the end",
        "-1 retains the last block",
        blocks,
        ("(refs > 0) & (ids >= 0)", "refs > 0"),
    ),
    mutant(
        "negative id released",
        "-1 releases the last block",
        blocks,
        ("named = (ids >= 0) & (ids <= pool.null)", "named = ids <= pool.null"),
    ),
    mutant(
        "references below zero",
        "a block that is dropped more often than it is held frees itself under its other holders, or twice",
        blocks,
        ("ok = jnp.all(named) & jnp.all(lost_N <= pool.refs_N)", "ok = jnp.all(named)"),
    ),
    mutant(
        "duplicates counted once",
        "two twins that are freed together give back one reference",
        blocks,
        (
            '.at[jnp.where(named, ids, pool.null)].add(1, mode="drop")',
            '.at[jnp.where(named, ids, pool.null)].set(1, mode="drop")',
        ),
    ),
    mutant(
        "freed while held",
        "the first holder that leaves frees the block of the others",
        blocks,
        ("freed_N = (lost_N > 0) & (refs_N == 0)", "freed_N = lost_N > 0"),
    ),
    mutant(
        "gap on the stack",
        "freed blocks land one place too high, and a stale id below them is taken",
        blocks,
        ("pool.num_free + upto_N - 1", "pool.num_free + upto_N"),
    ),
    # tables.append
    mutant(
        "table width forgotten",
        "a sequence that outgrows its table loses the blocks past it",
        tables,
        (" & (new_S <= room_S)", ""),
    ),
    mutant(
        "negative count accepted",
        "a sequence is shortened without releasing its blocks",
        tables,
        ("sane = jnp.all((new_S >= 0) & ", "sane = jnp.all("),
    ),
    mutant(
        "length of a refused append",
        "the sequence has tokens that nothing maps",
        tables,
        ("jnp.where(served, new_S, 0)", "new_S"),
    ),
    mutant(
        "a new block over a partial one",
        "the last block is overwritten in the table, its tokens lost and its reference leaked",
        tables,
        ("column_SA = first_S[:, None]", "column_SA = (state.lengths_S // state.block_size)[:, None]"),
    ),
    # tables.permute
    mutant(
        "beams that share count once",
        "the first to leave frees what the other reads",
        tables,
        ("pool, _ = blocks.retain(state.pool, new_JM)", "pool = state.pool"),
    ),
    mutant(
        "beams that die leave their blocks",
        "nobody holds them and nobody gets them",
        tables,
        ("    pool, _ = blocks.release(pool, old_JM)\n", ""),
    ),
    mutant(
        "a beam of another length",
        "the table has more or fewer blocks than the length says",
        tables,
        ("sane_J & (state.lengths_S.at[src_J]", "sane_J | (state.lengths_S.at[src_J]"),
    ),
    mutant(
        "one beam from two",
        "both are retained, one is seated",
        tables,
        ("jnp.all(named_S <= 1)", "True"),
    ),
    # tables.fork, tables.attach
    mutant(
        "a missed retain",
        "twins share blocks that count one holder, and the first to leave frees them",
        tables,
        ("pool, _ = blocks.retain(state.pool, rows_JM)", "pool = state.pool"),
    ),
    mutant(
        "occupied destination",
        "the blocks of the sequence that was there are leaked",
        tables,
        ("arrivals_S <= (state.lengths_S == 0).astype(jnp.int32)", "arrivals_S <= 1"),
    ),
    mutant(
        "one destination twice",
        "both sources are retained, one is seated",
        tables,
        (
            'arrivals_S = jnp.zeros_like(state.lengths_S).at[dst_J].add(1, mode="drop")',
            'arrivals_S = jnp.zeros_like(state.lengths_S).at[dst_J].set(1, mode="drop")',
        ),
    ),
    mutant(
        "a dead block attached",
        "the block is on the stack, and the next to take it shares it unawares",
        tables,
        ("blocks.is_live(state.pool, ids_JM)", "ids_JM != state.pool.null"),
    ),
    mutant(
        "a partial block attached",
        "a length inside a block makes the last cached block writable",
        tables,
        (" & (lengths_J % state.block_size == 0)", ""),
    ),
    # tables.truncate, tables.free
    mutant(
        "double release",
        "a block that is given back twice takes somebody's reference with it",
        tables,
        ("blocks.release(state.pool, gone_SM)", "blocks.release(blocks.release(state.pool, gone_SM)[0], gone_SM)"),
    ),
    mutant(
        "a missed release",
        "the blocks of finished sequences are never free again",
        tables,
        ("pool, _ = blocks.release(state.pool, gone_SM)", "pool = state.pool"),
    ),
    mutant(
        "stale table column after free",
        "the empty slot still names blocks, which the next to free it would release",
        tables,
        ("tables_SM = jnp.where(kept_SM, state.tables_SM, state.pool.null)", "tables_SM = state.tables_SM"),
    ),
    mutant(
        "a block kept past the end",
        "truncating to a block border keeps a block without tokens",
        tables,
        (
            "kept_S1 = _blocks_for(lengths_S, state.block_size)[:, None]",
            "kept_S1 = (lengths_S // state.block_size + 1)[:, None]",
        ),
    ),
    mutant(
        "truncating to a greater length",
        "the sequence has tokens that nothing maps",
        tables,
        (" & (lengths_S <= state.lengths_S))", ")"),
    ),
    # tables.copy_on_write
    mutant(
        "copy-on-write off by one",
        "two writers share the original",
        tables,
        ('get(mode="fill", fill_value=1) - 1', 'get(mode="fill", fill_value=2) - 2'),
    ),
    mutant(
        "a needless copy",
        "the last writer copies too, and nobody holds the original",
        tables,
        ('get(mode="fill", fill_value=1) - 1', 'get(mode="fill", fill_value=0)'),
    ),
    mutant(
        "ranked among all writers",
        "whether one block is copied depends on who writes to others",
        tables,
        ('keeps_S = run_S.at[before_S].get(mode="fill", fill_value=-1) == run_S', "keeps_S = slot_S >= others_S"),
    ),
    mutant(
        "a leaked source",
        "the original counts a holder that has left",
        tables,
        ('    pool = pool.replace(refs_N=pool.refs_N.at[src_S].add(-1, mode="drop"))\n', ""),
    ),
    mutant(
        "release before take",
        "all writers give up the block first; if nobody else holds it, one of them takes it for its copy",
        tables,
        ("copies_S = jnp.zeros_like(writes_S).at[order_S].set(~keeps_S)", "copies_S = block_S != null"),
        ("blocks.take(state.pool, copies", "blocks.take(blocks.release(state.pool, block_S)[0], copies"),
        ('    pool = pool.replace(refs_N=pool.refs_N.at[src_S].add(-1, mode="drop"))\n', ""),
    ),
    # tables.apply, tables.grow, tables.slots
    mutant(
        "free before keep",
        "the blocks that a finished sequence leaves to the cache are gone before the cache has them",
        tables,
        (
            "pool, kept = blocks.retain(state.pool, plan.keep)",
            "pool, kept = blocks.retain(free(state, plan.free_S).pool, plan.keep)",
        ),
    ),
    mutant(
        "half a plan",
        "a refused plan has done what came before the refusal",
        tables,
        ("return _either(ok, after, state)", "return after"),
    ),
    mutant(
        "copied, yet not appended",
        "a refused growth leaves its copies in the table",
        tables,
        ("return _either(ok, longer, state)", "return longer"),
    ),
    mutant(
        "copies of a refused plan",
        "the caller overwrites a block that was not taken",
        tables,
        (
            "return _either(ok, after, state), _copies_if(ok, copies, state.pool.null)",
            "return _either(ok, after, state), copies",
        ),
        (
            "return _either(ok, longer, state), _copies_if(ok, copies, state.pool.null)",
            "return _either(ok, longer, state), copies",
        ),
    ),
    mutant(
        "a place past the end",
        "a write past a sequence's length lands in a block that it may share",
        tables,
        (" & (pos_T < length_T)", ""),
    ),
)


def source(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8")


def load(mutant: Mutant) -> ModuleType:
    """Returns a `tables` module of its own, with a `blocks` of its own, of which one has the mistake."""
    fresh = {}
    with mock.patch.dict(sys.modules), mock.patch.object(jpaged, "blocks"), mock.patch.object(jpaged, "tables"):
        for module in (blocks, tables):
            text = source(module)
            for old, new in mutant.edits if module is mutant.module else ():
                text = text.replace(old, new)
            assert module.__spec__ is not None
            fresh[module] = importlib.util.module_from_spec(module.__spec__)
            sys.modules[module.__name__] = fresh[module]
            setattr(jpaged, module.__name__.rpartition(".")[2], fresh[module])
            exec(compile(text, f"{module.__file__} ({mutant.name})", "exec"), fresh[module].__dict__)
    return fresh[tables]
