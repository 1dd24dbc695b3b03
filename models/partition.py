"""How a model's weights are split over the ranks of a mesh axis, by their names: Megatron's way (arXiv 1909.08053).

Matrices that heads or the inner width come out of are split by their outputs, the matrices after them by their inputs,
so that a layer needs two sums over the ranks and, unless there are fewer KV heads than ranks, nothing else. What no
rule names is held by every rank.
"""

from __future__ import annotations

from jax.sharding import PartitionSpec

# The end of a parameter's name → the axes to split, the first that the ranks divide; of layers that are stacked.
RULES: dict[str, tuple[int, ...]] = {
    "embed.weight": (0,),
    "lm_head.weight": (0,),
    "attn.qkv.weight": (1, 2),  # by KV heads, or, with fewer of them than ranks, within each
    "attn.qkv.bias": (1, 2),
    "attn.out.weight": (2,),
    "mlp.gate_up.weight": (2,),
    "mlp.gate_up.bias": (2,),
    "mlp.down.weight": (2,),
}


def of(name: str, shape: tuple[int, ...], *, axis: str, num_ranks: int) -> PartitionSpec:
    """The split of a parameter; none where the ranks divide no axis that its rule names, such as an odd vocabulary's.

    Args:
      name: Dotted, as in a checkpoint: "layers.attn.qkv.weight".
      shape: Its shape.
      axis: Of the mesh.
      num_ranks: Devices along it.
    """
    for end, choices in RULES.items():
        if name == end or name.endswith(f".{end}"):
            for at in choices:
                if shape[at] % num_ranks == 0:
                    return PartitionSpec(*[None] * at, axis)
    return PartitionSpec()
