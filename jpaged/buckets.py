"""The few shapes that steps are compiled for, so that nothing compiles after warm-up. Integers only."""

import dataclasses
import itertools

MIN_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Row counts R and token counts T, ascending; the last of each is the most that a step may hold.

    Attributes:
      rows: For decode steps.
      prefill_rows: For steps with prompts: few, as they are cheap to pad.
      tokens: For steps with prompts.
    """

    rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    tokens: tuple[int, ...]

    def decode(self, rows: int) -> int:
        """The bucket for a decode step of so many rows."""
        return _at_least(self.rows, rows)

    def prefill(self, rows: int, tokens: int) -> tuple[int, int]:
        """The bucket for a step with prompts."""
        return _at_least(self.prefill_rows, rows), _at_least(self.tokens, tokens)

    def all_prefill(self) -> list[tuple[int, int]]:
        return list(itertools.product(self.prefill_rows, self.tokens))


def make(max_num_seqs: int, max_num_batched_tokens: int, min_rows: int = 1) -> Buckets:
    """Powers of two for decode rows, powers of four for prompt tokens, and the two maxima.

    ``min_rows`` is for machines that take longer over a product with one row than with two.
    """
    rows = _steps(min_rows, max(min_rows, max_num_seqs), 2)
    return Buckets(
        rows=rows,
        prefill_rows=tuple(sorted({rows[0], rows[-1]})),
        tokens=_steps(MIN_TOKENS, max(MIN_TOKENS, max_num_batched_tokens), 4),
    )


def _steps(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
