"""Which query heads share a matrix product.

A product of the matrix unit costs what its keys cost, whatever the number of queries. So the KV heads that share a
product lie side by side on its lanes, and their queries in its rows, each with zeros where other heads' keys are:

    rows    G queries of head 0 | q0  0   0 |      keys of heads 0, 1, 2 of one token
            G queries of head 1 | 0   q1  0 |
            G queries of head 2 | 0   0   q2|

Rows are few, and so softmax runs on full registers. A group's lanes begin and end at multiples of 128.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.tpu.words import LANES, SUBLANES, width


@dataclasses.dataclass(frozen=True)
class HeadGroups:
    """K KV heads of D lanes, each read by `queries_per_head` query heads, in groups of `heads`.

    Attributes:
      depth: Rows of a weight matrix that the chip's matrix unit takes at once.
      full: Whether a group is to fill eight rows with one query token, padded if need be; not so with many tokens.
    """

    num_kv_heads: int
    queries_per_head: int
    head_dim: int
    depth: int = LANES
    full: bool = True

    @property
    def heads(self) -> int:
        """KV heads of a group: enough to fill eight rows, and, where they are narrow, the matrix unit's depth."""
        if not self.aligned:
            return self.num_kv_heads
        fitting = [n for n in range(1, self.num_kv_heads + 1) if self._divides(n)]
        if not self.full:
            return min(fitting)
        wanted = [n for n in fitting if n * self.queries_per_head >= SUBLANES and n * self.head_dim >= self.depth]
        return min(wanted, default=max(fitting))

    def _divides(self, heads: int) -> bool:
        return self.num_kv_heads % heads == 0 and heads * self.head_dim % LANES == 0

    @property
    def aligned(self) -> bool:
        """Whether keys and values can be cut into groups at multiples of 128 lanes at all."""
        return self.num_kv_heads * self.head_dim % LANES == 0

    @property
    def count(self) -> int:
        return self.num_kv_heads // self.heads

    @property
    def rows(self) -> int:
        """Rows of a group for one query token, padded to a full register."""
        real = self.heads * self.queries_per_head
        return -(-real // SUBLANES) * SUBLANES if self.full else real

    @property
    def dense(self) -> bool:
        """Whether a head's lanes are whole registers, so that the kernel itself can spread the queries out."""
        return self.head_dim % LANES == 0

    @property
    def key_lanes(self) -> int:
        return -(-self.heads * self.head_dim // LANES) * LANES

    @property
    def value_lanes(self) -> int:
        """Lanes that a group's values lie within."""
        if self.aligned:
            return self.key_lanes
        return width(self.num_kv_heads, self.head_dim) - self.values_begin

    @property
    def values_begin(self) -> int:
        """The lane of a token at which what is read as values begins; keys begin at 0."""
        return self.num_kv_heads * self.head_dim // LANES * LANES

    @property
    def q_lanes(self) -> int:
        return self.head_dim if self.dense else self.key_lanes

    @property
    def out_lanes(self) -> int:
        return self.head_dim if self.dense else self.value_lanes

    def by_row(self, q_THD: Float[Array, "T H D"]) -> Float[Array, "T U V X"]:
        """Queries as the kernel takes them: U groups of V rows, with zeros for padding.

        If `dense`, X is D; otherwise each query stands on its own head's lanes of its group's.
        """
        num_tokens = q_THD.shape[0]
        q = q_THD.reshape(num_tokens, self.count, self.heads, self.queries_per_head, self.head_dim)
        if not self.dense:
            eye = jnp.eye(self.heads, dtype=q.dtype)
            q = q[:, :, :, :, None, :] * eye[None, None, :, None, :, None]
            q = q.reshape(*q.shape[:4], self.heads * self.head_dim)
            q = jnp.pad(q, [(0, 0)] * 4 + [(0, self.key_lanes - q.shape[-1])])
        q = q.reshape(num_tokens, self.count, self.heads * self.queries_per_head, q.shape[-1])
        return jnp.pad(q, [(0, 0), (0, 0), (0, self.rows - q.shape[2]), (0, 0)])

    def by_head(self, out_TUVX: Float[Array, "T U V X"]) -> Float[Array, "T H D"]:
        """The inverse for outputs, which have X = `out_lanes`."""
        num_tokens = out_TUVX.shape[0]
        out = out_TUVX[:, :, : self.heads * self.queries_per_head]
        out = out.reshape(num_tokens, self.count, self.heads, self.queries_per_head, self.out_lanes)
        if not self.dense:
            skipped = 0 if self.aligned else self.num_kv_heads * self.head_dim - self.values_begin
            own = [
                out[:, :, j, :, skipped + j * self.head_dim : skipped + (j + 1) * self.head_dim]
                for j in range(self.heads)
            ]
            out = jnp.stack(own, axis=2)
        return out.reshape(num_tokens, self.num_kv_heads * self.queries_per_head, self.head_dim)

    def row_values(self, per_head_H: Float[Array, " H"], queries: int) -> Float[Array, "U Y 128"]:
        """A number a query head, for each row of each group and ``queries`` tokens, spread over the lanes."""
        rows = per_head_H.reshape(self.count, self.heads * self.queries_per_head)
        rows = jnp.pad(rows, [(0, 0), (0, self.rows - rows.shape[1])])
        rows = jnp.tile(rows, (1, queries))
        return jnp.broadcast_to(rows[:, :, None], (*rows.shape, LANES)).astype(jnp.float32)
