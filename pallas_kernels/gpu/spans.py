"""Which of a row's tokens a program goes through: what its item's queries see, in chunks, shared out over splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.form import Form, Inputs


class Span(NamedTuple):
    """What a program does of its item.

    Attributes:
      row: Whose tokens.
      end, count: The last ``count`` of the first ``end`` tokens are the item's queries.
      start: Tokens before the row's first query.
      oldest, limit: Tokens that any of the queries may see are from the one on and before the other.
      first, chunks: Which chunks.
    """

    row: Any
    end: Any
    count: Any
    start: Any
    oldest: Any
    limit: Any
    first: Any
    chunks: Any


def of(form: Form, inputs: Inputs, item: Any, split: Any) -> Span:
    """Of one of an item's splits."""
    told = _told(form, inputs, item)
    each = _each(form, told.chunks)
    mine = jnp.maximum(jnp.minimum(each, told.chunks - split * each), 0)
    return told._replace(first=told.first + split * each, chunks=mine)


def splits(form: Form, inputs: Inputs, item: Any) -> Any:
    """How many of an item's splits have tokens: the first so many."""
    chunks = _told(form, inputs, item).chunks
    each = jnp.maximum(_each(form, chunks), 1)
    return lax.div(chunks + (each - 1), each)


def _each(form: Form, chunks: Any) -> Any:
    """Chunks of a split, but for the last."""
    return lax.div(chunks + (form.tiling.splits - 1), jnp.int32(form.tiling.splits))


def _told(form: Form, inputs: Inputs, item: Any) -> Span:
    """Of the whole item."""
    row, end, count, start, length = (inputs.items_5X[k, item] for k in range(5))
    chunk, oldest, limit = form.tiling.chunk, jnp.int32(0), end
    if inputs.window_1 is not None:
        oldest = jnp.maximum(end - count + 1 - inputs.window_1[0], 0)
    if form.tree:  # what a query sees of its row's queries is any of them, whatever the window
        oldest, limit = jnp.minimum(oldest, start), length
    first = lax.div(oldest, jnp.int32(chunk))
    chunks = jnp.where(count > 0, lax.div(limit + (chunk - 1), jnp.int32(chunk)) - first, 0)
    return Span(row, end, count, start, oldest, limit, first, chunks)
