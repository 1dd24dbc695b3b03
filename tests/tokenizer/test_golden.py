"""The default model's tokenizer, rebuilt from GGUF, against llama.cpp's and transformers' answers."""

import subprocess
import sys

import pytest

from jpaged.tokenizer import HFTokenizer, IncrementalDetokenizer
from tests.fixtures import GOLDEN, golden, smollm2_gguf, smollm2_tokenizer
from tests.house.tree import ROOT

CASES = golden("smollm2/tokens.json")["cases"]
RUNS = sorted(path.name for path in (GOLDEN / "smollm2").glob("*.json") if path.name != "tokens.json")


def test_ids_are_those_of_llama_cpp():
    tokenizer = smollm2_tokenizer()
    wrong = [case["text"] for case in CASES if tokenizer.encode(case["text"]) != case["ids"]]
    assert len(CASES) > 100
    assert wrong == []


def test_ids_decode_to_the_text():
    tokenizer = smollm2_tokenizer()
    for case in CASES:
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize("name", RUNS)
def test_prompts_and_answers_of_the_reference_runs(name):
    run, tokenizer = golden(f"smollm2/{name}"), smollm2_tokenizer()
    assert tokenizer.encode(run["prompt"]) == run["prompt_ids"]
    assert tokenizer.decode(run["greedy_ids"], skip_special_tokens=False) == run["greedy_text"]
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, continues=True)
    pieces = [stream.add([token_id]) for token_id in run["greedy_ids"]]
    assert "".join(pieces) + stream.finish() == run["greedy_text"]


def test_chat_template_writes_the_reference_prompt():
    question = {"role": "user", "content": "What is the capital of France?"}
    assert smollm2_tokenizer().apply_chat_template([question]) == golden("smollm2/chat_fact.json")["prompt"]


def test_facts_of_the_model():
    tokenizer = smollm2_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    assert not tokenizer.strips_leading_space
    assert tokenizer.encode("", add_special_tokens=True) == []  # SmolLM2 has a BOS token but does not put it in front


def test_saved_beside_a_checkpoint_it_is_the_same(tmp_path):
    smollm2_tokenizer().save(tmp_path)
    loaded = HFTokenizer.load(tmp_path)
    assert [loaded.encode(case["text"]) for case in CASES] == [case["ids"] for case in CASES]
    messages = [{"role": "user", "content": "hello"}]
    assert loaded.apply_chat_template(messages) == smollm2_tokenizer().apply_chat_template(messages)
    assert loaded.eos_token_ids == (2,)


def test_it_is_rebuilt_in_under_a_second():
    """In its own process, for here every call's types are checked. The `gguf` package's reader alone takes four."""
    program = (
        "import pathlib, sys, time; from models.tokenizers import from_gguf; begin = time.process_time(); "
        "from_gguf(pathlib.Path(sys.argv[1])); print(time.process_time() - begin)"
    )
    command = [sys.executable, "-c", program, str(smollm2_gguf())]
    assert float(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout) < 1
