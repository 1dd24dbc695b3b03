"""From what a step has made to requests and to the books: tokens, log-probabilities, blocks that were filled.

It knows requests, the schedule that was carried out, and its output. It dispatches nothing.
"""

from __future__ import annotations

import numpy as np

from jpaged.groups import Sequence
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
      books_generated: Whether anybody may want blocks of generated tokens later.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, block_size: int, *, books_generated: bool):
        self._scheduler, self._tokenizer, self._block_size = scheduler, tokenizer, block_size
        self._books_generated = books_generated

    def read(self, planned: Schedule, output: StepOutput, now: float) -> list[AnySample]:
        """Tells requests and the scheduler what a step did; returns the samples that this changed.

        Args:
          planned: The step.
          output: What it has left, in NumPy.
          now: When, in seconds.

        Raises:
          AssertionError: the device had no room for a step that the books had room for.
        """
        if not output.ok:
            raise AssertionError("the pool could not serve a step that the books had room for")
        rows, sampled = len(planned.sequences), output.sampled
        made_R, filled_R = output.made_KR[:, :rows].sum(axis=0), output.filled_R[:rows]
        decodes_R = ~planned.prefills_R & (planned.counts_R > 0)
        counts_of = np.stack([made_R, np.where(decodes_R, made_R, planned.counts_R), filled_R], axis=1).tolist()
        only_grew_R = decodes_R & (made_R == len(output.made_KR)) & (filled_R == 0) & ~output.done_R[:rows]
        found = Candidates(sampled.logprob_R, sampled.rank_R, sampled.top_ids_RJ, sampled.top_logprobs_RJ)
        prefills_of = planned.prefills_R.tolist()
        block_R = np.cumsum(filled_R) - filled_R
        changed: list[AnySample] = []
        # With 256 rows a microsecond in this loop is a quarter of a millisecond a step.
        rows_of = zip(planned.sequences, sampled.token_R[:, :rows].T.tolist(), only_grew_R.tolist(), strict=True)
        for row, (sequence, new, only_grew) in enumerate(rows_of):
            sample: AnySample = sequence.key
            if sample.finish_reason is not None:
                continue
            if only_grew and sample.keeps_tokens_only:
                sequence.kv_len += len(new)
                sample.token_ids.extend(new)
                sample.last_token = now
                changed.append(sample)
                continue
            first, prefills = sequence.kv_len, prefills_of[row]
            made, grown, filled = counts_of[row]
            sequence.kv_len = first + grown
            if prefills and isinstance(sample, Sample):
                self._read_prompt(planned, output, row)
            if made and isinstance(sample, Sample):  # what beams make is read once all have been
                new, over = new[:made], bool(output.done_R[row])
                scores = () if sample.num_logprobs is None else self._logprobs(found, sample, row, new)
                failed = over and bool((sampled.bad_R[:, row] & output.made_KR[:, row]).any())
                sample.accept(new, scores, now, over=over, failed=failed)
                changed.append(sample)
            if filled and (prefills or self._books_generated):
                self._book(sequence, first, output.filled_Z[block_R[row] : block_R[row] + filled].tolist())
            if prefills and sequence.kv_len >= sequence.prefill_len:
                self._scheduler.computed(sequence)
        for members in rows_of_beams(planned):
            changed += self._read_beams(planned, output, members, int(made_R[members[0]]), now)
        return changed

    def _book(self, sequence: Sequence, first: int, ids: list[int]) -> None:
        """Tells the scheduler which blocks a sequence has filled since it had ``first`` tokens."""
        chain = sequence.chain
        if isinstance(sequence.key, Sample):  # what beams generate changes hands
            known = len(chain) * self._block_size
            chain.extend(tokens(sequence.key, known, None), known)
        self._scheduler.filled(sequence, first // self._block_size, ids)

    def _read_beams(
        self, planned: Schedule, output: StepOutput, rows: list[int], steps: int, now: float
    ) -> list[AnySample]:
        """Lets the beams of one group change places."""
        sequences = [planned.sequences[row] for row in rows]
        request, group, search = sequences[0].key.request, sequences[0].group, output.beams
        assert search is not None and output.own_R is not None
        failed = bool((output.sampled.bad_R & output.made_KR)[:, rows[0]].any())
        for k in range(steps - failed):  # nothing comes after that
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
                now,
            )
        if output.done_R[rows[0]]:
            request.end(failed=failed)
        counted = sum(int(blocks_for(sequence.kv_len, self._block_size)) for sequence in sequences)
        counted -= len(sequences) * (group.fork_len // self._block_size)
        self._scheduler.shared(group, counted - round(float(output.own_R[rows].sum())))
        return [sequence.key for sequence in sequences]

    def _logprobs(self, found: Candidates, sample: Sample, row: int, new: list[int]) -> list[dict]:
        assert sample.num_logprobs is not None
        return [found.table((k, row), token, sample.num_logprobs, self._tokenizer) for k, token in enumerate(new)]

    def _read_prompt(self, planned: Schedule, output: StepOutput, row: int) -> None:
        """Keeps the prompt log-probabilities of one row's chunk."""
        sample = planned.sequences[row].key
        request = sample.request
        top, ids, scores = request.params.prompt_logprobs, request.prompt_token_ids, output.prompt_logprobs
        if top is None or scores is None or sample.index > 0:
            return
        first, count, start = int(planned.starts_R[row]), int(planned.counts_R[row]), int(planned.counts_R[:row].sum())
        found = Candidates(scores.logprob_T, scores.rank_T, scores.top_ids_TJ, scores.top_logprobs_TJ)
        told = len(request.prompt_logprobs) - 1  # before a pause
        for i in range(max(0, told - first), min(count, len(ids) - 1 - first)):
            request.prompt_logprobs.append(found.table(start + i, ids[first + i + 1], top, self._tokenizer))
