"""How results are printed: order, headers, JSON. The requests are real, what came of them is made up."""

import json
import math

import pytest

from jpaged.config import SamplingParams
from jpaged.outputs import Logprob
from jpaged.request import Request
from jpaged.tokenizer.bytewise import ByteTokenizer
from scripts.common import results
from scripts.common.progress import Progress
from scripts.common.prompts import Entry
from scripts.common.results import Result


def result(index: int, text: str = "p", tokenizer: ByteTokenizer | None = None, **asked) -> Result:
    params = SamplingParams(temperature=0, **asked)
    ids = list(text.encode())
    request = Request(
        id=index,
        prompt=text,
        prompt_token_ids=ids,
        params=params,
        tokenizer=tokenizer,
        stop_ids=frozenset(),
        max_tokens=9,
    )
    return Result(index, Entry(text), request)


def answer(one: Result, ids: list[int], *, sample: int = 0, over: bool = True, failed: bool = False) -> None:
    assert one.request is not None
    logprobs = [{i: Logprob(-1.5, 1, None), 0: Logprob(-math.inf, 9, "x")} for i in ids]
    one.request.samples[sample].accept(ids, logprobs, 0.0, over=over, failed=failed)


def bad(index: int) -> Result:
    return Result(index, Entry(None, "f line 9"), None, "no good")


def test_json_lines_come_in_order_once_all_before_are_over(capsys: pytest.CaptureFixture[str]):
    found = [result(0), bad(1), result(2), result(3), result(4)]
    printer = results.JsonLines(found, Progress(""))
    answer(found[2], [7])
    printer.advance()
    assert capsys.readouterr().out == ""
    answer(found[0], [5, 6])
    printer.advance()
    printer.advance()
    first = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["index"], one["token_ids"], one["error"]) for one in first] == [
        (0, [5, 6], None),
        (1, None, "no good"),
        (2, [7], None),
    ]
    answer(found[3], [8], over=False)
    for one in found:
        for sample in one.request.samples if one.request else ():
            sample.abort()
    printer.finish()
    (rest,) = map(json.loads, capsys.readouterr().out.splitlines())  # 4 has not begun
    assert (rest["index"], rest["token_ids"], rest["finish_reason"]) == (3, [8], "abort")


def test_an_object_has_all_keys_always():
    served, keys = result(0), list(results.as_json(bad(1)))
    answer(served, [5])
    found = results.as_json(served)
    assert list(found) == keys
    assert found == {
        "index": 0,
        "prompt": "p",
        "prompt_token_ids": [112],
        "text": None,
        "token_ids": [5],
        "finish_reason": "length",
        "stop_reason": None,
        "cumulative_logprob": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "error": None,
    }


def test_logprobs_in_json_have_no_infinity():
    one = result(0, logprobs=1)
    answer(one, [5])
    found = json.loads(json.dumps(results.as_json(one), allow_nan=False))
    assert found["cumulative_logprob"] == -1.5
    assert found["logprobs"] == [
        {
            "5": {"logprob": -1.5, "rank": 1, "decoded_token": None},
            "0": {"logprob": None, "rank": 9, "decoded_token": "x"},
        }
    ]


def test_further_samples_are_in_outputs():
    one = result(0, n=2)
    answer(one, [5])
    answer(one, [6, 7], sample=1)
    found = results.as_json(one)
    assert found["token_ids"] == [5]
    assert [(each["index"], each["token_ids"]) for each in found["outputs"]] == [(0, [5]), (1, [6, 7])]


def test_texts_have_headers_on_one_line(capsys: pytest.CaptureFixture[str]):
    tokenizer = ByteTokenizer()
    found = [result(0, "a\n\x1b[2Jb", tokenizer), bad(1), result(2, "x" * 100, n=2)]
    answer(found[0], list(b"yes"))
    answer(found[2], [5, 6])
    answer(found[2], [7], sample=1)
    results.Texts(found, Progress("")).advance()
    assert capsys.readouterr().out == f"=== 0: a �[2Jb\nyes\n\n=== 2: {'x' * 75}…\n--- 2.0\n5 6\n--- 2.1\n7\n\n"


def test_a_stream_prints_whole_characters(capsys: pytest.CaptureFixture[str]):
    one = result(0, tokenizer=ByteTokenizer())
    assert one.request is not None
    printer = results.Streamed(one.request.samples[0], Progress(""))
    printed = []
    for byte in "né".encode():
        answer(one, [byte], over=False)
        printer.advance()
        printed.append(capsys.readouterr().out)
    one.request.samples[0].abort()
    printer.finish()
    assert [*printed, capsys.readouterr().out] == ["n", "", "é", "\n"]


def test_a_stream_without_a_tokenizer_prints_ids(capsys: pytest.CaptureFixture[str]):
    one = result(0)
    assert one.request is not None
    printer = results.Streamed(one.request.samples[0], Progress(""))
    answer(one, [5, 6], over=False)
    printer.advance()
    answer(one, [7])
    printer.finish()
    assert capsys.readouterr().out == "5 6 7\n"


def test_failures_are_named():
    found = [result(0), bad(1), result(2)]
    answer(found[0], [5])
    answer(found[2], [0], failed=True)
    assert list(results.failures(found)) == [2]
    assert results.as_json(found[2])["finish_reason"] == "error"
