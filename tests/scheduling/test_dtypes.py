"""The dtype that suits a CPU, by rule."""

import logging

import jax
import pytest

from jpaged import buckets, dtypes


@pytest.mark.parametrize(
    ("version", "unit", "dtype"),
    [
        ((0, 12, 0), "avx512_bf16", "bfloat16"),
        ((0, 12, 0), "amx_bf16", "bfloat16"),
        ((0, 12, 0), None, "float32"),
        ((0, 10, 2), "amx_bf16", "float32"),
    ],
)
def test_the_dtype_of_a_cpu_follows_its_instructions_and_the_log_says_so(version, unit, dtype, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(dtypes, "_bfloat16_unit", lambda: unit)
    with caplog.at_level(logging.INFO, "jpaged"):
        assert dtypes.resolve("auto") == dtype
    assert f"dtype: {dtype}, because" in caplog.text
    assert dtypes.resolve("float32") == "float32"


def test_bfloat16_on_a_cpu_never_takes_one_row(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert (dtypes.min_rows("float32"), dtypes.min_rows("bfloat16")) == (1, 2)
    assert buckets.make(16, 64, 2).rows == (2, 4, 8, 16)
    assert buckets.make(1, 64, 2).decode(1) == 2
    assert buckets.make(1, 64).rows == (1,)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert dtypes.min_rows("bfloat16") == 1
