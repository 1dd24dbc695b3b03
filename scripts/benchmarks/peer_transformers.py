"""transformers as a peer: a stand-alone program that `peers.Peer` talks to. It needs torch and transformers only.

Greedy, in static batches of equal size, prompts padded on the left, each batch until its longest is done.
"""

from __future__ import annotations

import json
import sys
import time


def serve(spec: dict, answer) -> None:
    import torch  # pyright: ignore[reportMissingImports] (a peer's environment has it)
    import transformers  # pyright: ignore[reportMissingImports] (a peer's environment has it)

    torch.set_num_threads(spec["threads"])
    dtype = getattr(torch, spec["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # nobody stops early

    def batch(prompts: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return out[:, longest:].tolist()

    def run() -> list[list[int]]:
        outputs = []
        for start in range(0, len(spec["prompts"]), spec["slots"]):
            new = spec["outputs"][start : start + spec["slots"]]
            made = batch(spec["prompts"][start : start + spec["slots"]], max(new))
            outputs += [tokens[:count] for tokens, count in zip(made, new, strict=True)]
        return outputs

    batch(spec["prompts"][: spec["slots"]], 4)
    attention = getattr(model.config, "_attn_implementation", None)
    name = f"transformers {transformers.__version__}, torch {torch.__version__}, {spec['dtype']}, {attention} attention"
    answer({"name": name, "details": torch.backends.cpu.get_cpu_capability()})
    while sys.stdin.readline():
        begin = time.perf_counter()
        outputs = run()
        answer({"seconds": time.perf_counter() - begin, "outputs": outputs})


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        wanted = json.load(file)
    channel, sys.stdout = sys.stdout, sys.stderr  # libraries print; the channel carries answers only
    serve(wanted, lambda message: print(json.dumps(message), file=channel, flush=True))
