"""How large the engine's arrays are where the caller left it open, and what is refused."""

import os

import pytest

from jpaged import sizing
from jpaged.config import EngineConfig
from jpaged.model import ModelSpec

SPEC = ModelSpec("toy", num_layers=2, num_heads=3, num_kv_heads=3, head_dim=8, vocab_size=100, max_model_len=1000)
BLOCK_BYTES = 2 * 2 * 3 * 8 * 16 * 4  # layers, keys and values, heads, width, tokens, bytes


def resolve(**settings) -> sizing.ResolvedConfig:
    return sizing.resolve(SPEC, EngineConfig(dtype="float32", block_size=16, **settings))


def test_the_pool_holds_every_slot_at_full_length_if_there_is_room():
    assert resolve(max_num_seqs=4).num_blocks == 4 * 63  # ceil(1000 / 16)
    assert resolve(max_num_seqs=4, max_model_len=32).num_blocks == 4 * 2
    assert resolve(kv_cache_memory=10 * BLOCK_BYTES + 1).num_blocks == 10
    assert resolve(num_blocks=7).num_blocks == 7


def test_everything_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"max_model_len=1001 .*1000.*room for none"):
        resolve(max_model_len=1001, kv_cache_memory=BLOCK_BYTES - 1)


def test_a_pool_that_the_machine_cannot_hold_is_refused_with_the_numbers():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = memory // BLOCK_BYTES
    assert resolve(num_blocks=most).num_blocks == most
    with pytest.raises(
        ValueError, match=rf"{most + 1:,} KV blocks of {BLOCK_BYTES:,} bytes .* there are {memory:,}; try"
    ):
        resolve(num_blocks=most + 1)
