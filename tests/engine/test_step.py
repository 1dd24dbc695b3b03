"""One compiled step at a time, with orders that the scheduler would not give."""

import jax
import pytest

from jpaged import LLM, SamplingParams, audit, plan, sampling
from jpaged.engine import Engine
from jpaged.step import StepOutput
from tests.models_tiny import SMALL, golden, tiny

pytestmark = pytest.mark.one_python

PROMPT = golden("llama", "golden_float32")[0]["prompt"][:3]


@pytest.fixture
def engine() -> Engine:
    """Two blocks of 4 tokens for two slots."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "block_size": 4, "num_blocks": 2}
    return LLM(tiny("llama"), dtype="float32", decode_steps=8, **sizes).engine


def run(engine: Engine, kind: str, **sections) -> StepOutput:
    """One step; a section is a value for its first entries."""
    shape = engine.packer.shape(2, 16 if kind == "prefill" else 0, beams=False)
    packed, view = engine.packer.blank(shape)
    for name, values in sections.items():
        if name == "steps":
            view[name][...] = values
        else:
            view[name][: len(values)] = values
    step = getattr(engine.steps, kind)
    engine._state, output = step(engine.loaded.weights, engine._state, packed, shape=shape)
    assert not audit.memory_faults(engine.state.paged, [])
    return jax.device_get(output)


def prefill(engine: Engine, slot: int, prompt: list[int]) -> StepOutput:
    row = sampling.pack_row(
        sampling.RowLayout.of(engine.config, engine.loaded.model.spec.vocab_size),
        SamplingParams(temperature=0),
        index=0,
        seed=0,
        prompt_len=len(prompt),
        max_tokens=100,
        stop_ids=[],
        bad_words=[],
    )
    return run(
        engine,
        "prefill",
        steps=1,
        slots=[slot],
        counts=[len(prompt)],
        flags=[plan.PREFILLS | plan.SAMPLES],
        tokens=prompt,
        admit=[slot],
        samplers=[row],
    )


def test_decode_leaves_early_when_blocks_run_short_and_goes_on_when_there_are_some(engine: Engine):
    made = prefill(engine, 0, PROMPT).sampled.token_R[0, :1].tolist()
    output = run(engine, "decode", steps=8, slots=[0], counts=[1])
    # 3 tokens, and room for 8: the KV of five more fits, then a third block would be needed.
    assert (int(output.steps), bool(output.ok), int(output.num_free)) == (5, False, 0)
    assert output.made_KR[:, 0].tolist() == [True] * 5 + [False] * 3
    assert engine.state.paged.lengths_S.tolist() == [8, 0]
    made += output.sampled.token_R[:5, 0].tolist()
    refused = run(engine, "decode", steps=8, slots=[0], counts=[1])
    assert (int(refused.steps), bool(refused.ok)) == (0, False)
    assert engine.state.paged.lengths_S.tolist() == [8, 0]
    plenty = LLM(tiny("llama"), **SMALL)
    wanted = plenty.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0]
    assert made == wanted.token_ids


def test_decode_leaves_early_when_all_are_done(engine: Engine):
    prefill(engine, 1, PROMPT)
    engine._state = engine.state.replace(done_S=engine.state.done_S.at[1].set(True))
    output = run(engine, "decode", steps=8, slots=[1], counts=[1])
    assert (int(output.steps), bool(output.ok)) == (0, True)
    assert not output.made_KR.any()


def test_a_step_frees_before_it_takes(engine: Engine):
    prefill(engine, 0, PROMPT * 2)  # both blocks
    refused = prefill(engine, 1, PROMPT)
    assert not refused.ok and not refused.made_KR.any()
    assert engine.state.paged.lengths_S.tolist() == [6, 0]
    output = run(engine, "decode", steps=1, slots=[], free=[1, 0])
    assert int(output.num_free) == 2
    assert prefill(engine, 1, PROMPT).ok
    assert engine.state.paged.lengths_S.tolist() == [0, 3]
