"""llama.cpp as a peer: a stand-alone program that `peers.Peer` talks to. It needs xllamacpp or llama-cpp-python only.

xllamacpp is llama-server in a process: requests run in parallel, batched continuously. llama-cpp-python serves one
request after another.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable


def serve(spec: dict, answer: Callable[[dict], None]) -> None:
    one, name, details, at_once = (_server if importlib.util.find_spec("xllamacpp") else _single)(spec)
    jobs = list(zip(spec["prompts"], spec["outputs"], strict=True))

    def run(jobs: list[tuple[list[int], int]]) -> list[int]:
        counts = [0] * len(jobs)

        def work(i: int) -> None:
            counts[i] = one(*jobs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))] if at_once else []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(0 if at_once else len(jobs)):
            work(i)
        return counts

    run([(prompt, 4) for prompt, _ in jobs[: spec["slots"]]])
    answer({"name": name, "details": details})
    while sys.stdin.readline():
        begin = time.perf_counter()
        counts = run(jobs)
        answer({"seconds": time.perf_counter() - begin, "counts": counts})


def _server(spec: dict) -> tuple[Callable[[list[int], int], int], str, str, bool]:
    import xllamacpp  # pyright: ignore[reportMissingImports] (a peer's environment has it)

    longest = max(len(prompt) + new for prompt, new in zip(spec["prompts"], spec["outputs"], strict=True))
    params = xllamacpp.CommonParams()
    params.model.path = spec["model"]
    params.n_parallel = spec["slots"]
    params.n_ctx = spec["slots"] * (longest + 16)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec["threads"]
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def one(prompt: list[int], new: int) -> int:
        wanted = {"prompt": prompt, "max_tokens": new, "temperature": 0, "top_k": 1}
        reply = server.handle_completions({**wanted, "ignore_eos": True, "cache_prompt": False})
        return reply["usage"]["completion_tokens"]

    name = f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')}), {spec['kind']}"
    return one, name, xllamacpp.get_system_info(), True


def _single(spec: dict) -> tuple[Callable[[list[int], int], int], str, str, bool]:
    import llama_cpp  # pyright: ignore[reportMissingImports] (a peer's environment has it)

    longest = max(len(prompt) + new for prompt, new in zip(spec["prompts"], spec["outputs"], strict=True))
    threads = spec["threads"]
    model = llama_cpp.Llama(
        model_path=spec["model"], n_ctx=longest + 16, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def one(prompt: list[int], new: int) -> int:
        model.reset()
        made = 0
        for _ in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            made += 1
            if made == new:
                break
        return made

    name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {spec['kind']}"
    return one, name, llama_cpp.llama_print_system_info().decode(), False


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        wanted = json.load(file)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints from C; the channel carries answers only
    serve(wanted, lambda message: print(json.dumps(message), file=channel, flush=True))
