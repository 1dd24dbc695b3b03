"""`decode.py` on good prompts, and on files that have both kinds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.running import GOLDEN, TINY, Done, Script

pytestmark = pytest.mark.xdist_group("decode")  # one cache folder, one conversion

CASES = json.loads((GOLDEN / "tiny" / "llama" / "golden_float32.json").read_text())["cases"]


def json_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def objects(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.fixture(scope="module")
def mixed(decode: Script, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The golden prompts among bad ones."""
    path = json_lines(
        tmp_path_factory.mktemp("prompts") / "ids.jsonl",
        {"prompt_token_ids": CASES[0]["prompt"]},
        "[1, 2]",
        {"prompt_token_ids": CASES[1]["prompt"]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1, 320]},
        {"prompt_token_ids": [1, -1]},
        {"prompt_token_ids": [1] * 513},
        {"prompt_token_ids": [1] * 481},
        {"prompt_token_ids": [1] * 250},
        {"prompt_token_ids": [1, 2.5]},
        {"prompt_token_ids": "1, 2"},
        {"prompt": "a text"},
        {"prompt_token_ids": CASES[2]["prompt"], "prompt": "its name"},
    )
    asked = ("--max_tokens=32", "--ignore_eos", "--logprobs=2", "--prompt_logprobs=1")
    return decode.run(*TINY, f"--prompts_file={path}", "--json", "--stats", *asked)


GOOD = {0: CASES[0], 2: CASES[1], 12: CASES[2]}


def test_golden_ids_come_back_in_order(mixed: Done):
    found = objects(mixed)
    assert [one["index"] for one in found] == list(range(13))
    for index, case in GOOD.items():
        assert found[index]["prompt_token_ids"] == case["prompt"]
        assert found[index]["token_ids"] == case["greedy"]
        assert found[index]["finish_reason"] == "length"
        assert found[index]["text"] is None and found[index]["error"] is None
    assert found[12]["prompt"] == "its name"


def test_logprobs_are_the_golden_ones(mixed: Done):
    for index, case in GOOD.items():
        one = objects(mixed)[index]
        assert one["prompt_logprobs"][0] is None
        given = [
            table[str(t)]["logprob"] for t, table in zip(case["prompt"][1:], one["prompt_logprobs"][1:], strict=True)
        ]
        assert given == pytest.approx(case["prompt_logprobs"], abs=1e-3)
        for token, table in zip(one["token_ids"], one["logprobs"], strict=True):
            assert table[str(token)]["rank"] == 1 and len(table) == 2
        assert one["cumulative_logprob"] == pytest.approx(
            sum(table[str(t)]["logprob"] for t, table in zip(one["token_ids"], one["logprobs"], strict=True)), abs=1e-3
        )


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (1, "must be a JSON object, not a list"),
        (3, "the prompt is empty"),
        (4, "token 320 is out of range"),
        (5, "token -1 is out of range"),
        (6, "has 513 tokens and max_model_len is 512"),
        (7, "481 prompt tokens and max_tokens=32 exceed max_model_len=512"),
        (8, "may need KV for 281 tokens, 18 blocks"),
        (9, "must be integers, not 2.5"),
        (10, "must be a list of ids, not str"),
        (11, "no tokenizer"),
    ],
)
def test_bad_prompts_are_named_by_index_and_line(mixed: Done, index: int, why: str):
    assert mixed.status == 2
    assert why in objects(mixed)[index]["error"]
    (line,) = [line for line in mixed.complaints if line.startswith(f"prompt {index} (")]
    assert why in line and f"ids.jsonl line {index + 1})" in line


def test_stats_are_a_table_after_all_else(mixed: Done):
    table = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in mixed.complaints[-12:])
    prompts = sum(len(case["prompt"]) for case in GOOD.values())
    assert table["prefill"].startswith(f"{prompts} tokens, ")
    assert table["decode"].startswith("96 tokens, ")
    assert all(re.search(r" tokens, [\d,.]+ tokens/s$", table[name]) for name in ("prefill", "decode"))
    blocks = int(table["KV blocks at peak"].partition(" of 16 (of 16 tokens), ")[0])
    assert 7 <= blocks <= 13  # the longest ends with 70 + 31 tokens, 7 blocks; all three need 3 + 3 + 7
    # Two sequences at once, 512 tokens or 32 blocks each, of 16 tokens · 3 layers · 2 · 2 heads · 16 · 4 bytes.
    assert table["contiguous would take"].startswith(f"64 blocks, 0.8 MiB, {64 / blocks:.1f} times as much: ")
    assert table["prompt tokens found"] == "0, 0% of all; 0 blocks evicted"
    assert table["paused"].startswith("0 requests for want of memory; ")
    assert all(table[name].endswith(" ms at most") for name in ("waiting for a slot", "first token after"))
    assert 0.5 < float(table["KV slots that held tokens"].partition("%")[0]) / 100 <= 1


def test_one_prompt_streams_ids_where_there_is_no_tokenizer(decode: Script, tmp_path: Path):
    path = json_lines(tmp_path / "p.jsonl", {"prompt_token_ids": CASES[0]["prompt"]})
    done = decode.run(*TINY, f"--prompts_file={path}", "--max_tokens=8")
    assert (done.status, done.err) == (0, "")
    assert done.out.split() == [str(token) for token in CASES[0]["greedy"][:8]]


def test_several_prompts_and_samples_have_headers(decode: Script, tmp_path: Path):
    path = json_lines(tmp_path / "p.jsonl", *({"prompt_token_ids": case["prompt"]} for case in CASES[:2]))
    done = decode.run(*TINY, f"--prompts_file={path}", "--max_tokens=4", "--n=2")
    first, second = (" ".join(map(str, case["greedy"][:4])) for case in CASES[:2])
    assert done.status == 0
    assert [line for line in done.out.splitlines() if line] == [
        "=== 0: 311 303 192",
        *("--- 0.0", first, "--- 0.1", first),
        "=== 1: " + " ".join(map(str, CASES[1]["prompt"])),
        *("--- 1.0", second, "--- 1.1", second),
    ]


def test_standard_input_is_one_chat_message_to_the_default_model(decode: Script):
    """The golden answer, from the cache folder of whoever runs the tests."""
    own = Script(decode.name, {})
    done = own.run("--chat", "--dtype=float32", "--max_tokens=12", stdin=b"What is the capital of France?\n")
    case = json.loads((GOLDEN / "smollm2" / "chat_fact.json").read_text())
    assert done.status == 0
    assert done.out == case["greedy_text"].partition("<|im_end|>")[0] + "\n"


def test_executables_are_kept_for_the_next_run(decode: Script, mixed: Done):
    folder = Path(decode.environment["XDG_CACHE_HOME"]) / "jpaged" / "xla"
    for step in ("prefill", "decode"):
        assert list(folder.glob(f"jit__{step}*-cache"))
