"""decode.py on the TPU kernels, in JAX's interpreter of them."""

import json
from pathlib import Path

import pytest

from tests.models_tiny import golden
from tests.scripts.running import TINY, Script

MOST = 4  # tokens: an interpreted step takes a tenth of a second


@pytest.mark.one_python
def test_a_golden_model_gives_equal_tokens(tmp_path: Path):
    cases = golden("llama", "golden_float32")[:2]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": case["prompt"]}) + "\n" for case in cases))
    done = Script("decode.py", {}).run(
        *TINY,
        "--backend=tpu_interpret",
        f"--prompts_file={prompts}",
        f"--max_tokens={MOST}",
        "--ignore_eos",
        "--json",
    )
    assert done.status == 0, done.err
    found = [json.loads(line)["token_ids"] for line in done.out.splitlines()]
    assert found == [case["greedy"][:MOST] for case in cases]
