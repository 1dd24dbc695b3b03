"""From flags to what a benchmark runs: the engine, the workload, and what to call it all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from common import model_flags, prompts, usage

from . import workload_flags
from .workloads import Case, Workload

if TYPE_CHECKING:
    from common.progress import Progress
    from jpaged.llm import LLM

    from .results import Setting


def engine(case: Case, before: LLM | None) -> LLM:
    """The engine that the flags ask for, with the case's slots unless --max_num_seqs says otherwise.

    Args:
      case: What it will serve.
      before: An engine whose weights to take; None loads the model.
    """
    config = model_flags.engine_config()
    if not flags.FLAGS["max_num_seqs"].present:
        tokens = max(case.slots, config.max_num_batched_tokens)
        config = dataclasses.replace(config, max_num_seqs=case.slots, max_num_batched_tokens=tokens)
    if before is None:
        return model_flags.load_llm(config)
    from jpaged.llm import LLM

    return LLM(before.engine.loaded, **dataclasses.asdict(config))


def workload(case: Case, llm: LLM) -> Workload:
    """The case's requests: the prompts of --prompts_file, or synthetic ones.

    Raises:
      ValueError: some of the prompts cannot be read; all are named.
    """
    ids = None
    if flags.FLAGS.prompts_file is not None:
        entries = prompts.gather((), flags.FLAGS.prompts_file)
        faults = [f"{entry.where}: {entry.fault}" for entry in entries if entry.fault]
        if faults:
            raise ValueError("; ".join(faults))
        ids = [request.prompt_token_ids for request in llm.make_requests([entry.prompt for entry in entries])]
    return workload_flags.workload(case, llm.engine.loaded.model.spec.vocab_size, flags.FLAGS.seed, ids)


def setting(case: str, llm: LLM) -> Setting:
    """What everything ran on and with."""
    import jax

    from jpaged.attention import resolve_backend

    from .peers import processors
    from .results import Setting

    device = jax.devices()[0]
    return Setting(
        case=case,
        model=llm.engine.loaded.model.spec.name,
        backend=resolve_backend(llm.config.backend),
        dtype=llm.config.dtype,
        jax=jax.__version__,
        device=device.device_kind,
        threads=processors() if device.platform == "cpu" else None,
    )


def clock(llm: LLM) -> Any:
    """Steps an engine and keeps the time; see `paged.Clock`."""
    return usage.Clock(llm.engine)


def counter(bar: Progress) -> Callable[[], None]:
    """Counts one more thing done."""

    def count() -> None:
        bar.done += 1

    return count
