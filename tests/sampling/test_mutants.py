"""The checks notice mistakes that are easy to make: each mutant is the package with one place changed."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import jpaged.sampling
from tests.sampling import checks

# Minutes, for what changes only with what faults are planted in.
pytestmark = [pytest.mark.every_setting, pytest.mark.one_python]

SOURCE = Path(jpaged.sampling.__file__).parent


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    killer: Callable[[ModuleType], None]


MUTANTS = [
    Mutant(
        "top_k keeps one too few",
        "weights.py",
        "Place(last.value_R, last.index_R + 1)",
        "Place(last.value_R, last.index_R)",
        checks.top_k_keeps_k_of_the_tied,
    ),
    Mutant(
        "top_k keeps all that are tied",
        "weights.py",
        "Place(last.value_R, last.index_R + 1)",
        "Place(last.value_R, x_RV.shape[1] + 0 * last.index_R)",
        checks.top_k_keeps_k_of_the_tied,
    ),
    Mutant(
        "top_p keeps the token at the limit",
        "weights.py",
        "(top_p_R - SLACK)",
        "(top_p_R + SLACK)",
        checks.top_p_keeps_no_token_too_many,
    ),
    Mutant(
        "top_p is of the whole vocabulary",
        "sampler.py",
        """        weights_RV = weights.keep_top_k(weights_RV, x_RV, rows.top_k_R, random_R)
        target_R = weights.top_p_target(weights_RV, rows.top_p_R)
""",
        """        target_R = weights.top_p_target(weights_RV, rows.top_p_R)
        weights_RV = weights.keep_top_k(weights_RV, x_RV, rows.top_k_R, random_R)
""",
        checks.top_p_is_of_what_top_k_left,
    ),
    Mutant(
        "a rejected draw bounds nothing",
        "weights.py",
        "jnp.where(ranks.before(x_RV, bound), weights_RV, 0)",
        "weights_RV",
        checks.cuts_leave_proportions_as_they_are,
    ),
    Mutant(
        "the second draw uses the bits of the first",
        "weights.py",
        "bits_of(round_)",
        "bits_of(0 * round_)",
        checks.cuts_leave_proportions_as_they_are,
    ),
    Mutant(
        "ties go to the highest id",
        "ranks.py",
        "index_R = jnp.min(jnp.where(x_RN == value_R[:, None], index_RN, x_RN.shape[1] - 1), axis=1)",
        "index_R = jnp.max(jnp.where(x_RN == value_R[:, None], index_RN, 0), axis=1)",
        checks.greedy_takes_the_first_best,
    ),
    Mutant(
        "min_p leaves out the token at the limit",
        "weights.py",
        "relative_RV >= min_p_R[:, None] * (1 - SLACK)",
        "relative_RV > min_p_R[:, None] * (1 + SLACK)",
        checks.min_p_is_relative_to_the_best_and_comes_first,
    ),
    Mutant(
        "temperature multiplies",
        "weights.py",
        "/ jnp.minimum(temperature_R, 1e30)[:, None])",
        "* jnp.minimum(temperature_R, 1e30)[:, None])",
        checks.cuts_leave_proportions_as_they_are,
    ),
    Mutant(
        "presence and frequency count the prompt",
        "adjust.py",
        "output_RP = positions_RP >= rows.prompt_len_R[:, None]",
        "output_RP = positions_RP >= 0",
        checks.penalties_by_hand,
    ),
    Mutant(
        "repetition ignores the prompt",
        "adjust.py",
        ".at[numbers_R1, ids_RP].set(True,",
        ".at[numbers_R1, ids_RP].max(output_RP,",
        checks.penalties_by_hand,
    ),
    Mutant(
        "repetition divides negative logits",
        "adjust.py",
        "x_RV * repetition_R1)",
        "x_RV / repetition_R1)",
        checks.penalties_by_hand,
    ),
    Mutant(
        "penalties read past the end",
        "adjust.py",
        "positions_RP < lengths_R[:, None]",
        "positions_RP <= lengths_R[:, None]",
        checks.penalties_by_hand,
    ),
    Mutant(
        "logprobs are of the biased logits",
        "sampler.py",
        "logprobs.token_logprobs(logits_RV, token_R",
        "logprobs.token_logprobs(x_RV, token_R",
        checks.bias_comes_before_penalties_and_after_logprobs,
    ),
    Mutant(
        "bad words begin in the prompt",
        "adjust.py",
        "positions_RL >= rows.prompt_len_R[:, None]",
        "positions_RL >= 0",
        checks.bad_words_are_banned_where_they_would_end,
    ),
    Mutant(
        "the minimum length is one short",
        "adjust.py",
        "lengths_R < rows.min_len_R",
        "lengths_R + 1 < rows.min_len_R",
        checks.stop_ids_wait_for_the_minimum,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_noticed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = "mutant_of_sampling"
    folder = tmp_path / package
    folder.mkdir()
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        if path.name == mutant.file:
            assert text.count(mutant.old) == 1, "the source has changed: write the mutant anew"
            text = text.replace(mutant.old, mutant.new)
        (folder / path.name).write_text(text.replace("jpaged.sampling", package))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    try:
        with pytest.raises(AssertionError):
            mutant.killer(importlib.import_module(package))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
