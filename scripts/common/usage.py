"""What a run used: times of prefill and decode, what was compiled, and the table that `--stats` prints.

The engine reads each step while the next is running, so the time between two readings is that of the step read last.
Compiling breaks this, for steps finish unseen meanwhile: the step that had to be compiled is waited for and timed by
itself, and those that ran behind the compiler's back do not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.engine import AnySample, Engine
    from jpaged.stats import Spread

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # what JAX calls it; its own constant is private


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """A context that yields a list, to which the names go of functions that are compiled meanwhile, or fetched from the
    compilation cache.

    JAX keeps a listener until it is unregistered, and with it all that the listener knows: so nobody registers one
    elsewhere.
    """
    from jax import monitoring

    found: list[str] = []

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        if event == COMPILE_EVENT:
            found.append(str(facts.get("fun_name", "something")))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(listen)


class Clock:
    """Steps an engine and keeps the time. It listens to JAX during its steps only, so there is nothing to close.

    Attributes:
      first_token: Seconds until the first token was there, compiling included; None before.
      compiling: Seconds of steps that had to be compiled, or fetched from the compilation cache.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._begun = time.perf_counter()
        self._carried = 0.0  # time of a step that has not been read yet
        self._tokens, self._seconds = [0, 0], [0.0, 0.0]  # of steps with prompts, and of the others
        self.first_token: float | None = None
        self.compiling = 0.0

    def step(self) -> list[AnySample]:
        """`Engine.step`."""
        import jax

        stats = self._engine.stats
        before = stats.prefill_tokens, stats.decode_tokens, stats.steps
        start = time.perf_counter()
        with compiled() as names:
            changed = self._engine.step()
        end = time.perf_counter()
        seconds, carried = self._carried + (0.0 if names else end - start), self._carried
        self._carried = 0.0 if stats.steps > before[2] else seconds
        if names:
            self.compiling += end - start
            jax.block_until_ready(self._engine.state)
            self._carried = time.perf_counter() - end
        if stats.steps > before[2] and (carried or not names):
            prefilled = stats.prefill_tokens - before[0]
            kind = 0 if prefilled else 1
            self._seconds[kind] += seconds
            self._tokens[kind] += prefilled or stats.decode_tokens - before[1]
        if changed and self.first_token is None:
            self.first_token = time.perf_counter() - self._begun
        return changed

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second; None if no step with a prompt could be timed."""
        return self._tokens[0] / self._seconds[0] if self._seconds[0] else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second of steps that only decode."""
        return self._tokens[1] / self._seconds[1] if self._seconds[1] else None


def table(engine: Engine, clock: Clock, loading: float) -> str:
    """The table; `loading` is the seconds before the first step."""
    import jax

    stats, config, layout = engine.stats, engine.config, engine.layout
    assert config.max_model_len is not None
    used = stats.blocks_peak
    reserved = stats.sequences_peak * -(-config.max_model_len // config.block_size)
    spec, devices = engine.loaded.model.spec, jax.devices()
    first = "" if clock.first_token is None else f", first token after {clock.first_token:.1f} s"
    ratio = f", {reserved / used:.1f} times as much" if used else ""
    rows = [
        ("model", f"{spec.name} in {config.dtype} on {devices[0].device_kind}"),
        ("time", f"loading {loading:.1f} s, then {clock.elapsed:.1f} s{first}; compiling took {clock.compiling:.1f} s"),
        ("prefill", f"{stats.prefill_tokens:,} tokens, {_rate(clock.prefill_rate)}"),
        ("decode", f"{stats.decode_tokens:,} tokens, {_rate(clock.decode_rate)}"),
        (
            "KV blocks at peak",
            f"{used:,} of {config.num_blocks:,} (of {config.block_size} tokens), {_mib(used * layout.bytes_per_block)}",
        ),
        (
            "prompt tokens found",
            f"{stats.hit_tokens:,}, {stats.hit_share:.0%} of all; {_count(stats.evictions, 'block')} evicted",
        ),
        (
            "paused",
            f"{_count(stats.preemptions, 'request')} for want of memory; "
            f"{_count(stats.swapped_out, 'block')} to the host, {stats.swapped_in:,} back",
        ),
        ("waiting for a slot", _spread(stats.queue)),
        ("first token after", _spread(stats.first_token)),
        ("then a token every", _spread(stats.inter_token)),
        ("KV slots that held tokens", f"{stats.kv_share:.1%} of those in blocks in use, averaged over steps"),
        (
            "contiguous would take",
            f"{reserved:,} blocks, {_mib(reserved * layout.bytes_per_block)}{ratio}: "
            f"{config.max_model_len:,} tokens for each of {_count(stats.sequences_peak, 'sequence')}",
        ),
    ]
    return render(rows)


def render(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows)


def _rate(rate: float | None) -> str:
    return "too quick to time" if rate is None else f"{rate:,.1f} tokens/s"


def _count(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def _spread(spread: Spread) -> str:
    if spread.mean is None:
        return "nothing to time"
    return f"{1000 * spread.mean:,.0f} ms on average, {1000 * spread.greatest:,.0f} ms at most"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
