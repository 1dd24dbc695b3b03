"""The tests of the GPU kernels, tested: each planted fault must be seen by a batch of those that they are made of."""

import jax
import numpy as np
import pytest

from pallas_kernels.gpu import chips
from pallas_kernels.gpu.tiling import Tiling
from tests.attention.gpu_mutants import MUTANTS
from tests.attention.kernel_mutants import Mutant
from tests.attention.test_gpu_kernels import (
    check,
    check_bounds,
    check_waits,
    list_orders,
    make,
    races_are_errors,  # noqa: F401 (a fixture)
    test_an_infinite_sink_leaves_nothing,
    test_every_number_of_eight_bits,
    test_nan_before_the_window_is_nobodys,
    test_padding_gives_zeros_whatever_the_scales,
    test_rows_that_contradict_themselves_give_zeros,
    tree_of,
)
from tests.marks import needs_mosaic

pytestmark = [
    pytest.mark.every_setting,  # minutes, for what changes only with the kernels
    pytest.mark.one_python,
    needs_mosaic,
]

WHOLE, CUT = Tiling(32, 2), Tiling(32, 2, 3)


def attend(batch: str) -> None:
    few = {"heads": (2, 4), "head_dim": 64}
    match batch:
        case "decode":
            check(make([1, 1], [70, 7], **few), max_q_len=1, tiling=WHOLE)
        case "long":
            check(make([1, 1], [250, 97], **few), max_q_len=1, tiling=CUT)
        case "short":
            check(make([1, 0], [20, 0], **few), max_q_len=1, tiling=CUT)
        case "bounds":
            with pytest.MonkeyPatch.context() as patch:
                check_bounds(chips.GPUS["A100"], list_orders(patch))
        case "waits":
            for chunks in (1, 3, 6):
                with pytest.MonkeyPatch.context() as patch:
                    check_waits(3, chunks, list_orders(patch))
        case "before":
            test_nan_before_the_window_is_nobodys(1, WHOLE)
        case "unsound":
            test_rows_that_contradict_themselves_give_zeros(4)
        case "window":
            check(make([1, 1], [80, 65], **few), max_q_len=1, tiling=WHOLE, sliding_window=33)
        case "cap":
            check(make([1], [40], **few), max_q_len=1, tiling=WHOLE, soft_cap=2.0)
        case "a large cap":
            check(make([1], [40], **few), max_q_len=1, tiling=WHOLE, soft_cap=1e6)
        case "an infinite sink":
            test_an_infinite_sink_leaves_nothing(WHOLE)
        case "large values":
            test_padding_gives_zeros_whatever_the_scales(CUT)
        case "sinks":
            check(make([1, 1], [20, 9], **few), max_q_len=1, tiling=WHOLE, sinks=np.linspace(-1, 1, 8))
        case "few":
            check(make([3, 8], [74, 33], **few), max_q_len=8, tiling=WHOLE)
        case "a tree" | "trees":
            window = {"sliding_window": 2} if batch == "trees" else {}
            tree, few = tree_of([8, 2], 8, "any"), {"heads": (1, 16), "head_dim": 64}
            check(make([8, 2], [37, 20], **few), max_q_len=8, tree=tree, tiling=WHOLE, **window)
        case "mixed":
            check(make([20, 9, 1], [43, 50, 20], **few), tiling=WHOLE)
        case "together":
            check(make([20, 9], [90, 50], **few), tiling=Tiling(64, 2))
        case "eighths":
            test_every_number_of_eight_bits("float8_e4m3fn", "bfloat16", chips.GPUS["A100"])


@pytest.fixture(autouse=True)
def traced_anew():
    jax.clear_caches()
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
