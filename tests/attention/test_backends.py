"""Which backend attends where: by platform, JAX and cache; and what is refused."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jpaged import backends, misfits
from jpaged.attention import ORDERS, paged_attention, resolve_backend
from jpaged.backends import backend_for, best_for, best_layout
from jpaged.cache import HEADS, WORDS, KVLayout, create
from pallas_kernels.gpu import chips, mosaic
from pallas_kernels.gpu.attention import Memory
from pallas_kernels.gpu.chips import GPUS
from tests.marks import needs_mosaic

SIZES = KVLayout(2, 8, 16, 2, 128, "bfloat16")


def on(kind, platform):
    """In this context JAX compiles for such a device."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform))
    return jax.sharding.use_abstract_mesh(mesh)


@needs_mosaic
@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_a_gpu_that_is_known_has_kernels(gpu):
    with on(gpu.kind, "cuda"):
        assert resolve_backend(None) == "gpu"
        assert best_for(None, SIZES) == "gpu"


@pytest.mark.parametrize(
    ("kind", "capability", "cores", "name"),
    [
        ("NVIDIA L4", "8.9", 58, "L40S"),
        ("NVIDIA GH200 480GB", "9.0", 132, "H100"),
        ("NVIDIA GB200", "10.0", 148, "B200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0", 16, "H100"),
        ("NVIDIA A100-PCIE-40GB", None, None, "A100"),
    ],
)
def test_a_gpu_is_what_its_capability_is(kind, capability, cores, name):
    gpu = chips.of(kind, capability, cores)
    assert gpu == dataclasses.replace(GPUS[name], kind=kind, cores=cores or GPUS[name].cores)


@pytest.mark.parametrize(
    ("kind", "capability"), [("NVIDIA A10G", "8.6"), ("NVIDIA RTX 6000", "12.0"), ("TPU v4", None)]
)
def test_a_gpu_of_another_capability_is_refused(kind, capability):
    with pytest.raises(ValueError, match=r"must be one of A100.*or alike; try backend='xla'"):
        chips.of(kind, capability, 80)


def test_who_attends_is_said_with_the_reason(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    backends._announce.cache_clear()
    with caplog.at_level(logging.INFO), on("NVIDIA A10G", "cuda"):
        best_layout(SIZES)
    assert "attention backend: xla, because device_kind='NVIDIA A10G' must be one of A100" in caplog.text
    caplog.clear()
    monkeypatch.setattr(mosaic, "OLDEST_JAX", (99, 0))
    with caplog.at_level(logging.INFO), on(GPUS["H200"].kind, "cuda"):
        best_layout(SIZES)
    assert "attention backend: xla, because jax" in caplog.text and "too little of Mosaic GPU" in caplog.text


@needs_mosaic
@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_a_layout_that_is_made_without_a_thought_is_served_everywhere(gpu):
    """As README has it, and with the dtype left out, which kernels for GPUs do not serve."""
    with on(gpu.kind, "cuda"):
        for sizes, order in ((SIZES, HEADS), (KVLayout(1, 6, 16, 2, 64), ORDERS["xla"])):
            layout = best_layout(sizes)
            assert layout.order == order and not backends.faults(layout)


def test_the_gpu_interpreter_knows_one_device():
    layout = dataclasses.replace(SIZES, order=HEADS, axis="heads", num_ranks=2)
    assert misfits.of_cache("gpu", layout) == []
    (fault,) = misfits.of_cache("gpu_interpret", layout)
    assert "num_ranks=2 must be 1 for backend='gpu_interpret'" in fault


def test_a_gpu_that_is_not_known_has_none():
    with on("NVIDIA GeForce GTX 1080", "cuda"):
        assert resolve_backend(None) == best_for(None, SIZES) == "xla"


@needs_mosaic
def test_what_kernels_cannot_have_goes_to_xla_unless_they_are_named(monkeypatch: pytest.MonkeyPatch):
    with on(GPUS["A100"].kind, "cuda"):
        for change in ({"dtype": "float32"}, {"block_size": 12}, {"head_dim": 80}):
            sizes = dataclasses.replace(SIZES, **change)
            assert best_for(None, sizes) == "xla"
            assert best_for("gpu", sizes) == "gpu"
        assert best_for(None, dataclasses.replace(SIZES, head_dim=80, block_size=32)) == "gpu"
    assert backend_for(None, SIZES) == "xla"


def test_old_jax_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mosaic, "OLDEST_JAX", (99, 0))
    reason = r"does not run here: jax .* has too little of Mosaic GPU; try jax 99.0 or newer.*or backend='xla'"
    with pytest.raises(ValueError, match=reason):
        resolve_backend("gpu_interpret", "cpu")
    with pytest.raises(ValueError, match=reason):  # whoever has no GPU either is told of the JAX first
        resolve_backend("gpu", "cpu")
    with on(GPUS["H100"].kind, "cuda"):
        with pytest.raises(ValueError, match=reason):
            resolve_backend("gpu")
        assert resolve_backend(None) == "xla"


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 12}, "block_size=12 must be a power of two from 8 to 256"),
        ({"block_size": 512}, "to 256"),
        ({"head_dim": 72}, "head_dim=72 must be a multiple of 16"),
        ({"dtype": "float32"}, "dtype='float32' must be one of bfloat16, float16"),
        ({"order": WORDS}, "layout.order='LNW' must be 'LNCKBD'"),
    ],
)
def test_what_the_gpu_kernels_do_not_serve(change, reason):
    layout = dataclasses.replace(SIZES, **{"order": HEADS, **change})
    q, rows = jnp.zeros((1, 2, layout.head_dim), "bfloat16"), jnp.zeros((1, 1), jnp.int32)
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=reason):
        paged_attention(
            q, None, None, create(layout), 0, rows, one, jnp.arange(2, dtype=jnp.int32), backend="gpu_interpret"
        )


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "way_out"),
    [
        (16, 80, "bfloat16", "try block_size=32"),
        (8, 96, "bfloat16", "try block_size=16"),
        (64, 80, "int8", "try dtype='bfloat16'"),
        (16, 80, "float8_e4m3fn", "try block_size=32 and dtype='bfloat16'"),
    ],
)
def test_blocks_that_cannot_be_shared_out_to_copies(block_size, head_dim, dtype, way_out):
    memory = Memory(8, 2, head_dim, block_size, dtype)
    assert not memory.faults() and not memory.uncopied(GPUS["H200"])
    (fault,) = memory.uncopied(GPUS["A100"])
    assert fault.endswith(way_out) and "A100" in fault
    served = [Memory(8, 2, head_dim, size, "bfloat16") for size in (32, 64)]
    assert not any(memory.uncopied(GPUS["A100"]) for memory in served)


def test_every_backend_has_an_order():
    assert ORDERS["gpu"] == ORDERS["gpu_interpret"] == HEADS
