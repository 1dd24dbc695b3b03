"""The allocator as anyone would write it with dicts and lists: slow, obvious, and without a block id.

A block is a name, used for one block ever, so a block that is freed and taken again has two names. `World` holds the
real allocator against this one and finds out which id bears which name.

Every command returns whether it fits, and changes nothing if it does not.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

DEAD = -1  # in a list of names: an id that names no live block; None is padding


class Geometry(NamedTuple):
    num_blocks: int
    num_slots: int
    num_columns: int
    block_size: int

    @property
    def max_new(self) -> int:
        """Enough to cross two block borders in one append."""
        return self.block_size + 2


class Model:
    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        self.tables: list[list[int]] = [[] for _ in range(geometry.num_slots)]
        self.texts: list[list[int]] = [[] for _ in range(geometry.num_slots)]  # each token is a number of its own
        self.cache: list[int] = []  # one entry for each reference
        self.cached_text: dict[int, list[int]] = {}
        self.next_name = 0
        self.next_token = 0
        self.copied: dict[int, tuple[int, int]] = {}  # by the last command: slot -> (old block, new block)
        self.written: list[tuple[int, int]] = []  # by the last command: (slot, position)

    def holders(self, name: int) -> int:
        return sum(table.count(name) for table in self.tables) + self.cache.count(name)

    def live(self) -> set[int]:
        return {*self.cache, *(name for table in self.tables for name in table)}

    def num_free(self) -> int:
        return self.geometry.num_blocks - len(self.live())

    def append(self, new: Sequence[int]) -> bool:
        shape = self.geometry
        if any(not 0 <= n <= shape.max_new for n in new):
            return False
        wanted = [blocks_for(len(text) + n, shape.block_size) for text, n in zip(self.texts, new, strict=True)]
        if any(w > shape.num_columns for w in wanted):
            return False
        if sum(wanted) - sum(map(len, self.tables)) > self.num_free():
            return False
        self.written = []
        for slot, n in enumerate(new):
            while len(self.tables[slot]) < wanted[slot]:
                self.tables[slot].append(self._name())
            for _ in range(n):
                self.written.append((slot, len(self.texts[slot])))
                self.texts[slot].append(self.next_token)
                self.next_token += 1
        return True

    def copy_on_write(self, writes: Sequence[bool]) -> bool:
        writers: dict[int, list[int]] = {}
        for slot, (text, write) in enumerate(zip(self.texts, writes, strict=True)):
            if write and len(text) % self.geometry.block_size:
                writers.setdefault(self.tables[slot][-1], []).append(slot)
        leaving: list[int] = []
        for name, slots in writers.items():
            everybody_writes = len(slots) == self.holders(name)
            leaving += slots[:-1] if everybody_writes else slots
        if len(leaving) > self.num_free():
            return False
        self.copied = {}
        for slot in leaving:
            self.copied[slot] = (self.tables[slot][-1], self._name())
            self.tables[slot][-1] = self.copied[slot][1]
        return True

    def grow(self, new: Sequence[int]) -> bool:
        return self._together(lambda: self.copy_on_write([n > 0 for n in new]) and self.append(new))

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> bool:
        pairs = [(s, d) for s, d in zip(src, dst, strict=True) if d != self.geometry.num_slots]
        if not self._may_seat([d for _, d in pairs]) or any(not self._is_slot(s) for s, _ in pairs):
            return False
        rows = [(list(self.tables[s]), list(self.texts[s])) for s, _ in pairs]
        for (_, d), (table, text) in zip(pairs, rows, strict=True):
            self.tables[d], self.texts[d] = table, text
        return True

    def attach(self, dst: Sequence[int], names: Sequence[Sequence[int | None]], lengths: Sequence[int]) -> bool:
        rows = [row for row in zip(dst, names, lengths, strict=True) if row[0] != self.geometry.num_slots]
        if not self._may_seat([d for d, _, _ in rows]):
            return False
        live = self.live()
        for _, row, length in rows:
            used, rest = divmod(length, self.geometry.block_size)
            if rest or not 0 <= used <= len(row):
                return False
            if not all(name in live for name in row[:used]) or any(name is not None for name in row[used:]):
                return False
        for d, row, _ in rows:
            self.tables[d] = [name for name in row if name is not None]
            self.texts[d] = [token for name in self.tables[d] for token in self._text_of(name)]
        return True

    def permute(self, dst: Sequence[int], src: Sequence[int]) -> bool:
        pairs = [(d, s) for d, s in zip(dst, src, strict=True) if d != self.geometry.num_slots]
        if any(not self._is_slot(d) or not self._is_slot(s) for d, s in pairs) or len({d for d, _ in pairs}) < len(
            pairs
        ):
            return False
        if any(len(self.texts[d]) != len(self.texts[s]) for d, s in pairs):
            return False
        rows = [(list(self.tables[s]), list(self.texts[s])) for _, s in pairs]
        for (d, _), (table, text) in zip(pairs, rows, strict=True):
            self.tables[d], self.texts[d] = table, text
        return True

    def truncate(self, lengths: Sequence[int]) -> bool:
        if any(not 0 <= length <= len(text) for length, text in zip(lengths, self.texts, strict=True)):
            return False
        for slot, length in enumerate(lengths):
            del self.texts[slot][length:]
            del self.tables[slot][blocks_for(length, self.geometry.block_size) :]
        return True

    def free(self, done: Sequence[bool]) -> bool:
        return self.truncate([0 if d else len(text) for d, text in zip(done, self.texts, strict=True)])

    def keep(self, names: Sequence[int | None]) -> bool:
        real = [name for name in names if name is not None]
        if not self.live().issuperset(real):
            return False
        self.cached_text |= {name: self._text_of(name) for name in real}
        self.cache += real
        return True

    def drop(self, names: Sequence[int | None]) -> bool:
        lost = Counter(name for name in names if name is not None)
        if any(count > self.holders(name) for name, count in lost.items()):
            return False
        for name in lost.elements():
            self.cache.remove(name)
        return True

    def apply(self, keep, free, drop, attach, fork, new) -> bool:
        return self._together(
            lambda: (
                self.keep(keep)
                and self.free(free)
                and self.drop(drop)
                and self.attach(**attach)
                and self.fork(**fork)
                and self.grow(new)
            )
        )

    def _name(self) -> int:
        self.next_name += 1
        return self.next_name

    def _text_of(self, name: int) -> list[int]:
        """The tokens of a full block, from a sequence that still has all of them, else from the cache."""
        size = self.geometry.block_size
        for table, text in zip(self.tables, self.texts, strict=True):
            for column in range(len(text) // size):
                if table[column] == name:
                    return text[column * size : (column + 1) * size]
        return self.cached_text[name]

    def _is_slot(self, slot: int) -> bool:
        return 0 <= slot < self.geometry.num_slots

    def _may_seat(self, dst: Sequence[int]) -> bool:
        return len(set(dst)) == len(dst) and all(self._is_slot(d) and not self.texts[d] for d in dst)

    def _together(self, commands) -> bool:
        before = copy.deepcopy(self.__dict__)
        if commands():
            return True
        self.__dict__ = before
        return False


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
