"""Named shapes, shared by tests, benchmarks and the script that inspects kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of one kind: every row has `queries` queries and `context` tokens, those included.

    Attributes:
      num_heads, num_kv_heads, head_dim, block_size, dtype: Of attention and its cache: H, K, D, B.
      context: Tokens of a row.
      queries: Query tokens of a row; more than eight make it a prefill.
      rows: Sequences.
      sliding_window, soft_cap, sinks, tree, scales: Features that it uses.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    context: int = 2048
    queries: int = 1
    rows: int = 64
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    tree: bool = False
    scales: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer, without padding."""
        return 2 * self.num_kv_heads * self.head_dim * _SIZES.get(self.dtype, 1)

    @property
    def least_bytes(self) -> int:
        """What must move at the least: the KV that queries see, the new KV, the queries and the results."""
        seen = self.context
        if self.sliding_window is not None:
            seen = min(seen, self.sliding_window + self.queries - 1)
        tokens = self.rows * self.queries
        query = self.num_heads * self.head_dim * (4 if self.dtype == "float32" else 2)
        return self.rows * seen * self.token_bytes + tokens * self.token_bytes + 2 * tokens * query


_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number; of others 1

CASES = {
    "decode_bf16_b16": Case(),
    "decode_bf16_b16_ctx128": Case(context=128),
    "decode_bf16_b16_window": Case(sliding_window=1024),
    "decode_bf16_b16_softcap": Case(soft_cap=50.0),
    "decode_bf16_b16_sinks": Case(sinks=True),
    "decode_bf16_b16_tree": Case(queries=4, tree=True),
    "decode_bf16_b16_kv1": Case(num_heads=4, num_kv_heads=1),
    "decode_bf16_b16_d64": Case(head_dim=64),
    "decode_bf16_b16_d80": Case(head_dim=80),
    "decode_bf16_b16_d96": Case(head_dim=96),
    "decode_bf16_b16_d192": Case(head_dim=192),
    "decode_bf16_b16_d256": Case(num_heads=16, num_kv_heads=4, head_dim=256),
    "decode_bf16_b8": Case(block_size=8),
    "decode_bf16_b64": Case(block_size=64),
    "decode_bf16_b256": Case(block_size=256),
    "decode_bf16_b16_mha": Case(num_heads=8),
    "decode_f32_b16": Case(dtype="float32"),
    "decode_f16_b16": Case(dtype="float16"),
    "decode_bf16_b16_rows1_ctx32k": Case(rows=1, context=32768),
    "decode_bf16_b16_rows8": Case(rows=8),
    "decode_e4m3_b64": Case(dtype="float8_e4m3fn", block_size=64, scales=True),
    "decode_e5m2_b32": Case(dtype="float8_e5m2", block_size=32, scales=True),
    "decode_int8_b32": Case(dtype="int8", block_size=32, scales=True),
    "prefill_bf16_b16": Case(queries=512, rows=4),
    "prefill_bf16_b16_group7": Case(num_heads=28, num_kv_heads=4, queries=512, rows=4),
    "prefill_f32_b16": Case(dtype="float32", queries=512, rows=4),
    "prefill_int8_b32": Case(dtype="int8", block_size=32, scales=True, queries=512, rows=4),
    "prefill_bf16_b16_d64_window": Case(queries=512, rows=4, head_dim=64, sliding_window=1024),
    "prefill_e4m3_b64_softcap_sinks": Case(
        queries=512, rows=4, dtype="float8_e4m3fn", block_size=64, scales=True, soft_cap=50.0, sinks=True
    ),
}
