"""The next token of each row, on the device: what each request asks for, from the logits to the token.

It knows logits, settings and the tokens so far. It does not know requests, text, KV memory or the scheduler. Nothing
here sorts, and no row can see another: see `ranks` and `weights` for how.
"""

from jpaged.sampling.logprobs import TokenLogprobs, prompt_logprobs, token_logprobs
from jpaged.sampling.packing import pack_row, seed_words
from jpaged.sampling.rows import (
    RowLayout,
    SamplerRows,
    create,
    gather,
    set_rows,
    wants_prompt_logprobs,
)
from jpaged.sampling.sampler import Sampled, blank, is_over, sample

__all__ = [
    "RowLayout",
    "Sampled",
    "SamplerRows",
    "TokenLogprobs",
    "blank",
    "create",
    "gather",
    "is_over",
    "pack_row",
    "prompt_logprobs",
    "sample",
    "seed_words",
    "set_rows",
    "token_logprobs",
    "wants_prompt_logprobs",
]
