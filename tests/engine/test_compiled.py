"""What the compiled steps are: little memory beside the cache, and one size whatever the number of layers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jpaged import LLM
from models import stacks
from models.llama import Llama
from tests.engine.test_golden_smollm2 import loaded
from tests.models_tiny import tiny

GIB = 1 << 30


@pytest.mark.usefixtures("no_executable_cache")
@pytest.mark.xdist_group("smollm2")
def test_a_decode_step_needs_little_beside_the_cache():
    """16 slots, tables for 8,192 tokens and 1 GiB of KV: at most a twentieth of that, logits and sampling included."""
    llm = LLM(
        loaded(), dtype="float32", max_model_len=8192, max_num_seqs=16, num_blocks=GIB // (30 * 2 * 3 * 64 * 4 * 16)
    )
    engine = llm.engine
    assert 0.99 * GIB < engine.state.cache.data.nbytes <= GIB
    assert engine.state.paged.tables_SM.shape == (16, 8192 // 16)
    shape = engine.packer.shape(16, 0, beams=False)
    compiled = engine.steps.decode.lower(
        engine.loaded.weights, engine.state, engine.packer.blank(shape)[0], shape=shape
    ).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 0.05 * GIB
    assert memory.alias_size_in_bytes >= engine.state.cache.data.nbytes  # the cache is updated in place


@pytest.mark.parametrize("form", ["stacked", "separate"])
def test_layers_do_not_add_to_what_is_compiled(form: str):
    """Twice the layers are the same program: with separate matrices, but for the branches that choose one."""
    loaded_tiny = tiny("llama")

    def program(num_layers: int) -> str:
        model = Llama(dataclasses.replace(loaded_tiny.config, num_layers=num_layers))
        weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), model.abstract_weights())
        if form == "separate":
            weights["layers"] = stacks.unstack(weights["layers"])
        llm = LLM(loaded_tiny._replace(model=model, weights=weights), dtype="float32", max_num_seqs=2, num_blocks=64)
        engine, shape = llm.engine, llm.engine.packer.shape(2, 16, beams=False)
        return engine.steps.prefill.lower(
            engine.loaded.weights, engine.state, engine.packer.blank(shape)[0], shape=shape
        ).as_text()

    few, many = program(6), program(12)
    products = {"stacked": 0, "separate": 4 * 6}[form]
    assert many.count("stablehlo.dot_general") - few.count("stablehlo.dot_general") == products
    assert many.count("\n") - few.count("\n") <= 12 * products
