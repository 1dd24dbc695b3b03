"""Generates text with a paged KV cache.

    python scripts/decode.py                                        a prompt of our own on a small model
    python scripts/decode.py --prompt='The capital of France is'    completes it, and prints as it comes
    python scripts/decode.py --chat --prompt='Who was Ada Lovelace?' --temperature=0.8
    python scripts/decode.py --prompt='One' --prompt='Two' --stats  several at once, and what they used
    python scripts/decode.py --prompts_file=prompts.txt --json      one prompt a line in, one JSON object a line out
    cat question.txt | python scripts/decode.py --chat              standard input is one prompt

Answers go to standard output, all else to standard error. A prompt that cannot be served is reported by its index, and
the others are answered. Ctrl-C prints what there is. Exit status: 0, all were answered; 2, something was wrong; 130,
Ctrl-C; 141, whoever read the output has gone.

--json prints for each prompt, in order, an object with the keys index, prompt (as it was given), prompt_token_ids,
text, token_ids, finish_reason, stop_reason, cumulative_logprob, logprobs, prompt_logprobs and error; what there is not
is null. finish_reason is "stop", "length", "error" (it failed while it ran), "abort" (Ctrl-C came first), or null for a
prompt that was refused; error says why. After Ctrl-C, prompts that had not begun are left out. Logprobs are, for each
token, an object from token ids to logprob, rank and decoded_token. With --n above 1 these are of the first answer, and
the key outputs has a list of all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from common import command, model_flags, prompts, results, sampling_flags, usage
from common.interrupt import Interrupt
from common.progress import Progress
from common.prompts import Entry
from common.results import Result

if TYPE_CHECKING:
    from jpaged.config import SamplingParams
    from jpaged.llm import LLM, Prompt

OWN_PROMPT = "Explain in three sentences why the sky is blue."

_PROMPT = flags.DEFINE_multi_string("prompt", None, "Text to answer.")
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file",
    None,
    "A text file with a prompt a line, or FILE.jsonl with objects that have 'prompt' or 'prompt_token_ids'; '-' is "
    "standard input, as text. Blank lines are skipped.",
)
_CHAT = flags.DEFINE_boolean("chat", None, "Put text prompts into the model's chat template, as a user's message.")
_JSON = flags.DEFINE_boolean("json", False, "Print JSON lines.")
_STATS = flags.DEFINE_boolean("stats", False, "At the end, say what was used: speed, KV blocks, and what was saved.")

GROUPS = {
    "Prompts": ("prompt", "prompts_file", "chat"),
    "Model": model_flags.MODEL,
    "Sampling": sampling_flags.SAMPLING,
    "Memory and batching": model_flags.ENGINE,
    "Output": ("json", "stats", "verbose"),
}


def main() -> int:
    begun = time.perf_counter()
    config = model_flags.engine_config()
    params = sampling_flags.sampling_params(config)
    entries = prompts.gather(_PROMPT.value or (), _PROMPTS_FILE.value)
    chat = bool(_CHAT.value) if entries else _CHAT.value is not False
    entries = entries or [Entry(OWN_PROMPT)]
    found = [Result(index, entry, None, entry.fault) for index, entry in enumerate(entries)]
    llm = None
    if any(result.fault is None for result in found):
        llm = model_flags.load_llm(config)
        admit(llm, found, params, chat)
    for result in found:
        if result.fault is not None:
            complain(result, result.fault)
    if llm is None:
        _printer(found, Progress("")).finish()
        return command.FAULT
    return decode(llm, found, time.perf_counter() - begun)


def admit(llm: LLM, found: Sequence[Result], params: SamplingParams, chat: bool) -> None:
    """Makes a request for each prompt that can be served; for the others, says why not.

    Raises:
      ValueError: no prompt can be served with these parameters, or this model cannot chat.
    """
    sampling_flags.refuse(params, llm.config, vocab_size=llm.engine.loaded.model.spec.vocab_size)
    if chat and not (llm.tokenizer is not None and llm.tokenizer.has_chat_template):
        raise ValueError("this model has no chat template; try --nochat, and --prompt or --prompts_file")
    asked: dict[int, Prompt] = {}
    for result in found:
        if result.fault is None:
            try:
                asked[result.index] = _as_prompt(llm, result.entry, chat)
            except ValueError as error:  # the template may refuse a text
                result.fault = str(error)
    faults = llm.problems(list(asked.values()), params)
    for number, index in enumerate(list(asked)):
        if number in faults:
            found[index].fault = "; ".join(faults[number])
            del asked[index]
    for index, request in zip(asked, llm.make_requests(list(asked.values()), params), strict=True):
        found[index].request = request


def decode(llm: LLM, found: Sequence[Result], loading: float) -> int:
    """Runs the requests and prints what comes; returns the exit status."""
    engine, running = llm.engine, [result.request for result in found if result.request is not None]
    clock = usage.Clock(engine) if _STATS.value else None
    step = clock.step if clock else engine.step
    counted = len(running) if len(running) > 1 else None
    with Progress("starting; the first run compiles", counted, "prompts") as progress, Interrupt() as interrupt:
        printer = _printer(found, progress)
        engine.add(*running)
        while engine.has_work and not interrupt.wanted:
            changed = step()
            if changed:
                progress.what, interrupt.worth_saving = "answering", True
            progress.done += len({sample.request.id for sample in changed if sample.request.finished})
            printer.advance()
    for request in running:
        for sample in request.samples:
            sample.abort()
    printer.finish()
    if clock and engine.stats.steps:
        command.say(usage.table(engine, clock, loading))
    failed = results.failures(found)
    for index, error in failed.items():
        complain(found[index], error)
    if interrupt.wanted:
        return command.INTERRUPTED
    return command.FAULT if failed or len(running) < len(found) else command.OK


def complain(result: Result, fault: str) -> None:
    """One line about one prompt."""
    place = f" ({result.entry.where})" if result.entry.where else ""
    command.complain(f"prompt {result.index}{place}: {fault}")


def _as_prompt(llm: LLM, entry: Entry, chat: bool) -> Prompt:
    if not chat or entry.has_ids or entry.text is None:
        return entry.prompt
    return llm.chat_prompt([{"role": "user", "content": entry.text}])


def _printer(found: Sequence[Result], progress: Progress) -> results.Printer:
    if _JSON.value:
        return results.JsonLines(found, progress)
    first = found[0].request
    if len(found) == 1 and first is not None and len(first.samples) == 1:
        return results.Streamed(first.samples[0], progress)
    return results.Texts(found, progress)


if __name__ == "__main__":
    command.run(main, __doc__ or "", GROUPS)
