"""Faults planted in the TPU kernels, each with a batch that must show it: a wrong result, NaN, or a race.

A copy that is ordered twice or never is not among them: the interpreter then waits for ever.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any, NamedTuple

from pallas_kernels.tpu import decode, eighths, prefill, products, trips, walk, write


class Mutant(NamedTuple):
    """A fault: ``old`` becomes ``new`` in a function's source."""

    what: str
    owner: Any
    function: str
    old: str
    new: str
    batch: str = "decode"

    def plant(self, monkeypatch: Any) -> None:
        original = inspect.getattr_static(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.function} has {source.count(self.old)} times {self.old!r}"
        module = inspect.getmodule(original)
        assert module is not None
        # `super()` without arguments needs the class that the function was written in.
        changed = re.sub(r"\bsuper\(\)", f"super({self.owner.__name__}, self)", source.replace(self.old, self.new))
        names = {**vars(module)}
        exec(f"from __future__ import annotations\n{changed}", names)
        monkeypatch.setattr(self.owner, self.function, names[self.function])


MUTANTS = [
    Mutant("values behind the last token stay", trips.Trips, "_settle", "self._zero(i, p, (used", "None and ((used"),
    Mutant(
        "the tile of the last token keeps what is behind it",
        trips.Trips,
        "_change_tile",
        "held = tile[:, piece] & mask",
        "held = tile[:, piece]",
        "read",
    ),
    Mutant(
        "blocks are not waited for", trips.Trips, "_await", "pl.when(there)(pltpu", "pl.when(there & (size < 2))(pltpu"
    ),
    Mutant("queries are not waited for", trips.Trips, "_await", "pl.when(there)(copy.wait)", "copy"),
    Mutant("new tokens are not waited for", trips.Trips, "_put", "pl.when(there)(copy.wait)", "copy"),
    Mutant(
        "a new token goes one further", trips.Trips, "_change_tile", "at = kept + t - base", "at = kept + t - base + 1"
    ),
    Mutant(
        "only the first of two tiles is written",
        trips.Trips,
        "_write_copies",
        "first // tokens != last // tokens",
        "first < 0",
        "few",
    ),
    Mutant("a block too few is ordered", walk.Walk, "blocks", "+ self.cut.block - 1", "- 1"),
    Mutant(
        "a block before the window is left out",
        walk.Walk,
        "blocks",
        "self._oldest(item.row) >> self._log_block)",
        "self._oldest(item.row) >> self._log_block) + 1",
        "window",
    ),
    Mutant(
        "a token too few is seen",
        walk.Walk,
        "in_chunk",
        "- item.chunk * self.cut.chunk",
        "- item.chunk * self.cut.chunk - 1",
    ),
    Mutant("a window one too long", walk.Walk, "in_window", "limit - self.window", "limit - self.window - 1", "window"),
    Mutant(
        "a window one too short", walk.Walk, "in_window", "limit - self.window", "limit - self.window + 1", "window"
    ),
    Mutant(
        "the row before is not forgotten", decode.Decode, "_turn", "jnp.where(first, 0.0, held[g])", "held[g]", "nan"
    ),
    Mutant(
        "the sum of the row before is not forgotten",
        decode.Decode,
        "_turn",
        "jnp.where(first, float(self.features.sinks), total[g])",
        "total[g]",
        "sinks",
    ),
    Mutant(
        "an earlier chunk's weight is not corrected",
        decode.Decode,
        "_turn",
        "total[g]) * old + mass",
        "total[g]) + mass",
    ),
    Mutant("a chunk's own weight is not corrected", decode.Decode, "_turn", "+ value * self._wide(fresh)", "+ value"),
    Mutant(
        "ids of another row",
        walk.TableReader,
        "_begin",
        "self._walk.table_row(item.row)",
        "(self._walk.table_row(item.row) + 1)",
    ),
    Mutant("ids of the chunk before", walk.TableReader, "_begin", "item.chunk * self._walk.cut.blocks", "0"),
    Mutant(
        "a row ends a chunk early", walk.Walk, "last_chunk", "self.tokens(row) - 1", "self.tokens(row) - 2", "borders"
    ),
    Mutant("queries see each other's", decode.Decode, "_seen", "+ 1 + t", "+ 2 + t", "few"),
    Mutant("a tree is a line", decode.Decode, "_seen", "(shown == 1) & ", "", "tree"),
    Mutant(
        "a query sees the one behind it",
        prefill.Prefill,
        "_masked",
        "self.walk.queries(item.row) + 1",
        "self.walk.queries(item.row) + 2",
        "prefill",
    ),
    Mutant("diagonal chunks are not masked", prefill.Prefill, "_attend", ">= self.cut.chunk", ">= 0", "prefill"),
    Mutant(
        "a tile keeps the one before",
        prefill.Prefill,
        "_begin",
        "self.mine.sum[...] = jnp.zeros(self.mine.sum.shape)",
        "pass",
        "prefill",
    ),
    Mutant(
        "the last rows' values are left out",
        prefill.Prefill,
        "_group",
        "    assert behind is not None\n    self._add(u, values, *behind)",
        "",
        "prefill",
    ),
    Mutant("a block's old tokens are lost", write, "_kernel", "held & ~fresh_bits | moved", "moved", "prefill"),
    Mutant(
        "a block comes from one word further", write, "_kernel", "- word % SUBLANES", "- word % SUBLANES - 1", "prefill"
    ),
    Mutant(
        "a block is written before it is whole",
        write,
        "_kernel",
        "pl.when(partial)(lambda: old_copy(i).wait())",
        "pass",
        "prefill",
    ),
    Mutant(
        "small numbers have a hidden one",
        eighths,
        "_float32",
        "value += jnp.minimum(value - least, 0.0)",
        "pass",
        "eighths",
    ),
    Mutant("halves change places", eighths, "to_bfloat16", "for n in (0, 2)", "for n in (2, 0)", "eighths"),
    Mutant("every turn does the first groups", decode.Decode, "_attend", "n % each * groups", "n * 0", "turns"),
    Mutant("every turn does the first row", decode.Decode, "_attend", "n // each,", "n * 0,", "turns"),
    Mutant(
        "one part of a float32", products, "_thirds", "x = x - thirds[-1].astype(jnp.float32)", "x = 0.0 * x", "f32"
    ),
    Mutant(
        "only the greatest product of parts",
        products,
        "dot",
        "for m in range(3 - n))",
        "for m in range(1 - n))",
        "f32",
    ),
    Mutant("NaN of eight bits is a number", eighths, "_float32", "magnitude >= infinite", "magnitude < 0", "eighths"),
    Mutant("the mask does not know the order", eighths, "places", "(lane >= span)", "(lane < 0)", "eighths"),
]
