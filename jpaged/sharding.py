"""Work that each rank of a mesh axis does on its own heads.

It knows meshes and specs, and not what is computed. The mesh is the one in use (`jax.set_mesh`), so that no function
needs to be handed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType


def mesh_with(axis: str, num_ranks: int) -> AbstractMesh:
    """The mesh in use, for tracers as for arrays.

    Raises:
      ValueError: it has no such axis, or one of another size, or axes of which JAX wants to be told each array's.
    """
    mesh = jax.sharding.get_abstract_mesh()
    size, faults = dict(mesh.shape).get(axis), []
    if size != num_ranks:
        there = ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items()) or "no axes"
        faults.append(f"{axis=} must be an axis of {num_ranks} devices of the mesh in use, which has {there}")
    explicit = [name for name, kind in _kinds(mesh) if kind == AxisType.Explicit]
    if explicit:
        faults.append(f"the mesh's axis {explicit[0]!r} is explicit, and must be automatic")
    if faults:
        other = f"num_ranks={size}, or " if size else ""
        raise ValueError(
            f"{'; '.join(faults)}; try {other}`with jax.set_mesh(jax.make_mesh(({num_ranks},), ({axis!r},), "
            "axis_types=(jax.sharding.AxisType.Auto,)))`"
        )
    return mesh


def _kinds(mesh: AbstractMesh) -> list[tuple[str, AxisType]]:
    return list(zip(mesh.axis_names, mesh.axis_types, strict=True))


def on_each_rank(
    call: Callable[..., Any], *, axis: str, num_ranks: int, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``call``, run by every rank on its parts of the arguments; along other axes of the mesh all do the same.

    Raises:
      ValueError: see `mesh_with`.
    """
    mesh = mesh_with(axis, num_ranks)
    # Of every axis that is not split by hand already: a TPU kernel cannot be left to XLA along any.
    names = {name for name, kind in _kinds(mesh) if kind != AxisType.Manual}
    # Kernels do not say how their results vary over the mesh, so that is not checked.
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)
