"""What configs accept, what they make of it, and how they refuse."""

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from jpaged.config import EngineConfig, SamplingParams

CONFIG = EngineConfig(
    max_num_seqs=8,
    max_model_len=100,
    max_logprobs=5,
    max_stop_token_ids=3,
    max_logit_bias=2,
    max_bad_words=2,
)
VOCAB = 50


def problems(config: EngineConfig = CONFIG, **fields: Any) -> list[str]:
    return SamplingParams(**fields).problems(config, vocab_size=VOCAB)


def test_the_defaults_are_vllms():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": (),
        "bad_words": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }
    assert problems() == []


GOOD = [
    {"n": 8},
    {"temperature": 0},
    {"temperature": 100.0},
    {"top_p": 1},
    {"top_p": 1e-6},
    {"top_k": -1},
    {"top_k": 10**9},
    {"min_p": 1},
    {"presence_penalty": -2.0, "frequency_penalty": 2},
    {"repetition_penalty": 0.1},
    {"repetition_penalty": 2**-126},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"seed": np.int64(5), "top_k": np.int32(3), "temperature": np.float32(0.5)},
    {"max_tokens": None, "min_tokens": 99},
    {"max_tokens": 99, "min_tokens": 99},
    {"stop": "\n"},
    {"stop": ["a", "bc"]},
    {"stop_token_ids": [0, 49]},
    {"logprobs": 0, "prompt_logprobs": 5},
    {"logit_bias": {0: 1, 49: -1.5}},
    {"bad_words": ["one", "two"]},
    {"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_accepted(fields: dict):
    assert problems(**fields) == []


BAD = [
    ("n", 0),
    ("n", 9),
    ("n", 1.0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", 1e39),
    ("temperature", "0.7"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1.0),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("top_k", None),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-46),  # 0 in float32
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("seed", 1.0),
    ("seed", "1"),
    ("seed", True),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 100),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("min_tokens", None),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop", b"a"),
    ("stop_token_ids", [50]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 7),
    ("stop_token_ids", np.array(7)),
    ("stop_token_ids", [[1, 2]]),
    ("stop_token_ids", "7"),
    ("stop_token_ids", [1, 2, 3, 4]),
    ("ignore_eos", 1),
    ("ignore_eos", None),
    ("skip_special_tokens", "yes"),
    ("include_stop_str_in_output", 0),
    ("logprobs", -1),
    ("logprobs", 6),
    ("logprobs", True),
    ("logprobs", 1.0),
    ("prompt_logprobs", 6),
    ("prompt_logprobs", -1),
    ("logit_bias", {50: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {1: "x"}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: True}),
    ("logit_bias", {1: 1.0, 2: 1.0, 3: 1.0}),
    ("logit_bias", {1: 1.0, "1": 2.0}),
    ("logit_bias", [1]),
    ("logit_bias", 3),
    ("logit_bias", {1: 10**400}),
    ("logit_bias", "3"),
    ("bad_words", [""]),
    ("bad_words", [3]),
    ("bad_words", ["a", "b", "c"]),
    ("bad_words", 3),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_refused(name: str, value: Any):
    """Building never raises. The one sentence names the field and what was given, and shows a way out."""
    found = problems(**{name: value})
    assert len(found) == 1, found
    assert found[0].startswith(name)
    assert found[0].endswith(".")
    assert ";" in found[0] or "leave it out" in found[0]


def test_every_fault_is_named_at_once():
    found = problems(n=0, temperature=-1, top_p=2, top_k=-5, seed="x", max_tokens=0, stop=["", 3], logprobs=99)
    assert [sentence.split("=")[0].split()[0] for sentence in found] == [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "stop",
        "stop",
        "logprobs",
    ]


def test_the_numbers_are_in_the_message():
    assert problems(min_tokens=20)[0].startswith("min_tokens=20 must be at most max_tokens=16")
    assert "from 1 to 99; max_model_len=100" in problems(max_tokens=100)[0]
    assert "from 0 to 5; max_logprobs=5, vocabulary 50" in problems(logprobs=6)[0]
    assert "from 0 to 3" in SamplingParams(logprobs=4).problems(CONFIG, vocab_size=3)[0]


def test_without_a_length_only_the_engine_can_judge_max_tokens():
    assert problems(EngineConfig(), max_tokens=10**6) == []


def test_values_are_brought_into_one_form():
    params = SamplingParams(
        stop="x",
        stop_token_ids=[3, 1, 3],
        bad_words=("a", "a"),
        logit_bias={"7": 200, 2: -1000.0, 3: 1},
        top_k=-1,
        seed=-1,
    )
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 1)
    assert params.bad_words == ("a",)
    assert params.logit_bias == ((7, 100.0), (2, -100.0), (3, 1))
    assert params.top_k == 0
    assert params.seed is None
    assert dataclasses.replace(params, n=2).logit_bias == params.logit_bias
    assert pickle.loads(pickle.dumps(params)) == params
    assert len({params, dataclasses.replace(params)}) == 1


def test_a_repeat_of_another_type_is_not_lost():
    assert len(problems(stop_token_ids=[1, True])) == 1


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature: float, greedy: bool):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_params_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # pyright: ignore[reportAttributeAccessIssue] (what is forbidden is what is tried)


def test_the_engines_defaults():
    config = EngineConfig()
    assert (config.block_size, config.num_blocks, config.kv_cache_memory) == (16, None, None)
    assert (config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens) == (16, None, 512)
    assert (config.decode_steps, config.dtype, config.backend, config.seed) == (8, "auto", None, 0)


BAD_ENGINES = [
    {"block_size": 0},
    {"block_size": "16"},
    {"block_size": True},
    {"num_blocks": 0},
    {"num_blocks": 2**31 - 1},
    {"num_blocks": 5, "kv_cache_memory": 10},
    {"kv_cache_memory": -1},
    {"kv_cache_memory": 1e9},
    {"max_num_seqs": 0},
    {"max_num_seqs": 600},
    {"max_num_seqs": 8, "max_num_batched_tokens": 7},
    {"max_model_len": 1},
    {"max_num_batched_tokens": 0},
    {"decode_steps": 0},
    {"dtype": "float16"},
    {"dtype": None},
    {"backend": "cuda"},
    {"backend": ""},
    {"seed": 2**63},
    {"seed": None},
    {"max_logprobs": -1},
    {"max_stop_token_ids": 5000},
    {"max_logit_bias": 1.5},
    {"max_bad_words": -1},
    {"max_bad_word_tokens": 0},
]


@pytest.mark.parametrize("fields", BAD_ENGINES, ids=str)
def test_an_engine_is_refused(fields: dict):
    with pytest.raises(ValueError) as error:
        EngineConfig(**fields)
    for name, value in fields.items():
        assert f"{name}={value!r}" in str(error.value)


def test_all_that_is_wrong_with_an_engine_is_said_at_once():
    with pytest.raises(ValueError) as error:
        EngineConfig(block_size=0, num_blocks=1, kv_cache_memory=1, dtype="int8", backend="rocm", decode_steps=0)  # pyright: ignore[reportArgumentType] (wrong on purpose)
    for said in ("block_size=0", "both size the pool", "dtype='int8'", "backend='rocm'", "decode_steps=0"):
        assert said in str(error.value)


@pytest.mark.parametrize("backend", [None, "xla", "tpu", "gpu", "tpu_interpret", "gpu_interpret"])
def test_backends_by_name(backend: Any):
    assert EngineConfig(backend=backend).backend == backend


def test_as_many_slots_as_tokens():
    EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)
