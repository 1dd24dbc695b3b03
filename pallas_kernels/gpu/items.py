"""What is computed of a batch once a step: which queries make an item, and where a token's queries and results are.

An item is some queries of one row, at most ``height`` of them, whose heads over one KV head are the rows of a product.
Arrays only; it knows no kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


class Items(NamedTuple):
    """X items, and where the T tokens of the batch are among them.

    Attributes:
      told_5X: What the kernel is told of each: its row, the row's tokens up to and with the item's last query, its
        queries, the row's tokens before the first query of the row, and the row's tokens in all. An item without
        queries is none.
      nth_XQ: The place of its queries among the row's.
      token_XQ: Its queries in the batch; T where it has fewer. None: each token is an item.
      item_T, place_T: The item of each token and its place in that; of tokens that have none, some.
    """

    told_5X: Int32[Array, "5 X"]
    nth_XQ: Int32[Array, "X Q"]
    token_XQ: Int32[Array, "X Q"] | None
    item_T: Int32[Array, " T"]
    place_T: Int32[Array, " T"]


class Tokens(NamedTuple):
    """Of each of the batch's T tokens its row, its place among the row's queries, and its position.

    Attributes:
      row_T: Some row for padding.
      nth_T, position_T: From 0.
      real_T: Whether it is of a row.
    """

    row_T: Int32[Array, " T"]
    nth_T: Int32[Array, " T"]
    position_T: Int32[Array, " T"]
    real_T: Bool[Array, " T"]

    @classmethod
    def of(cls, kv_lens_R: Int32[Array, " R"], cu_q_lens_R1: Int32[Array, " R1"], num_tokens: int) -> Tokens:
        token_T = jnp.arange(num_tokens, dtype=jnp.int32)
        row_T = jnp.sum(cu_q_lens_R1[None, 1:] <= token_T[:, None], axis=1, dtype=jnp.int32)
        real_T = row_T < kv_lens_R.shape[0]
        row_T = jnp.minimum(row_T, kv_lens_R.shape[0] - 1)
        position_T = kv_lens_R[row_T] - (cu_q_lens_R1[row_T + 1] - token_T)
        return cls(row_T, token_T - cu_q_lens_R1[row_T], position_T, real_T)


def one_a_token(wanted_R: Bool[Array, " R"], tokens: Tokens) -> Items:
    """An item for each token, which is the only one of its row or padding."""
    count_T = (tokens.real_T & wanted_R[tokens.row_T]).astype(jnp.int32)
    none_T = jnp.zeros_like(count_T)
    end_T = tokens.position_T + 1
    told_5T = jnp.stack([tokens.row_T, end_T, count_T, tokens.position_T, end_T])
    return Items(told_5T, none_T[:, None], None, jnp.arange(count_T.shape[0], dtype=jnp.int32), none_T)


def tiles(
    wanted_R: Bool[Array, " R"],
    kv_lens_R: Int32[Array, " R"],
    cu_q_lens_R1: Int32[Array, " R1"],
    tokens: Tokens,
    *,
    height: int,
    num_items: int,
) -> Items:
    """Items of ``height`` queries; the last of a row may have fewer. ``num_items`` is enough: see `most_tiles`."""
    num_rows, num_tokens = wanted_R.shape[0], tokens.row_T.shape[0]
    q_lens_R = jnp.where(wanted_R, cu_q_lens_R1[1:] - cu_q_lens_R1[:-1], 0)
    items_R = -(-q_lens_R // height)
    ends_R = jnp.cumsum(items_R, dtype=jnp.int32)
    nth_X = jnp.arange(num_items, dtype=jnp.int32)
    row_X = jnp.sum(ends_R[None, :] <= nth_X[:, None], axis=1, dtype=jnp.int32)
    real_X = row_X < num_rows
    row_X = jnp.minimum(row_X, num_rows - 1)
    before_X = (nth_X - (ends_R - items_R)[row_X]) * height
    count_X = jnp.where(real_X, jnp.minimum(height, q_lens_R[row_X] - before_X), 0)
    start_X = kv_lens_R[row_X] - q_lens_R[row_X]
    nth_1Q = jnp.arange(height, dtype=jnp.int32)[None, :]
    first_X1 = (cu_q_lens_R1[row_X] + before_X)[:, None]
    return Items(
        jnp.stack([row_X, start_X + before_X + count_X, count_X, start_X, kv_lens_R[row_X]]),
        before_X[:, None] + nth_1Q,
        jnp.where(nth_1Q < count_X[:, None], first_X1 + nth_1Q, num_tokens),
        (ends_R - items_R)[tokens.row_T] + tokens.nth_T // height,
        tokens.nth_T % height,
    )


def most_tiles(num_rows: int, num_tokens: int, *, height: int) -> int:
    """The most items that so many tokens of so many rows need."""
    return num_tokens // height + min(num_rows, num_tokens)


def gathered(q_THD: Float[Array, "T H D"], items: Items, *, num_kv_heads: int, places: int) -> Float[Array, "X K P D"]:
    """The queries of each item and KV head: first those of its first query, a query head each; zeros fill up."""
    _, num_heads, head_dim = q_THD.shape
    q_XQHD = q_THD[:, None]
    if items.token_XQ is not None:
        q_XQHD = q_THD.at[items.token_XQ].get(mode="fill", fill_value=0)
    num_items, height = q_XQHD.shape[:2]
    q_XQKGD = q_XQHD.reshape(num_items, height, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q_XKPD = q_XQKGD.transpose(0, 2, 1, 3, 4).reshape(num_items, num_kv_heads, -1, head_dim)
    return jnp.pad(q_XKPD, ((0, 0), (0, 0), (0, places - q_XKPD.shape[2]), (0, 0)))


def by_token(out_XKOD: Float[Array, "X K O D"], items: Items, *, num_heads: int) -> Float[Array, "T H D"]:
    """The results of each token; of tokens that have no item, others'."""
    num_kv_heads, head_dim = out_XKOD.shape[1], out_XKOD.shape[3]
    group = num_heads // num_kv_heads
    if items.token_XQ is None:
        return out_XKOD[:, :, :group].reshape(-1, num_heads, head_dim)
    row_TG = items.place_T[:, None] * group + jnp.arange(group, dtype=jnp.int32)[None, :]
    # The two indexed axes stand apart, so they come first in the result: [T, G, K, D].
    out_TGKD = out_XKOD.at[items.item_T[:, None], :, row_TG].get(mode="clip")
    return out_TGKD.transpose(0, 2, 1, 3).reshape(-1, num_heads, head_dim)
