"""`decode.py` on what it cannot do: status 2, one line that says why, and no traceback."""

import concurrent.futures
import os
import shutil
from pathlib import Path

import pytest

from tests.scripts.running import GOLDEN, TINY, Done, Script

pytestmark = [pytest.mark.xdist_group("decode"), pytest.mark.one_python]


def refused(done: Done, why: str) -> None:
    assert (done.status, done.out) == (2, "")
    assert len(done.complaints) == 1, done.err
    assert why in done.err


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--nonsense=1", "Unknown command line flag 'nonsense'"),
        ("--temperatur=1", "Did you mean: temperature?"),
        ("a prompt", "'a prompt' is no flag"),
        ("--max_tokens", "Missing value for flag --max_tokens"),
        ("--max_tokens=0", "max_tokens=0"),
        ("--max_tokens=x", "max_tokens=x"),
        ("--max_tokens=10000000000", "max_tokens=10000000000 must be"),
        ("--min_tokens=-1", "min_tokens=-1"),
        ("--min_tokens=200", "must be at most max_tokens=128"),
        ("--n=0", "n=0"),
        ("--n=17", "max_num_seqs"),
        ("--temperature=-1", "temperature=-1"),
        ("--temperature=nan", "temperature=nan must be"),
        ("--temperature=inf", "temperature=inf must be"),
        ("--top_p=0", "top_p=0.0 must be"),
        ("--top_p=nan", "top_p=nan must be"),
        ("--top_k=-2", "top_k=-2 must be"),
        ("--min_p=1.5", "min_p=1.5 must be"),
        ("--presence_penalty=3", "presence_penalty=3.0 must be"),
        ("--frequency_penalty=nan", "frequency_penalty=nan must be"),
        ("--repetition_penalty=0", "repetition_penalty=0.0 must be"),
        ("--stop=", "stop has an empty string"),
        ("--stop_token_ids=-1", "stop_token_ids has -1"),
        ("--bad_words=", "bad_words has an empty string"),
        ("--logit_bias=1", "try 17:-100"),
        ("--logit_bias=1:nan", "must be finite"),
        ("--logprobs=-1", "logprobs=-1"),
        ("--logprobs=1000", "logprobs=1000 must be from 0 to 20; max_logprobs=20; left out"),
        ("--prompt_logprobs=1000", "prompt_logprobs=1000 must be"),
        ("--block_size=0", "block_size=0"),
        ("--num_blocks=0", "num_blocks=0"),
        ("--num_blocks=-5", "num_blocks=-5"),
        ("--max_num_seqs=0", "max_num_seqs=0"),
        ("--max_model_len=1", "max_model_len=1 must be"),
        ("--max_num_batched_tokens=8", "max_num_batched_tokens=8 must be"),
        ("--decode_steps=0", "decode_steps=0"),
        ("--seed=99999999999999999999", "seed=99999999999999999999 must be"),
        ("--kv_cache_memory=lots", "try 512M"),
        ("--kv_cache_memory=0", "kv_cache_memory=0 must be"),
        ("--dtype=int4", "value should be one of"),
        ("--backend=npu", "value should be one of"),
        ("--prompts_file=nowhere.txt", "No such file or directory: nowhere.txt"),
        ("--prompts_file=/", "Is a directory: /"),
        ("--prompts_file=/dev/null", "/dev/null has no prompt"),
        ("--prompts_file=-", "standard input has no prompt"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_flags(decode: Script, flag: str, why: str):
    refused(decode.run(flag), why)


def test_all_faults_of_the_engine_are_named_at_once(decode: Script):
    done = decode.run("--num_blocks=3", "--kv_cache_memory=1G", "--max_model_len=1")
    refused(done, "both size the pool")
    assert "max_model_len=1" in done.err


def test_prompts_that_cannot_be_read_need_no_model(decode: Script, tmp_path: Path):
    (tmp_path / "p.txt").write_bytes(b"\xff\n\xfe\n")
    done = decode.run(
        b"--prompt=caf\xe9".decode(errors="surrogateescape"), f"--prompts_file={tmp_path}/p.txt", "--json"
    )
    assert done.status == 2
    assert [line[:9] for line in done.complaints] == ["prompt 0:", "prompt 1 ", "prompt 2 "]
    assert [line[:12] for line in done.out.splitlines()] == [f'{{"index": {i},' for i in range(3)]


@pytest.fixture(scope="module")
def models(decode: Script, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """Runs that get as far as loading, two at a time for each spends seconds on importing."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "ids.jsonl").write_text('{"prompt_token_ids": [1, 2]}\n')
    shutil.copytree(GOLDEN / "tiny" / "llama", folder / "cut")
    os.truncate(folder / "cut" / "model.safetensors", 20_000)
    (folder / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(8))
    (folder / "empty").mkdir()
    (folder / "a file").write_text("")
    runs = {
        "unknown": (["--model=no-such-model"], {}),
        "empty folder": ([f"--model={folder}/empty"], {}),
        "cut safetensors": ([f"--model={folder}/cut"], {}),
        "cut GGUF": ([f"--model={folder}/cut.gguf"], {}),
        "no TPU": (["--backend=tpu"], {}),
        "no device": ([], {"JAX_PLATFORMS": "rocm"}),
        "no network": (["--model=default"], {"XDG_CACHE_HOME": str(folder / "new"), "PIP_NO_INDEX": "1"}),
        "no cache folder": ([], {"XDG_CACHE_HOME": str(folder / "a file")}),
        "longer than the model": (["--max_model_len=1000"], {}),
        "more tokens than the model has": (["--max_tokens=512"], {}),
        "a token that is not there": (["--stop_token_ids=320"], {}),
        "a stop without a tokenizer": (["--stop=x"], {}),
        "chat without a tokenizer": (["--chat"], {}),
        "no room for a block": (["--kv_cache_memory=1K"], {}),
    }

    def run(asked: tuple[list[str], dict[str, str]]) -> Done:
        return decode.run(TINY[0], f"--prompts_file={folder}/ids.jsonl", *asked[0], environment=asked[1])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(run, runs.values()), strict=True))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unknown", "neither 'default' nor an existing path"),
        ("empty folder", "empty"),
        ("cut safetensors", "model.safetensors"),
        ("cut GGUF", "cut.gguf"),
        ("no TPU", "needs a TPU"),
        ("no device", "rocm"),
        ("no network", "could not be fetched"),
        ("no cache folder", "XDG_CACHE_HOME"),
        ("longer than the model", "must be at most 512"),
        ("more tokens than the model has", "max_tokens=512 must be"),
        ("a token that is not there", "stop_token_ids has 320"),
        ("a stop without a tokenizer", "stop strings"),
        ("chat without a tokenizer", "no chat template"),
        ("no room for a block", "kv_cache_memory"),
    ],
)
def test_models_and_machines(models: dict[str, Done], name: str, why: str):
    refused(models[name], why)
