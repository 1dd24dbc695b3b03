"""The whole engine against transformers on small random checkpoints.

golden_float32.json is transformers loaded as a user loads it. golden.json comes from a model that had been cast to
bfloat16 and back, which rounded its rotary frequencies; with the same rounding we must agree with it too.
"""

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from tests.models_tiny import SMALL, apart, few_shapes, golden, is_whole, stacked, tiny, with_bfloat16_frequencies

pytestmark = pytest.mark.xdist_group("golden_tiny")  # settings apart, they compile the same

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, prompt_logprobs=0)


def as_made(family, name):
    loaded = tiny(family)
    return loaded if name == "golden_float32" else with_bfloat16_frequencies(loaded)


def check(llm, cases):
    outputs = llm.generate([case["prompt"] for case in cases], GREEDY)
    for output, case in zip(outputs, cases, strict=True):
        assert output.outputs[0].token_ids == case["greedy"]
        assert output.prompt_logprobs[0] is None
        found = [
            scores[token].logprob for scores, token in zip(output.prompt_logprobs[1:], case["prompt"][1:], strict=True)
        ]
        np.testing.assert_allclose(found, case["prompt_logprobs"], rtol=1e-3, atol=1e-3)
    assert is_whole(llm)


@pytest.mark.parametrize("name", ["golden", "golden_float32"])
@pytest.mark.parametrize("family", ["llama", "llama3-rope"])
def test_tokens_and_scores(family, name):
    llm, cases = few_shapes(LLM(as_made(family, name), **SMALL)), golden(family, name)
    check(llm, cases)
    for case in cases:
        logits = llm.compute_logits(case["prompt"])
        np.testing.assert_allclose(logits[-1], case["last_logits"], rtol=1e-3, atol=1e-3)


@pytest.mark.one_python
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"block_size": 1, "decode_steps": 1}, marks=pytest.mark.every_setting),
        pytest.param(
            {"block_size": 128, "max_num_seqs": 3, "max_num_batched_tokens": 100}, marks=pytest.mark.every_setting
        ),
        pytest.param({"max_num_seqs": 1, "max_num_batched_tokens": 3}, marks=pytest.mark.every_setting),
        {"num_blocks": 32, "decode_steps": 40},
    ],
    ids=str,
)
def test_no_setting_changes_the_tokens(settings):
    check(few_shapes(LLM(tiny("llama"), **{**SMALL, **settings})), golden("llama", "golden_float32"))


@pytest.mark.one_python
@pytest.mark.parametrize("form", [stacked, apart], ids=lambda form: form.__name__)
def test_however_layers_are_held_it_is_the_same_model(form):
    check(few_shapes(LLM(form(tiny("llama3-rope")), **SMALL)), golden("llama3-rope", "golden_float32"))
