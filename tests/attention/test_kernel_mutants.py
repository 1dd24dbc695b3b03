"""The tests of the TPU kernels, tested: each planted fault must be seen by a batch of those that they are made of."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.tpu import chips
from tests.attention.kernel_mutants import MUTANTS, Mutant
from tests.attention.test_tpu_kernels import (
    check,
    check_nan_stays,
    check_turns,
    make,
    races_are_errors,  # noqa: F401 (a fixture)
    test_every_number_of_eight_bits,
)

# Minutes, for what changes only with what faults are planted in.
pytestmark = [pytest.mark.every_setting, pytest.mark.one_python]


def attend(batch: str) -> None:
    few = {"heads": (1, 4), "head_dim": 128}
    match batch:
        case "decode":
            check(make([1, 1, 1], [131, 300, 7], **few), max_q_len=1)
        case "read":
            check(make([1, 1], [131, 7], **few), max_q_len=1, writes=False)
        case "borders":
            check(make([1, 1], [129, 257], **few), max_q_len=1)
        case "window":
            check(make([1, 1], [193, 300], **few), max_q_len=1, sliding_window=33)
        case "sinks":
            check(make([1, 1], [20, 9], **few), max_q_len=1, sinks=np.linspace(-1, 1, 4))
        case "few":
            check(make([3, 8], [74, 131], **few), max_q_len=8)
        case "turns":
            check_turns()
        case "f32":
            check(make([1, 1], [131, 7], **few), max_q_len=1, sm_scale=0.5)
        case "nan":
            check_nan_stays(1)
        case "tree":
            tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
            check(make([3], [40], **few), max_q_len=3, tree=tree)
        case "prefill":
            check(make([40, 9, 128], [43, 150, 200], **few))
        case "eighths":
            test_every_number_of_eight_bits("float8_e4m3fn")
            scales = [[0.02], [0.03]]
            check(make([1, 1], [130, 40], dtype="float8_e4m3fn", block_size=32, **few), max_q_len=1, scales=scales)


@pytest.fixture(autouse=True)
def no_conversion(monkeypatch):
    by_hand = dataclasses.replace(chips.INTERPRETED, converts=False)
    monkeypatch.setattr("pallas_kernels.tpu.attention.INTERPRETED", by_hand)
    jax.clear_caches()  # a function that was changed is traced anew
    yield
    jax.clear_caches()


@pytest.mark.parametrize("batch", sorted({mutant.batch for mutant in MUTANTS}))
def test_without_a_fault_all_is_well(batch):
    attend(batch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_fault_is_seen(mutant: Mutant, monkeypatch):
    mutant.plant(monkeypatch)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        attend(mutant.batch)
