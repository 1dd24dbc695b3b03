"""Beam search on the device: which beams go on, from which of the old ones, and which hypotheses are finished.

It knows scores, tokens and which rows belong together. It knows neither tables nor text: that a beam goes on from
another is said as a row, and the caller permutes tables and histories.

A hypothesis scores the sum of its tokens' log-probabilities, by the model alone, over its length to the power of the
length penalty; the length counts generated tokens, the stop token included (as in transformers' `generate`). Of all
continuations of a group's beams the best ones that do not stop go on; those that stop finish if they are among the best
``width`` of all. Equal scores rank by beam, then by token.

Here W is the greatest width, E counts stop ids and J candidates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jpaged.sampling import ranks
from jpaged.types import AnyArray


class BeamRows(struct.PyTreeNode):
    """What R rows are as beams; the state of an engine has one such row for each slot.

    Attributes:
      width_R: Beams of the row's group.
      penalty_R: The length penalty.
      eager_R: Whether the search ends as soon as ``width`` hypotheses are finished; else it goes on until no beam can
        beat the worst of them.
      score_R: The sum of the beam's log-probabilities; -inf for one that is none: of a prompt all but the first.
      finished_RW: Scores of the best finished hypotheses, best first, then -inf. In the row of a group's first beam.
    """

    width_R: Int32[Array, " R"]
    penalty_R: Float32[Array, " R"]
    eager_R: Bool[Array, " R"]
    score_R: Float32[Array, " R"]
    finished_RW: Float32[Array, "R W"]


class BeamStep(struct.PyTreeNode):
    """What a step did to R rows; a decode of several steps has one more axis in front.

    Attributes:
      parent_R: The beam, by its number in the group, from which the row's beam goes on.
      token_R: By which token.
      score_R: The sum so far.
      ended_parent_R, ended_token_R, ended_sum_R: A hypothesis that finished: the beam that it went on from, its stop
        token, its sum. There are as many places as rows in a group; in those that are not used the parent is -1.
    """

    parent_R: Int32[Array, "*R"]
    token_R: Int32[Array, "*R"]
    score_R: Float32[Array, "*R"]
    ended_parent_R: Int32[Array, "*R"]
    ended_token_R: Int32[Array, "*R"]
    ended_sum_R: Float32[Array, "*R"]


def create(num_slots: int, width: int) -> BeamRows:
    """Rows of idle slots."""
    return BeamRows(
        width_R=jnp.ones(num_slots, jnp.int32),
        penalty_R=jnp.zeros(num_slots, jnp.float32),
        eager_R=jnp.zeros(num_slots, jnp.bool_),
        score_R=jnp.full(num_slots, -jnp.inf, jnp.float32),
        finished_RW=jnp.full((num_slots, width), -jnp.inf, jnp.float32),
    )


def blank(shape: tuple[int, ...]) -> BeamStep:
    """Zeros in the form of `BeamStep`, to be filled in step by step."""
    integers, floats = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return BeamStep(integers, integers, floats, integers, integers, floats)


def packed_width(width: int) -> int:
    """Integers that `pack` needs."""
    return 4 + width


def pack(
    width: int, penalty: float, eager: bool, score: float, finished: list[float], most: int
) -> Int32[np.ndarray, " X"]:
    """One row of `BeamRows` as integers, floats by their bits, for a plan; ``most`` is W."""
    floats = np.full(2 + most, -np.inf, np.float32)
    floats[:2] = penalty, score
    floats[2 : 2 + len(finished)] = finished
    return np.concatenate([np.array([width, eager], np.int32), floats.view(np.int32)])


def unpack(packed_RX: Int32[AnyArray, "R X"]) -> BeamRows:
    """The inverse of `pack`, on the device."""
    packed_RX = jnp.asarray(packed_RX)
    floats = lax.bitcast_convert_type(packed_RX[:, 2:], jnp.float32)
    return BeamRows(packed_RX[:, 0], floats[:, 0], packed_RX[:, 1] > 0, floats[:, 1], floats[:, 2:])


def gather(slots: BeamRows, slots_R: Int32[Array, " R"]) -> BeamRows:
    """The rows of some slots; for a slot that does not exist, any."""
    return jax.tree.map(lambda x: x.at[slots_R].get(mode="clip"), slots)


def set_rows(slots: BeamRows, rows: BeamRows, slots_R: Int32[Array, " R"]) -> BeamRows:
    """Writes rows into slots; those for a slot that does not exist are dropped."""
    return jax.tree.map(lambda x, new: x.at[slots_R].set(new, mode="drop"), slots, rows)


def members(leaders_R: Int32[Array, " R"], numbers_R: Int32[Array, " R"], width: int) -> Int32[Array, "R W"]:
    """The rows of each row's group by their numbers, then R.

    Args:
      leaders_R: The row of the group's first beam; R for a row that is no beam.
      numbers_R: The row's number in its group.
      width: W.
    """
    rows = leaders_R.shape[0]
    table_RW = jnp.full((rows, width), rows, jnp.int32)
    table_RW = table_RW.at[leaders_R, numbers_R].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    return table_RW.at[leaders_R].get(mode="fill", fill_value=rows)


def select(
    logits_RV: Float32[Array, "R V"],
    rows: BeamRows,
    members_RW: Int32[Array, "R W"],
    numbers_R: Int32[Array, " R"],
    stop_ids_RE: Int32[Array, "R E"],
    generated_R: Int32[Array, " R"],
    most_R: Int32[Array, " R"],
    *,
    vocab_limit: int,
) -> tuple[BeamStep, BeamRows, Bool[Array, " R"], Bool[Array, " R"]]:
    """One step of the search, for all groups at once.

    Args:
      logits_RV: The model's logits after each beam.
      rows: The beams, each with the finished hypotheses of its group.
      members_RW, numbers_R: See `members`. Rows that are no beams get no answer that means anything.
      stop_ids_RE: Tokens that finish a hypothesis, ascending, then NO_TOKEN.
      generated_R: Tokens of a continuation that this step makes.
      most_R: The most that it may have.
      vocab_limit: Ids from here on are never chosen; static.

    Returns:
      What happened; the rows after it; which are over, whole groups; and which groups failed, for scores were NaN or
      infinite.
    """
    vocab, width = logits_RV.shape[1], members_RW.shape[1]
    allowed_1V = jnp.arange(vocab, dtype=jnp.int32)[None, :] < vocab_limit
    bad_R = jnp.isinf(ranks.best(jnp.where(allowed_1V, logits_RV, -jnp.inf)).value_R)
    bad_R = jnp.any(_of(bad_R, members_RW, False), axis=1)
    log_sum_R1 = jax.nn.logsumexp(logits_RV, axis=1, keepdims=True)
    sums_RV = jnp.where(allowed_1V, logits_RV - log_sum_R1 + rows.score_R[:, None], -jnp.inf)

    # Each beam's best, then each group's: [R, W beams, J] in the order of ranks, so the first of equals wins.
    row_R1 = jnp.arange(logits_RV.shape[0], dtype=jnp.int32)[:, None]
    going_RV = sums_RV.at[row_R1, stop_ids_RE].set(-jnp.inf, mode="drop")
    tokens_RJ, going_RJ = ranks.best_few(going_RV, width)
    going = _best(_of(going_RJ, members_RW, -jnp.inf), _of(tokens_RJ, members_RW, 0), width)
    stops_RE = sums_RV.at[row_R1, stop_ids_RE].get(mode="fill", fill_value=-jnp.inf)
    ended = _best(_of(stops_RE, members_RW, -jnp.inf), _of(stop_ids_RE, members_RW, 0), width)
    place_1W = jnp.arange(width, dtype=jnp.int32)[None, :]
    ahead_RJ = jnp.sum(_before(going, ended), axis=2, dtype=jnp.int32) + place_1W
    finishes_RJ = (ended.sum_RJ > -jnp.inf) & (ahead_RJ < rows.width_R[:, None])

    length_R1, penalty_R1 = generated_R[:, None].astype(jnp.float32), rows.penalty_R[:, None]
    scores_RJ = jnp.where(finishes_RJ, ended.sum_RJ / length_R1**penalty_R1, -jnp.inf)
    finished_RW, _ = lax.top_k(jnp.concatenate([rows.finished_RW, scores_RJ], axis=1), width)
    finished_RW = jnp.where(place_1W < rows.width_R[:, None], finished_RW, -jnp.inf)

    # A sum only falls. Divided by the greatest length that it can have, if length is a bonus, it is the best to be had.
    worst_R = jnp.take_along_axis(finished_RW, rows.width_R[:, None] - 1, axis=1)[:, 0]
    longest_R = jnp.where(rows.penalty_R > 0, most_R, jnp.minimum(generated_R + 1, most_R)).astype(jnp.float32)
    best_R = going.sum_RJ[:, 0]
    hopeless_R = best_R / longest_R**rows.penalty_R <= worst_R
    over_R = (worst_R > -jnp.inf) & (rows.eager_R | hopeless_R)
    over_R = over_R | (best_R == -jnp.inf) | (generated_R >= most_R) | bad_R

    def own(x_RJ: Array) -> Array:
        return jnp.take_along_axis(x_RJ, numbers_R[:, None], axis=1)[:, 0]

    step = BeamStep(
        parent_R=own(going.beam_RJ),
        token_R=own(going.token_RJ),
        score_R=own(going.sum_RJ),
        ended_parent_R=own(jnp.where(finishes_RJ, ended.beam_RJ, -1)),
        ended_token_R=own(ended.token_RJ),
        ended_sum_R=own(ended.sum_RJ),
    )
    return step, rows.replace(score_R=step.score_R, finished_RW=finished_RW), over_R, bad_R


class _Candidates(struct.PyTreeNode):
    """The best continuations of each group: the beam that goes on, by which token, and the sum."""

    beam_RJ: Int32[Array, "R J"]
    token_RJ: Int32[Array, "R J"]
    sum_RJ: Float32[Array, "R J"]


def _of(x: Array, members_RW: Int32[Array, "R W"], fill: float) -> Array:
    """The rows of each row's group."""
    return x.at[members_RW].get(mode="fill", fill_value=fill)


def _best(sums_RWJ: Array, tokens_RWJ: Array, count: int) -> _Candidates:
    """The best of each group's candidates, equals in the order of beams, then of J."""
    rows, _, few = sums_RWJ.shape
    flat = sums_RWJ.reshape(rows, -1)
    if short := max(0, count - flat.shape[1]):
        flat = jnp.pad(flat, ((0, 0), (0, short)), constant_values=-jnp.inf)
    sum_RJ, place_RJ = lax.top_k(flat, count)
    token_RJ = jnp.take_along_axis(tokens_RWJ.reshape(rows, -1), place_RJ, axis=1, mode="clip")
    # A candidate that is none names a beam all the same, and its token is never looked at.
    return _Candidates((place_RJ // few).astype(jnp.int32), jnp.where(sum_RJ > -jnp.inf, token_RJ, 0), sum_RJ)


def _before(one: _Candidates, other: _Candidates) -> Bool[Array, "R J J"]:
    """Whether each of ``one``, last axis, ranks before each of ``other``."""
    a = jax.tree.map(lambda x: x[:, None, :], one)
    b = jax.tree.map(lambda x: x[:, :, None], other)
    first = (a.beam_RJ < b.beam_RJ) | ((a.beam_RJ == b.beam_RJ) & (a.token_RJ < b.token_RJ))
    return (a.sum_RJ > b.sum_RJ) | ((a.sum_RJ == b.sum_RJ) & first)
