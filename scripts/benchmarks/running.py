"""From flags to what a benchmark runs: the engine, the workload, and what to call it all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from common import model_flags, prompts
from jpaged.config import EngineConfig

from . import workload_flags
from .workloads import Case, Workload

if TYPE_CHECKING:
    from common.progress import Progress
    from jpaged.llm import LLM
    from jpaged.model import LoadedModel

    from .results import Setting


def engine(case: Case, loaded: LoadedModel | None, **more: Any) -> LLM:
    """The engine that the flags ask for, with the case's slots unless --max_num_seqs says otherwise.

    Args:
      case: What it will serve.
      loaded: The model; None loads it.
      **more: Fields of `EngineConfig` that are no flags.
    """
    # As defaults, so that what was given stays: settings are judged together, and must not be refused for one that
    # nobody asked for.
    flags.FLAGS.set_default("max_num_seqs", case.paged_slots or case.slots)
    if case.kv_tokens and not flags.FLAGS.kv_cache_memory:
        flags.FLAGS.set_default("num_blocks", case.kv_tokens // flags.FLAGS.block_size)
    tokens = max(flags.FLAGS.max_num_seqs, EngineConfig.max_num_batched_tokens)
    flags.FLAGS.set_default("max_num_batched_tokens", tokens)
    config = dataclasses.replace(model_flags.engine_config(), **more)
    if loaded is None:
        llm = model_flags.load_llm(config)
    else:
        from jpaged.llm import LLM

        llm = LLM(loaded, **dataclasses.asdict(config))
    llm.engine.prepare_swap()  # or it would do so in the middle of a timed run
    return llm


@functools.cache
def given() -> tuple[prompts.Entry, ...] | None:
    """The prompts of --prompts_file; None without it. They are read once: standard input does not come again.

    Raises:
      OSError: there is no such file.
      ValueError: it has no prompt, or some of them cannot be read; all are named.
    """
    if flags.FLAGS.prompts_file is None:
        return None
    entries = prompts.gather((), flags.FLAGS.prompts_file)
    faults = [f"{entry.where}: {entry.fault}" for entry in entries if entry.fault]
    if faults:
        raise ValueError("; ".join(faults))
    return tuple(entries)


def workload(case: Case, llm: LLM) -> Workload:
    """The case's requests: the prompts of --prompts_file, or synthetic ones.

    Raises:
      ValueError: some of the requests cannot be served; all are named.
    """
    from . import paged

    entries, ids = given(), None
    if entries is not None:
        ids = [request.prompt_token_ids for request in llm.make_requests([entry.prompt for entry in entries])]
    made = workload_flags.workload(case, llm.engine.loaded.model.spec.vocab_size, flags.FLAGS.seed, ids)
    paged.requests(llm, made)  # nobody should wait for a warm-up to learn that
    return made


def setting(case: str, llm: LLM) -> Setting:
    """What everything ran on and with."""
    import jax

    from jpaged.backends import backend_for

    from .peers import processors
    from .results import Setting

    device = jax.devices()[0]
    return Setting(
        case=case,
        model=llm.engine.loaded.model.spec.name,
        backend=backend_for(llm.config.backend, llm.engine.layout),
        dtype=llm.config.dtype,
        jax=jax.__version__,
        device=device.device_kind,
        threads=processors() if device.platform == "cpu" else None,
    )


def counter(bar: Progress) -> Callable[[], None]:
    """Counts one more thing done."""

    def count() -> None:
        bar.done += 1

    return count
