"""One layer's weights out of all layers': the same numbers from a stack and from separate matrices, and no copies."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models import stacks
from tests.models_tiny import stack

LAYERS, WIDTH = 5, 96


def stacked() -> dict:
    matrices = np.random.default_rng(0).normal(size=(LAYERS, 2, WIDTH // 2, WIDTH)).astype(np.float32)
    return {"weight": jnp.asarray(matrices), "bias": jnp.arange(LAYERS * WIDTH, dtype=jnp.float32).reshape(LAYERS, -1)}


def run(layers: dict, x_TI: jax.Array) -> jax.Array:
    def body(x_TI, index):
        one = stacks.layer(layers, index)
        y_TO = stacks.multiply(x_TI, one["weight"]).reshape(x_TI.shape)
        return jnp.tanh(y_TO + one["bias"][None]), None

    return lax.scan(body, x_TI, jnp.arange(LAYERS, dtype=jnp.int32))[0]


def run_apart(layers: tuple, x_TI: jax.Array) -> jax.Array:
    for one in layers:
        x_TI = jnp.tanh(stacks.multiply(x_TI, one["weight"]).reshape(x_TI.shape) + one["bias"][None])
    return x_TI


def by_hand(layers: dict, x: np.ndarray) -> np.ndarray:
    for weight, bias in zip(np.asarray(layers["weight"], np.float64), np.asarray(layers["bias"]), strict=True):
        x = np.tanh(x @ weight.reshape(WIDTH, WIDTH).T + bias)
    return x


def test_a_choice_and_a_slice_are_the_same_layer():
    layers, x = stacked(), jnp.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    for form in (layers, stacks.unstack(layers)):
        np.testing.assert_allclose(jax.jit(run)(form, x), by_hand(layers, np.asarray(x)), atol=1e-4)
    found = jax.jit(run_apart)(stacks.apart(stacked()), x)
    np.testing.assert_allclose(found, by_hand(layers, np.asarray(x)), atol=1e-4)


def test_layers_apart_take_the_place_of_their_stacks():
    layers = stacked()
    weight, before = layers["weight"], np.asarray(layers["weight"]).copy()
    cut = stacks.apart(layers)
    assert weight.is_deleted() and layers["bias"].is_deleted()
    assert len(cut) == LAYERS and all(one["weight"].sharding == weight.sharding for one in cut)
    np.testing.assert_array_equal(np.stack([one["weight"] for one in cut]), before)


def test_a_product_has_the_outputs_shape_and_the_dtype_asked_for():
    halves = stacks.unstack({"weight": stacked()["weight"].astype(jnp.bfloat16)})
    out = stacks.multiply(jnp.ones((3, WIDTH), jnp.bfloat16), stacks.layer(halves, jnp.int32(LAYERS - 1))["weight"])
    assert (out.shape, out.dtype) == ((3, 2, WIDTH // 2), jnp.bfloat16)
    assert stacks.multiply(jnp.ones((3, WIDTH)), stacked()["weight"][0], "float32").dtype == jnp.float32


def test_unstacked_matrices_are_the_stacks_own_memory_and_vectors_stay():
    layers = stacked()
    cut = stacks.unstack(layers)
    start = layers["weight"].unsafe_buffer_pointer()
    each = layers["weight"].nbytes // LAYERS
    assert [matrix.unsafe_buffer_pointer() - start for matrix in cut["weight"].of_layer] == [
        each * index for index in range(LAYERS)
    ]
    assert cut["bias"] is layers["bias"]
    np.testing.assert_array_equal(stack(cut)["weight"], layers["weight"])


def test_no_layer_is_copied_on_a_cpu(no_executable_cache: None):
    layers, x = stacks.unstack(stacked()), jnp.ones((1, WIDTH))
    compiled = jax.jit(run).lower(layers, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < layers["weight"].of_layer[0].nbytes
