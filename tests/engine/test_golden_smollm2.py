"""The whole engine on the real default model, against transformers: ids, greedy tokens, and first-step logits."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

import models
from jpaged import LLM, SamplingParams
from jpaged.buckets import Buckets
from tests.fixtures import GOLDEN, golden

pytestmark = pytest.mark.xdist_group("smollm2")

NAMES = sorted(path.stem for path in (GOLDEN / "smollm2").glob("*.json") if path.stem != "tokens")
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@functools.cache
def loaded():
    return models.load("default", dtype="float32", progress=False)


SETTINGS = list(itertools.product((1, 16, 128), (1, 8)))  # block size, decode steps
OFTEN = (16, 8)


def when(setting: tuple[int, int]) -> pytest.MarkDecorator | tuple[()]:
    """In CI: one setting, and the rest only on tiny models."""
    return pytest.mark.one_python if setting == OFTEN else pytest.mark.every_setting


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> LLM:
    """One engine at a time: tests that take it are ordered by its setting."""
    return make(*request.param)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make(*OFTEN)


def make(block_size: int, decode_steps: int, *, few_shapes: bool = True, chunk: int = 64, kv_tokens: int = 4096) -> LLM:
    seqs = min(len(NAMES), chunk)
    llm = LLM(
        loaded(),
        dtype="float32",
        block_size=block_size,
        decode_steps=decode_steps,
        max_model_len=2048,
        max_num_seqs=seqs,
        max_num_batched_tokens=chunk,  # long prompts come in chunks
        num_blocks=kv_tokens // block_size,
    )
    if few_shapes:  # only two sizes, alone and together: each shape takes seconds to compile
        llm.engine.buckets = Buckets(rows=(1, seqs), prefill_rows=(1, seqs), tokens=(chunk,))
    return llm


def check(llm: LLM, names: list[str]) -> None:
    cases = [golden(f"smollm2/{name}.json") for name in names]
    outputs = llm.generate([case["prompt"] for case in cases], GREEDY)
    for output, case in zip(outputs, cases, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["greedy_ids"], case["name"]


@pytest.mark.parametrize(
    "engine",
    [pytest.param(each, marks=when(each), id=str(each)) for each in SETTINGS],
    indirect=True,
)
def test_all_together(engine: LLM):
    check(engine, NAMES)


@pytest.mark.every_setting
@pytest.mark.parametrize("engine", SETTINGS, ids=str, indirect=True)
def test_each_alone(engine: LLM):
    for name in NAMES:
        check(engine, [name])


SAMPLED = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=48, ignore_eos=True)


@pytest.mark.every_setting
def test_cached_or_paused_with_samples_beside(monkeypatch: pytest.MonkeyPatch):
    """In a pool that has room for the longest and little else; what was there before is found, then paused anew."""
    cases = [golden(f"smollm2/{name}.json") for name in NAMES]
    longest = max(len(case["prompt_ids"]) for case in cases) + 64
    tight = make(*OFTEN, kv_tokens=-(-longest // 16) * 16 + 8 * 16)
    assert tight.engine.stats.hit_tokens == 0
    beside = None
    for mode in ("recompute", "swap"):
        monkeypatch.setattr(tight.engine, "config", dataclasses.replace(tight.config, preemption_mode=mode))
        tight.engine.stats.reset()
        outputs = tight.generate(
            [cases[0]["prompt"], *(case["prompt"] for case in cases)], [SAMPLED, *[GREEDY] * len(cases)]
        )
        for output, case in zip(outputs[1:], cases, strict=True):
            assert output.outputs[0].token_ids == case["greedy_ids"], (mode, case["name"])
        beside = beside or outputs[0].outputs
        assert [one.token_ids for one in outputs[0].outputs] == [one.token_ids for one in beside]
        assert tight.engine.stats.preemptions > 0 and tight.engine.stats.hit_tokens > 0
        assert (tight.engine.stats.swapped_in > 0) == (mode == "swap")


@pytest.mark.every_setting
@pytest.mark.parametrize("chunk", [1, 7])
def test_prompts_in_smaller_chunks(chunk: int):
    check(make(*OFTEN, chunk=chunk), NAMES)


@pytest.mark.every_setting
def test_together_in_the_shapes_that_users_get():
    check(make(*OFTEN, few_shapes=False), NAMES)


def check_logits(llm: LLM, name: str) -> None:
    case = golden(f"smollm2/{name}.json")
    logits = llm.compute_logits(case["prompt_ids"])[-1]
    ids = np.array([token for token, _ in case["first_step_top5"]])
    np.testing.assert_array_equal(np.argsort(-logits, kind="stable")[:5], ids)
    np.testing.assert_allclose(logits[ids], [score for _, score in case["first_step_top5"]], atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_first_step_logits(llm: LLM, name: str):
    check_logits(llm, name)


@pytest.mark.every_setting
@pytest.mark.parametrize("block_size", [1, 128])
def test_first_step_logits_at_other_block_sizes(block_size: int):
    llm = make(block_size, 8)
    for name in NAMES:
        check_logits(llm, name)


def test_text_streams_in_whole_characters(llm: LLM):
    """The joined pieces are the text, and a piece never ends inside a character (the model writes emoji here)."""
    case = golden("smollm2/unicode.json")
    pieces = [delta.text or "" for delta in llm.stream(case["prompt"], GREEDY)]
    text = "".join(pieces)
    assert text == case["greedy_text"]
    assert "\ufffd" not in "".join(pieces[:-1])


def test_stop_strings_end_text_ids_and_logprobs(llm: LLM):
    output = llm.generate(
        "Three primary colors:\n1. Red\n2.",
        SamplingParams(temperature=0, max_tokens=40, stop=["Yellow", "Grey"], logprobs=0),
    )[0].outputs[0]
    assert output.text == " Blue\n3. Green\n4. "
    assert (output.finish_reason, output.stop_reason) == ("stop", "Yellow")
    assert (len(output.token_ids), len(output.logprobs or ())) == (9, 9)
