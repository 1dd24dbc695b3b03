"""Which backend attends where: by platform, JAX and cache; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jpaged.attention import ORDERS, paged_attention, resolve_backend
from jpaged.backends import backend_for, best_for
from jpaged.cache import HEADS, WORDS, KVLayout, create
from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.attention import Memory
from pallas_kernels.gpu.chips import GPUS

needs_mosaic = pytest.mark.skipif(mosaic.lacks() is not None, reason=str(mosaic.lacks()))
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
    [(16, 80, "bfloat16", "try block_size=32"), (8, 96, "bfloat16", "try block_size=16"), (64, 80, "int8", "bfloat16")],
)
def test_blocks_that_cannot_be_shared_out_to_copies(block_size, head_dim, dtype, way_out):
    memory = Memory(8, 2, head_dim, block_size, dtype)
    assert not memory.faults() and not memory.uncopied(GPUS["H200"])
    (fault,) = memory.uncopied(GPUS["A100"])
    assert way_out in fault and "A100" in fault


def test_every_backend_has_an_order():
    assert ORDERS["gpu"] == ORDERS["gpu_interpret"] == HEADS
