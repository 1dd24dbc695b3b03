"""From what a step has made to requests and to the books: tokens, log-probabilities, blocks that were filled.

It knows requests, the schedule that was carried out, and its output. It dispatches nothing.
"""

from __future__ import annotations

import numpy as np

from jpaged.intake import AnySample
from jpaged.ledger import blocks_for
from jpaged.packing import rows_of_beams, tokens
from jpaged.request import Candidates, Sample
from jpaged.schedule import Schedule
from jpaged.scheduler import Scheduler
from jpaged.step import StepOutput
from jpaged.tokenizer import Tokenizer


class Reader:
    """Reads steps.

    Args:
      scheduler: Whose books are kept.
      tokenizer: Says what tokens are as text; None: nothing does.
      block_size: Tokens of a block.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, block_size: int):
        self._scheduler, self._tokenizer, self._block_size = scheduler, tokenizer, block_size

    def read(self, planned: Schedule, output: StepOutput) -> list[AnySample]:
        """Tells requests and the scheduler what a step did; returns the samples that this changed.

        Args:
          planned: The step.
          output: What it has left, in NumPy.
        """
        if not output.ok:
            raise AssertionError("the pool could not serve a step that the books had room for")
        rows = len(planned.sequences)
        made_R = output.made_KR[:, :rows].sum(axis=0)
        decodes_R = ~planned.prefills_R & (planned.counts_R > 0)
        grown_R = np.where(decodes_R, made_R, planned.counts_R)
        made_tokens = output.sampled.token_R[:, :rows].T.tolist()
        over_R = output.done_R[:rows].tolist()
        failed_R = (output.sampled.bad_R & output.made_KR)[:, :rows].any(axis=0).tolist()
        found = Candidates(
            output.sampled.logprob_R, output.sampled.rank_R, output.sampled.top_ids_RJ, output.sampled.top_logprobs_RJ
        )
        changed: list[AnySample] = []
        start = block = 0
        # Lists, and nothing looked up twice: with 256 rows a microsecond here is a quarter of a millisecond a step.
        rows_of = zip(
            planned.sequences,
            planned.prefills_R.tolist(),
            grown_R.tolist(),
            made_R.tolist(),
            made_tokens,
            output.filled_R[:rows].tolist(),
            strict=True,
        )
        for row, (sequence, prefills, grown, made, new, filled) in enumerate(rows_of):
            sample = sequence.key
            if prefills:
                start = self._read_prompt(planned, output, row, start)
            block += filled
            if sequence.slot is None:
                continue
            first = sequence.kv_len
            sequence.kv_len = first + grown
            if sample.finish_reason is not None:
                continue
            is_beam = sequence.group.are_beams
            if made and not is_beam:
                new = new if made == len(new) else new[:made]
                scores = self._logprobs(found, sample, row, new) if sample.request.params.logprobs is not None else ()
                sample.accept(new, scores, over=over_R[row], failed=failed_R[row])
                changed.append(sample)
            if filled:
                if not is_beam:  # what beams generate changes hands
                    known = len(sequence.chain) * self._block_size
                    sequence.chain.extend(tokens(sample, known, None), known)
                ids = output.filled_Z[block - filled : block].tolist()
                self._scheduler.filled(sequence, first // self._block_size, ids)
            if prefills and sequence.kv_len >= sequence.prefill_len:
                self._scheduler.computed(sequence)
        for members in rows_of_beams(planned):
            changed += self._read_beams(planned, output, members, int(made_R[members[0]]))
        return changed

    def _read_beams(self, planned: Schedule, output: StepOutput, rows: list[int], steps: int) -> list[AnySample]:
        """Lets the beams of one group change places."""
        sequences = [planned.sequences[row] for row in rows]
        request, group, search = sequences[0].key.request, sequences[0].group, output.beams
        if request.finished or sequences[0].slot is None:
            return []
        assert search is not None and output.own_R is not None
        for k in range(steps):
            ended = zip(
                search.ended_parent_R[k, rows].tolist(),
                search.ended_token_R[k, rows].tolist(),
                search.ended_sum_R[k, rows].tolist(),
                strict=True,
            )
            request.advance(
                search.parent_R[k, rows].tolist(),
                search.token_R[k, rows].tolist(),
                search.score_R[k, rows].tolist(),
                [each for each in ended if each[0] >= 0],
            )
        if output.done_R[rows[0]]:
            request.end(failed=bool((output.sampled.bad_R & output.made_KR)[:, rows[0]].any()))
        counted = sum(int(blocks_for(sequence.kv_len, self._block_size)) for sequence in sequences)
        counted -= len(sequences) * (group.fork_len // self._block_size)
        self._scheduler.shared(group, counted - round(float(output.own_R[rows].sum())))
        return [sequence.key for sequence in sequences]

    def _logprobs(self, found: Candidates, sample: Sample, row: int, new: list[int]) -> list[dict]:
        top = sample.request.params.logprobs
        assert top is not None
        return [found.table((k, row), token, top, self._tokenizer) for k, token in enumerate(new)]

    def _read_prompt(self, planned: Schedule, output: StepOutput, row: int, start: int) -> int:
        """Keeps the prompt log-probabilities of one row's chunk; returns where the next row's tokens begin."""
        sample = planned.sequences[row].key
        request = sample.request
        first, count = int(planned.starts_R[row]), int(planned.counts_R[row])
        top, ids, scores = request.params.prompt_logprobs, request.prompt_token_ids, output.prompt_logprobs
        if top is not None and scores is not None and sample.index == 0:
            found = Candidates(scores.logprob_T, scores.rank_T, scores.top_ids_TJ, scores.top_logprobs_TJ)
            told = len(request.prompt_logprobs) - 1  # before a pause
            for i in range(max(0, told - first), min(count, len(ids) - 1 - first)):
                request.prompt_logprobs.append(found.table(start + i, ids[first + i + 1], top, self._tokenizer))
        return start + count
