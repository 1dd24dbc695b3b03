"""The device that needs no time answers as the real one does, tokens apart."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jpaged.config import SamplingParams
from jpaged.llm import LLM
from scripts.benchmarks.instant import InstantSteps
from tests.models_tiny import tiny

pytestmark = pytest.mark.one_python

# More than there are slots, so that slots are freed and taken again.
PROMPTS = [[5] * length for length in (3, 40, 17, 1, 30)]
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=11)


def answers(steps_of: Callable[[LLM], Any]) -> list[tuple[int, ...]]:
    """What each step says of the pool and the slots, and how many tokens it made."""
    sizes = {"num_blocks": 24, "max_num_seqs": 2, "max_num_batched_tokens": 32, "decode_steps": 3, "max_model_len": 96}
    llm = LLM(tiny("llama"), enable_prefix_caching=False, **sizes)  # blocks that were never there are no prefix
    steps, found = steps_of(llm), []

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            state, output = run(*args, **options)
            parts = output.num_free, output.num_tokens, output.num_seqs, output.ok
            found.append((*(int(np.asarray(part)) for part in parts), int(np.asarray(output.made_KR).sum())))
            return state, output

        return step

    runs = {"prefill": watched(steps.prefill), "decode": watched(steps.decode)}
    watching: Any = types.SimpleNamespace(**runs, traces=steps.traces)
    llm.engine.steps = watching
    llm.generate(PROMPTS, PARAMS)
    return found


@pytest.mark.usefixtures("annotations_unchecked")  # its answers stand for arrays and are none
def test_it_answers_as_the_real_one():
    real = answers(lambda llm: llm.engine.steps)
    assert max(num_seqs for _, _, num_seqs, _, _ in real) == 2
    assert answers(lambda llm: InstantSteps(llm.engine, output_len=11)) == real
