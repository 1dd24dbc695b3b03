"""The engine on the GPU kernels, in JAX's interpreter of them."""

import pytest

from jpaged import LLM, SamplingParams
from tests.marks import needs_mosaic
from tests.scripts.running import GOLDEN


@needs_mosaic
@pytest.mark.one_python
@pytest.mark.every_setting
def test_tokens_are_those_of_xla():
    found = []
    for backend in ("xla", "gpu_interpret"):
        sizes = {"num_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 64, "decode_steps": 2}
        llm = LLM(GOLDEN / "tiny" / "llama", dtype="bfloat16", backend=backend, **sizes)
        outputs = llm.generate([[1, 2, 3, 4, 5], [7, 8, 9] * 9], SamplingParams(temperature=0, max_tokens=6))
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
