"""The tests of the prefix cache and of the scheduler are put to the test: they must find every mistake of this list."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest

from jpaged import groups, ledger, prefix, schedule, scheduler, seats
from tests.scheduling import device, test_prefix, test_programs, test_scheduler

# Minutes, for what changes only with what faults are planted in.
pytestmark = [pytest.mark.every_setting, pytest.mark.one_python]


class Mutant(NamedTuple):
    name: str
    module: ModuleType
    old: str  # occurs exactly once
    new: str


MUTANTS = [
    Mutant("part of a block is none", ledger, "-(-tokens // block_size)", "tokens // block_size"),
    Mutant("forgets what the cache keeps", ledger, "- self._cache.live - own", "- own"),
    Mutant(
        "counts what is shared for everybody",
        ledger,
        "self.block_size) - self.held_S).sum()",
        "self.block_size)).sum()",
    ),
    Mutant("believes a digest", prefix, " or block.content != content", ""),
    Mutant("believes that equal blocks follow equal texts", prefix, "block.before is not before or ", ""),
    Mutant(
        "beginnings go before ends",
        prefix,
        "for block in reversed(blocks):\n            block.users",
        "for block in blocks:\n            block.users",
    ),
    Mutant(
        "what was found may still go",
        prefix,
        "                del self._idle[block]\n            block.users",
        "                pass\n            block.users",
    ),
    Mutant(
        "who is one of two expectations goes with the other",
        prefix,
        "self._expected[digest] > 1",
        "self._expected[digest] > 2",
    ),
    Mutant("keeps what nobody holds", prefix, "            if block.users:\n", "            if True:\n"),
    Mutant(
        "an evicted block is found",
        prefix,
        "            if not block.stored:\n                self._forget(block)\n",
        "",
    ),
    Mutant("what is wanted is not copied", prefix, "                stores.append((block, id))\n", ""),
    Mutant("copies what is there already", prefix, "block.wanted and not block.stored and", "block.wanted and"),
    Mutant("copies more than there is room for", prefix, " and self._makes_room()", ""),
    Mutant(
        "ends stay and beginnings go",
        prefix,
        "            self._discard(oldest)\n        return oldest is not None",
        "            return False\n        return False",
    ),
    Mutant("takes what is on its way", prefix, "if not block.coming), None)", "if True), None)"),
    Mutant(
        "what follows outlives what was before",
        prefix,
        "                if block in self._idle:\n",
        "                if False:\n",
    ),
    Mutant(
        "two take their blocks from each other",
        scheduler,
        "(self.running or draft.chunks or index)",
        "(self.running or draft.chunks)",
    ),
    Mutant(
        "what is on its way is fetched again", prefix, "block.id is None and not block.coming]", "block.id is None]"
    ),
    Mutant(
        "what is on its way needs no block", prefix, "            self.live += 1\n\n    def arrive", "\n    def arrive"
    ),
    Mutant("the host gives up what is on its way", prefix, "block.stored and not block.coming:", "block.stored:"),
    Mutant(
        "what is lost is found",
        prefix,
        "        if block.id is None:\n            self._forget(block)\n\n    def discards",
        "\n    def discards",
    ),
    Mutant(
        "a twin shares its text's future",
        prefix,
        "list(self.contents), list(self.digests)",
        "self.contents, self.digests",
    ),
    Mutant(
        "pauses while a step is in flight", scheduler, "            if in_flight:\n                return None\n", ""
    ),
    Mutant("pauses the first in rank", scheduler, "self._pause(self.running[-1])", "self._pause(self.running[0])"),
    Mutant(
        "waits for whoever has paused",
        scheduler,
        "        self._cache.disappoint(sequence.expected)\n        if self._seats",
        "        if self._seats",
    ),
    Mutant("computes what another computes", prefix, "and chain.digests[count] in self._expected)", "and False)"),
    Mutant("finds the last token's block too", scheduler, "(sequence.target() - 1) //", "sequence.target() //"),
    Mutant(
        "a paused sequence forgets its last token",
        scheduler,
        "sequence.kv_len + (not group.are_beams)",
        "sequence.kv_len",
    ),
    Mutant(
        "paused beams sample where they have been",
        scheduler,
        "end == sequence.prefill_len and not group.resumes_beams",
        "end == sequence.prefill_len",
    ),
    Mutant(
        "paused beams share no prompt",
        scheduler,
        "                sequence.is_twin = sequence is not group.sequences[0]\n",
        "                pass\n",
    ),
    Mutant(
        "who paused wants nothing back",
        scheduler,
        "                self._cache.want(sequence.wanted)\n",
        "                sequence.wanted = []\n",
    ),
    Mutant("copies what nobody wants any more", scheduler, "in stores if block.stored)", "in stores)"),
    Mutant("a twin still wants what it has", scheduler, "            self._cache.unwant(twin.wanted)\n", ""),
    Mutant(
        "who is over still wants its blocks",
        scheduler,
        "            self._cache.unwant(sequence.wanted)\n            sequence.wanted = []\n            if",
        "            if",
    ),
    Mutant("twins hold nothing", scheduler, "            self._cache.hold(twin.held)\n", ""),
    Mutant("a block of twins is one's own", scheduler, "            self._cache.hold(both)\n", ""),
    Mutant(
        "what is shared is what is new",
        scheduler,
        "- (len(sequence.held) - len(new)))]",
        "- len(sequence.held))]",
    ),
    Mutant("what a sequence starts with is not held", scheduler, "        self._cache.hold(hits)\n", ""),
    Mutant(
        "more tokens than a step may hold",
        scheduler,
        "Draft(self._limits.tokens - len(decoding),",
        "Draft(self._limits.tokens,",
    ),
    Mutant("several steps beside somebody who waits", scheduler, "and not self.waiting:", "and True:"),
    Mutant("one slot for two", scheduler, "empty.pop(0)", "empty[0]"),
    Mutant("a step for the last token", seats, "& (bound_S < self.limit_S)\n", "& (self.limit_S > 0)\n"),
    Mutant(
        "beams go each its own way", seats, "            ready_S[slots] = ready_S[slots].all()\n", "            pass\n"
    ),
    Mutant("beams that part take no blocks", seats, "            self.save(group, group.saved - loss)\n", ""),
    Mutant("beams need no room to part", seats, "sum(min(g.saved, self._loss(g, steps)) for g in self._savers)", "0"),
]


MODULES = (prefix, ledger, groups, schedule, seats, scheduler)
TESTS = (test_prefix, device, test_scheduler, test_programs)


def load(mutant: Mutant) -> None:
    """Modules and tests of their own, of which one module has the mistake. For as long as sys.modules is a copy."""
    for module in MODULES + TESTS:
        assert module.__file__ is not None and module.__spec__ is not None
        text = Path(module.__file__).read_text(encoding="utf-8")
        if module is mutant.module:
            assert text.count(mutant.old) == 1, f"{mutant.old!r} must occur exactly once in {module.__name__}"
            text = text.replace(mutant.old, mutant.new)
        fresh = sys.modules[module.__name__] = importlib.util.module_from_spec(module.__spec__)
        exec(compile(text, f"{module.__file__} ({mutant.name})", "exec"), fresh.__dict__)


def run_the_tests() -> None:
    for tests in (test_prefix, test_scheduler, test_programs):
        for name, test in vars(sys.modules[tests.__name__]).items():
            if name.startswith("test_"):
                for values in cases(test):
                    test(**values)
    for seed in (*range(10), 122):  # in the last a copy is ordered that nobody wants any more
        sys.modules[test_programs.__name__].random_program(seed, 2, 150)


def cases(test: Callable[..., None]) -> list[dict[str, Any]]:
    """What pytest would hand to a test; the random programs are so long that there are shorter ones instead."""
    if test.__name__ == "test_random_programs":
        return []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            return [{mark.args[0]: value} for value in mark.args[1]]
    return [{}]


def test_the_tests_pass_as_run_here() -> None:
    run_the_tests()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    with mock.patch.dict(sys.modules):
        load(mutant)
        with pytest.raises((Exception, pytest.fail.Exception)):
            run_the_tests()
