"""Prints results on standard output: text as it comes, texts in order, or JSON lines. Knows no engine.

A `Result` is a prompt with whatever came of it. Each printer is told of every change (`advance`) and, at the end or on
Ctrl-C, to print what there is (`finish`).
"""

from __future__ import annotations

import abc
import codecs
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .progress import Progress
from .prompts import Entry

if TYPE_CHECKING:
    from jpaged.outputs import CompletionOutput, Logprob
    from jpaged.request import Request, Sample

_HEADER_CHARACTERS = 76


@dataclasses.dataclass
class Result:
    """A prompt and its request, or what is wrong with it.

    Attributes:
      index: Its place among the prompts.
      entry: The prompt as it was given.
      request: What runs; None for a prompt that cannot be served.
      fault: Why it cannot.
    """

    index: int
    entry: Entry
    request: Request | None = None
    fault: str | None = None

    @property
    def over(self) -> bool:
        return self.request is None or self.request.finished

    @property
    def begun(self) -> bool:
        return self.request is None or any(
            sample.token_ids or sample.finish_reason not in (None, "abort") for sample in self.request.samples
        )


class Printer(Protocol):
    def advance(self) -> None:
        """Prints what is new and can be printed."""

    def finish(self) -> None:
        """Prints the rest, unfinished as it may be; prompts that have not begun are left out."""


class Streamed:
    """One prompt, one answer: each piece of text as it comes, in whole characters."""

    def __init__(self, sample: Sample, progress: Progress):
        self._sample, self._progress = sample, progress
        self._begun = False

    def advance(self) -> None:
        delta = self._sample.delta()
        piece = _ids(delta.token_ids, after=self._begun) if delta.text is None else delta.text
        if piece:
            self._progress.stop()
            self._begun = True
            _write(piece)

    def finish(self) -> None:
        self.advance()
        if self._begun or self._sample.finish_reason != "abort":
            _write("\n")


class InOrder(abc.ABC):
    """Each result once all before it are over."""

    def __init__(self, results: Sequence[Result], progress: Progress):
        self._results, self._progress = results, progress
        self._next = 0

    def advance(self) -> None:
        while self._next < len(self._results) and self._results[self._next].over:
            self._next += 1  # first, lest Ctrl-C makes it print twice
            self._print(self._results[self._next - 1])

    def finish(self) -> None:
        for result in self._results[self._next :]:
            if result.begun:
                self._print(result)
        self._next = len(self._results)

    def _print(self, result: Result) -> None:
        text = "".join(f"{line}\n" for line in self._lines(result))
        if text:
            with self._progress.aside():
                _write(text)

    @abc.abstractmethod
    def _lines(self, result: Result) -> Iterator[str]:
        """What is printed of a result that is over, or that Ctrl-C has cut off."""


class Texts(InOrder):
    """A header with the prompt, and its answers; what is wrong with a prompt is not for standard output."""

    def _lines(self, result: Result) -> Iterator[str]:
        if result.request is None:
            return
        yield f"=== {result.index}: {_header(result)}"
        for output in result.request.output().outputs:
            if len(result.request.samples) > 1:
                yield f"--- {result.index}.{output.index}"
            yield _ids(output.token_ids) if output.text is None else output.text
        yield ""


class JsonLines(InOrder):
    """An object a prompt; see `as_json`."""

    def _lines(self, result: Result) -> Iterator[str]:
        # Another encoding may lack a character, and what Python writes in its place is no JSON.
        escape = codecs.lookup(sys.stdout.encoding).name != "utf-8"
        yield json.dumps(as_json(result), ensure_ascii=escape, allow_nan=False)


def as_json(result: Result) -> dict[str, Any]:
    """What `--json` prints of a prompt. With more than one answer, the first also stands where a single one would."""
    found: dict[str, Any] = {
        "index": result.index,
        "prompt": result.entry.text,
        "prompt_token_ids": None,
        **_sample(None),
        "prompt_logprobs": None,
        "error": result.fault,
    }
    if result.request is not None:
        output = result.request.output()
        found |= {
            "prompt_token_ids": output.prompt_token_ids,
            **_sample(output.outputs[0]),
            "prompt_logprobs": _tables(output.prompt_logprobs),
            "error": output.error,
        }
        if len(output.outputs) > 1:
            found["outputs"] = [{"index": each.index, **_sample(each)} for each in output.outputs]
    return found


def failures(results: Sequence[Result]) -> dict[int, str]:
    """What went wrong with requests that were let in, by index of the prompt."""
    outputs = {result.index: result.request.output() for result in results if result.request is not None}
    return {index: output.error for index, output in outputs.items() if output.error is not None}


def _sample(output: CompletionOutput | None) -> dict[str, Any]:
    if output is None:
        return dict.fromkeys(("text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob", "logprobs"))
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "cumulative_logprob": _number(output.cumulative_logprob),
        "logprobs": _tables(output.logprobs),
    }


def _tables(tables: Sequence[dict[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    return None if tables is None else [None if table is None else _table(table) for table in tables]


def _table(table: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token): {"logprob": _number(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
        for token, p in table.items()
    }


def _number(value: float | None) -> float | None:
    """JSON has no infinity: the logarithm of a probability of 0 is null."""
    return value if value is not None and math.isfinite(value) else None


def _header(result: Result) -> str:
    """The prompt on one line, its end left out if it is long; control characters would play with the terminal."""
    assert result.request is not None
    text = result.entry.text
    line = _ids(result.request.prompt_token_ids) if text is None else " ".join(text.split())
    line = "".join(character if character.isprintable() else "�" for character in line)
    return line if len(line) <= _HEADER_CHARACTERS else line[: _HEADER_CHARACTERS - 1] + "…"


def _ids(ids: Sequence[int], after: bool = False) -> str:
    """Stands for the text of a model that has no tokenizer."""
    return (" " if after and ids else "") + " ".join(map(str, ids))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
