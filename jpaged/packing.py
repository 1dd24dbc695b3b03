"""From a schedule to the packed plan that the device reads: tokens, settings, ids, each in its place.

It knows requests and the layout of plans. It decides nothing.
"""

from __future__ import annotations

import numpy as np

from jpaged import beam, plan, sampling
from jpaged.buckets import Buckets
from jpaged.config import SamplingParams
from jpaged.groups import Sequence
from jpaged.hypotheses import Beam, BeamRequest
from jpaged.intake import AnySample
from jpaged.plan import PlanShape
from jpaged.request import Request
from jpaged.schedule import Schedule, StepLimits
from jpaged.sizing import ResolvedConfig

SEARCHED = SamplingParams(temperature=0.0)  # of beams: `beam` selects, and nothing is drawn


class Packer:
    """Packs plans.

    Args:
      config: The engine's settings.
      rows: How sampling settings are packed.
      limits: Of a step.
    """

    def __init__(self, config: ResolvedConfig, rows: sampling.RowLayout, limits: StepLimits):
        self._config, self._rows, self._limits = config, rows, limits

    def shape(self, rows: int, tokens: int, *, beams: bool) -> PlanShape:
        """The shape of a plan; with 0 tokens, of one that only decodes."""
        size = self._config.block_size
        return PlanShape(
            slots=self._config.max_num_seqs,
            rows=rows,
            tokens=tokens,
            admissions=self._limits.starts if tokens else 0,
            sampler_width=self._rows.width,
            known=self._limits.attached * size if tokens else 0,
            keeps=self._limits.cache_changes,
            block_size=size,
            beams=self._config.max_beam_width if beams else 0,
        )

    def shape_for(self, planned: Schedule, buckets: Buckets) -> PlanShape:
        """The smallest shape that a schedule fits."""
        rows, beams = len(planned.slots_R), planned.has_beams
        if planned.decodes_only:
            return self.shape(buckets.decode(rows), 0, beams=beams)
        return self.shape(*buckets.prefill(rows, int(planned.counts_R.sum())), beams=beams)

    def blank(self, shape: PlanShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """An idle plan, and views of its sections."""
        return plan.blank(shape, self._config.num_blocks)

    def pack(self, planned: Schedule, shape: PlanShape) -> np.ndarray:
        packed, view = self.blank(shape)
        rows = len(planned.slots_R)
        view["steps"][...] = planned.steps
        view["free"][list(planned.freed)] = 1
        view["slots"][:rows] = planned.slots_R
        view["counts"][:rows] = planned.counts_R
        view["flags"][:rows] = planned.prefills_R * plan.PREFILLS + planned.samples_R * plan.SAMPLES
        view["sources"][:rows] = planned.sources_R
        view["keep"][: len(planned.keeps)] = planned.keeps
        view["drop"][: len(planned.drops)] = planned.drops
        if not planned.decodes_only:
            self._pack_prompts(planned, view)
            self._pack_starts(planned, view)
            self._pack_twins(planned, view)
        if planned.beams:
            self._pack_groups(planned, view)
        return packed

    def _pack_prompts(self, planned: Schedule, view: dict[str, np.ndarray]) -> None:
        start = 0
        for row in np.flatnonzero(planned.prefills_R).tolist():
            first, count = int(planned.starts_R[row]), int(planned.counts_R[row])
            ids = tokens(planned.sequences[row].key, first, first + count + 1)
            view["tokens"][start : start + count] = ids[:count]
            view["nexts"][row] = ids[count] if count < len(ids) else 0
            start += count

    def _pack_starts(self, planned: Schedule, view: dict[str, np.ndarray]) -> None:
        block = token = 0
        for j, one in enumerate(planned.started):
            sample, num_blocks = one.sequence.key, len(one.block_ids)
            num_tokens = num_blocks * self._config.block_size
            view["admit"][j] = one.slot
            view["samplers"][j] = self._sampler_row(sample)
            view["attached"][j] = num_blocks
            view["attach_ids"][block : block + num_blocks] = one.block_ids
            view["known"][token : token + num_tokens] = tokens(sample, 0, num_tokens)
            block, token = block + num_blocks, token + num_tokens
            if isinstance(sample, Beam):
                view["beams"][j] = self._beam_row(sample)

    def _pack_twins(self, planned: Schedule, view: dict[str, np.ndarray]) -> None:
        for row in np.flatnonzero(planned.sources_R != np.arange(len(planned.sources_R))).tolist():
            sample: AnySample = planned.sequences[row].key
            view["nexts"][row] = sample.index
            if isinstance(sample, Beam):
                view["scores"][row] = np.float32(sample.total).view(np.int32)
                if not planned.samples_R[row]:
                    view["nexts"][row] = sample.token_ids[0]

    def _pack_groups(self, planned: Schedule, view: dict[str, np.ndarray]) -> None:
        for rows in rows_of_beams(planned):
            view["leaders"][rows] = rows[0]
            view["numbers"][rows] = np.arange(len(rows))

    def _sampler_row(self, sample: AnySample) -> np.ndarray:
        request = sample.request
        if isinstance(request, BeamRequest):
            params, bad_words, seed = SEARCHED, [], 0
        else:
            params, bad_words, seed = request.params, request.bad_words, self._seed(request)
        return sampling.pack_row(
            self._rows,
            params,
            index=sample.index,
            seed=seed,
            prompt_len=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            stop_ids=sorted(request.stop_ids),
            bad_words=bad_words,
        )

    def _beam_row(self, sample: Beam) -> np.ndarray:
        request = sample.request
        return beam.pack(
            len(request.samples),
            request.search.length_penalty,
            request.search.early_stopping,
            sample.total,
            [each.score for each in request.finished_best],
            self._config.max_beam_width,
        )

    def _seed(self, request: Request) -> int:
        """A request without a seed of its own gets one from the engine's seed and its number."""
        if request.params.seed is not None:
            return request.params.seed
        return int(np.random.default_rng([self._config.seed % 2**64, request.id]).integers(2**63))


def rows_of_beams(planned: Schedule) -> list[list[int]]:
    """For each group of beams that selects in a step, and was not aborted since, its rows in the order of its beams."""
    rows: dict[Sequence, int] = {}
    if planned.beams:
        rows = {sequence: row for row, sequence in enumerate(planned.sequences)}
    return [[rows[sequence] for sequence in group.sequences] for group in planned.beams if group.sequences]


def tokens(sample: AnySample, first: int, stop: int | None) -> list[int]:
    """A piece of a sample's tokens, prompt then output."""
    prompt = sample.request.prompt_token_ids
    if stop is not None and stop <= len(prompt):
        return prompt[first:stop]
    if first >= len(prompt):  # whoever reads every step should not copy the prompt each time
        return sample.token_ids[first - len(prompt) : None if stop is None else stop - len(prompt)]
    return (prompt + sample.token_ids)[first:stop]
