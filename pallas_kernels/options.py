"""What kernels are told of a call, whatever the device: what shapes the scores, and which batches work is for."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxtyping import Array, Float, Int32

LOG2E = math.log2(math.e)  # kernels' exponentials have base 2
MOST_QUERIES = 8  # of a row that is a decode's; more make it a prefill's


class Options(NamedTuple):
    """What shapes the scores; see `jpaged.attention.paged_attention`."""

    sm_scale: float | Float[Array, ""]
    sliding_window: int | Int32[Array, ""] | None = None
    soft_cap: float | Float[Array, ""] | None = None
    sinks_H: Float[Array, " H"] | None = None
    k_scale: Float[Array, " K"] | None = None
    v_scale: Float[Array, " K"] | None = None
    tree_RQ: Int32[Array, " RQ"] | None = None


class Purpose(NamedTuple):
    """What a batch must have for a step's work to be its own: rows, columns, tokens, query heads, most to a row."""

    rows: int
    columns: int
    tokens: int
    heads: int
    most: int
