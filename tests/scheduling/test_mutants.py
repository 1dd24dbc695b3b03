"""The tests of the budget and of the scheduler are put to the test: they must find every mistake of this list."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest

import jpaged
from jpaged import budget, scheduler
from tests.scheduling import test_budget, test_scheduler

pytestmark = pytest.mark.one_python


class Mutant(NamedTuple):
    name: str
    module: ModuleType
    old: str  # occurs exactly once
    new: str


MUTANTS = [
    Mutant("forgets what is in flight", budget, "self.read_free - int(grown.sum())", "self.read_free"),
    Mutant("what came back is counted for ever", budget, "if entry[0] > step", "if entry[0] >= step"),
    Mutant("what comes back is forgotten", budget, "sum(blocks for _, blocks in self.returned)", "0"),
    Mutant("an empty slot keeps its bound", budget, "        bound_S[freed] = 0\n", ""),
    Mutant("promises what is taken already", budget, "blocks_for(self.bound_S, self.block_size)).sum", "0).sum"),
    Mutant("part of a block is none", budget, "-(-tokens // block_size)", "tokens // block_size"),
    Mutant("admits what does not fit", scheduler, "if need > unpromised or room <= 0:", "if room <= 0:"),
    Mutant("admits two for the room of one", scheduler, "        unpromised -= need\n", ""),
    Mutant(
        "promises nothing to those who run", scheduler, "budget.free - budget.promised(queue.limit_S)", "budget.free"
    ),
    Mutant("more tokens than a step may hold", scheduler, "limits.tokens - len(decoding)", "limits.tokens"),
    Mutant("a step for the last token", scheduler, "(budget.bound_S < queue.limit_S)", "(queue.limit_S > 0)"),
    Mutant(
        "decodes several steps beside a prompt",
        scheduler,
        "if len(decoding) and not chunks else 1",
        "if decoding.size else 1",
    ),
    Mutant("samples before the prompt is over", scheduler, "| (ends_R == queue.prompt_S[slots_R])", "| (ends_R > 0)"),
]


def load(mutant: Mutant) -> dict[ModuleType, ModuleType]:
    """Modules of their own, of which one has the mistake."""
    fresh = {}
    with mock.patch.dict(sys.modules), mock.patch.object(jpaged, "budget"), mock.patch.object(jpaged, "scheduler"):
        for module in (budget, scheduler):
            assert module.__file__ is not None and module.__spec__ is not None
            text = Path(module.__file__).read_text(encoding="utf-8")
            if module is mutant.module:
                assert text.count(mutant.old) == 1, f"{mutant.old!r} must occur exactly once in {module.__name__}"
                text = text.replace(mutant.old, mutant.new)
            fresh[module] = sys.modules[module.__name__] = importlib.util.module_from_spec(module.__spec__)
            setattr(jpaged, module.__name__.rpartition(".")[2], fresh[module])
            exec(compile(text, f"{module.__file__} ({mutant.name})", "exec"), fresh[module].__dict__)
    return fresh


def run_the_tests() -> None:
    for tests in (test_budget, test_scheduler):
        for name, test in vars(tests).items():
            if name.startswith("test_"):
                test(*((1,) if test.__code__.co_argcount else ()))


def test_the_tests_pass_as_run_here() -> None:
    run_the_tests()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = load(mutant)
    monkeypatch.setattr(test_budget, "budget", fresh[budget])
    monkeypatch.setattr(test_scheduler, "budgets", fresh[budget])
    monkeypatch.setattr(test_scheduler, "scheduler", fresh[scheduler])
    with pytest.raises(AssertionError):
        run_the_tests()
