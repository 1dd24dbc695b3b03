"""Work that each rank of a mesh axis does on its own heads.

It knows meshes and specs, and not what is computed. The mesh is the one in use (`jax.set_mesh`), so that no function
needs to be handed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh


def mesh_with(axis: str, num_ranks: int) -> AbstractMesh:
    """The mesh in use, for tracers as for arrays.

    Raises:
      ValueError: it has no such axis, or one of another size.
    """
    mesh = jax.sharding.get_abstract_mesh()
    size = dict(mesh.shape).get(axis)
    if size != num_ranks:
        there = ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items()) or "no axes"
        raise ValueError(
            f"{axis=} must be an axis of {num_ranks} devices of the mesh in use, which has {there}; "
            f"try `with jax.set_mesh(jax.make_mesh(({num_ranks},), ({axis!r},), axis_types=(AxisType.Auto,)))`"
        )
    return mesh


def on_each_rank(
    call: Callable[..., Any], *, axis: str, num_ranks: int, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``call``, run by every rank on its parts of the arguments.

    Raises:
      ValueError: see `mesh_with`.
    """
    mesh = mesh_with(axis, num_ranks)
    # Kernels do not say how their results vary over the mesh, so that is not checked.
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False)
