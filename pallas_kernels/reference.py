"""The oracle of every attention kernel: obvious, slow, float64.

One sequence, one query, one head at a time, over keys and values that were gathered into plain order first. It knows
neither kernels nor layouts of a cache; arguments are NumPy arrays.
"""

import numpy as np


def attend_one(
    q_D: np.ndarray,
    k_PD: np.ndarray,
    v_PD: np.ndarray,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    sink: float | None = None,
) -> np.ndarray:
    """Softmax attention of one query over P keys: ``softmax(cap(q·k · sm_scale)) v``, in float64.

    A sink is one more logit in the softmax's denominator with no value of its own. No keys give zeros.
    """
    if not len(k_PD):
        return np.zeros(v_PD.shape[-1])
    scores_P = k_PD.astype(np.float64) @ q_D.astype(np.float64) * sm_scale
    if soft_cap is not None:
        scores_P = soft_cap * np.tanh(scores_P / soft_cap)
    top = max(scores_P.max(), -np.inf if sink is None else sink)
    weights_P = np.exp(scores_P - top)
    total = weights_P.sum() + (0.0 if sink is None else np.exp(sink - top))
    return weights_P @ v_PD.astype(np.float64) / total


def paged_attention(
    q_THD: np.ndarray,
    kv_NBCKD: np.ndarray,
    block_tables_RM: np.ndarray,
    kv_lens_R: np.ndarray,
    cu_q_lens_R1: np.ndarray,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: np.ndarray | None = None,
    tree_TQ: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of a ragged batch through block tables, over one layer that holds its new tokens already.

    Args:
      q_THD: Queries; row r owns those from ``cu_q_lens_R1[r]`` up to ``cu_q_lens_R1[r + 1]``, its last positions.
      kv_NBCKD: Keys (C = 0) and values (C = 1) of N blocks of B tokens.
      block_tables_RM: Blocks of each row, in order.
      kv_lens_R: Tokens of each row, the queries' own included.
      cu_q_lens_R1: Prefix sums of the rows' query counts.
      sm_scale: Factor on the scores.
      sliding_window: A query sees only this many last positions, its own included.
      soft_cap: ``cap · tanh(score / cap)``.
      sinks_H: One sink logit a head.
      tree_TQ: Which of its row's queries each query sees, by their place in the row; without, itself and those before.

    Returns:
      Outputs [T, H, D] in float64; zeros for queries that no row owns.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    block_size, num_kv_heads = kv_NBCKD.shape[1], kv_NBCKD.shape[3]
    out_THD = np.zeros((num_tokens, num_heads, head_dim))
    for row, kv_len in enumerate(kv_lens_R):
        first, last = int(cu_q_lens_R1[row]), int(cu_q_lens_R1[row + 1])
        for t in range(first, last):
            position = int(kv_len) - (last - t)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            positions = list(range(oldest, position + 1))
            if tree_TQ is not None:
                begin = int(kv_len) - (last - first)
                own = [begin + j for j in range(last - first) if tree_TQ[t, j]]
                positions = [p for p in positions if p < begin] + own
            seen = [(block_tables_RM[row, p // block_size], p % block_size) for p in positions]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                k_PD = np.array([kv_NBCKD[block, offset, 0, kv_head] for block, offset in seen])
                v_PD = np.array([kv_NBCKD[block, offset, 1, kv_head] for block, offset in seen])
                sink = None if sinks_H is None else float(sinks_H[head])
                out_THD[t, head] = attend_one(
                    q_THD[t, head], k_PD, v_PD, sm_scale=sm_scale, soft_cap=soft_cap, sink=sink
                )
    return out_THD
