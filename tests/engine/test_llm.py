"""What `LLM` takes, and what it refuses before a model is loaded or a request runs."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged import LLM, SamplingParams, validate
from tests.fixtures import smollm2_tokenizer
from tests.models_tiny import SMALL, few_shapes, golden, tiny

pytestmark = [pytest.mark.xdist_group("llm"), pytest.mark.one_python]  # one engine for most

CASES = golden("llama", "golden_float32")[:2]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("llama"), **SMALL)


@pytest.mark.parametrize("form", [list, tuple, iter, lambda prompts: (prompt for prompt in prompts)])
def test_prompts_may_be_any_iterable(llm: LLM, form):
    outputs = llm.generate(form([case["prompt"] for case in CASES]), GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [case["greedy"][:4] for case in CASES]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_an_array_is_a_list_of_ids_or_several(llm: LLM, array):
    expected = CASES[0]["greedy"][:4]
    for prompts in (array(CASES[0]["prompt"]), array([CASES[0]["prompt"]]), [array(CASES[0]["prompt"])]):
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == [expected]
    with pytest.raises(ValueError, match="prompts=5 must be a text, a list of ids, or a list of such"):
        llm.generate(array(5), GREEDY)
    with pytest.raises(ValueError, match="prompt_token_ids must be a list of ids, not int"):
        llm.generate([array(5), "a"], GREEDY)


def test_parameters_may_be_any_iterable_of_as_many(llm: LLM):
    assert len(llm.generate([[1, 2], [3]], iter([GREEDY, GREEDY]))) == 2
    with pytest.raises(ValueError, match="there are 2 prompts and 1 SamplingParams"):
        llm.generate([[1, 2], [3]], iter([GREEDY]))


def test_the_names_are_those_of_vllm(llm: LLM):
    outputs = llm.generate(prompts=CASES[0]["prompt"], sampling_params=GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == CASES[0]["greedy"][:4]


def test_the_share_of_kv_that_held_tokens_is_exact():
    """With a token a block nothing is ever empty, whenever sequences end."""
    llm = few_shapes(LLM(tiny("llama"), **{**SMALL, "block_size": 1, "decode_steps": 1}))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 9, 5)]
    llm.generate([case["prompt"] for case in golden("llama", "golden_float32")[:3]], params)
    assert llm.engine.stats.kv_share == 1.0 and llm.engine.stats.sequences_peak == 2


def test_integers_of_numpy_are_integers():
    llm = LLM(tiny("llama"), seed=np.int64(3), **{name: np.int32(n) for name, n in SMALL.items() if name != "dtype"})
    prompt = CASES[0]["prompt"] * 20
    narrow: dict[str, Any] = {"seed": np.int32(-5), "min_tokens": np.uint8(3), "max_tokens": np.uint8(4)}
    params = SamplingParams(**narrow, logit_bias={np.uint8(5): 1.0})
    plain = SamplingParams(seed=-5, min_tokens=3, max_tokens=4, logit_bias={5: 1.0})
    assert params == plain
    first, second = (llm.generate(prompt, each)[0].outputs[0].token_ids for each in (params, plain))
    assert first == second and len(first) in (3, 4)
    llm.generate(prompt, SamplingParams(max_tokens=2))  # the engine's own seed


def test_everything_stays_int32_where_jax_would_have_64_bits():
    params = SamplingParams(
        temperature=0.8, top_k=5, top_p=0.9, frequency_penalty=0.5, seed=1, logprobs=2, max_tokens=6
    )
    with jax.enable_x64(True):
        found = LLM(tiny("llama"), **SMALL).generate(CASES[0]["prompt"], params)
    assert found[0].outputs == LLM(tiny("llama"), **SMALL).generate(CASES[0]["prompt"], params)[0].outputs


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_text_is_no_list_of_ids(llm: LLM):
    with pytest.raises(ValueError, match=r"token_ids='hello' is a text; try llm.tokenizer.encode"):
        llm.compute_logits(cast(Any, "hello"))


def test_a_backend_that_cannot_serve_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jpaged.llm.load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=r"backend='tpu' needs a TPU, and JAX found only cpu; try backend='xla'"):
        LLM("default", backend="tpu")


def test_a_setting_that_there_is_not():
    with pytest.raises(TypeError, match=r"LLM has no setting 'max_num_seq'; try max_num_seqs"):
        LLM("default", max_num_seq=4)
    with pytest.raises(TypeError, match=r"no setting 'tensor_parallel_size'; try one of .*block_size"):
        LLM("default", tensor_parallel_size=2)


def test_packages_add_families(monkeypatch: pytest.MonkeyPatch):
    asked = []
    family = SimpleNamespace(name="toy", load=lambda: lambda name, dtype: asked.append((name, dtype)) or tiny("llama"))
    own = SimpleNamespace(name="default", load=lambda: lambda name, dtype: asked.append((name, dtype)) or tiny("llama"))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [family, own])
    for name in ("toy:small", "default", "some/folder", "toy:", "a:b"):
        LLM(name, **SMALL)
    assert asked == [(name, "float32") for name in ("small", "default", "some/folder", "toy:", "a:b")]


def test_weights_on_several_devices_are_refused():
    loaded = tiny("llama")
    everywhere = NamedSharding(Mesh(jax.devices()[:2], ("x",)), PartitionSpec())
    with pytest.raises(ValueError, match="the weights are on 2 devices and this version runs on one; try loading"):
        LLM(loaded._replace(weights=jax.device_put(loaded.weights, everywhere)), **SMALL)


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("red", ["red", " red"]),
        ("  red", ["red", " red"]),
        ("\n", ["\n", " \n"]),
        (" ", [" "]),
        ("red ", ["red ", " red "]),
    ],
)
def test_what_a_bad_word_bans(word: str, texts: list[str]):
    tokenizer = smollm2_tokenizer()
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert validate.bad_word_ids(SamplingParams(bad_words=[word]), tokenizer) == expected
