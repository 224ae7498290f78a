"""Name the mesh axes of a process group by its ranks."""

import itertools
from collections.abc import Callable

from fxtrain.profiling.dispatched_traffic import Collective
from fxtrain.state import AXES, Mesh, axis_groups

_OWN_MESH = "mesh_"


def axis_namer(mesh: Mesh, rank: int) -> Callable[[Collective], str]:
    """A function that maps a collective to the mesh axis along which it runs.

    Args:
        mesh: The resolved mesh.
        rank: A rank that takes part in every collective.

    Example:
        >>> name = axis_namer(Mesh(replicate=2, shard=2, tensor=2), 0)
        >>> for ranks in (0, 1), (0, 2), (0, 2, 4, 6), (0, 3):
        ...     print(name(Collective("all_reduce", ranks, "", 4)))
        tensor
        shard
        data
        2 ranks
    """
    real = [axis for axis in AXES if mesh.sizes[axis] > 1]
    names: dict[tuple[int, ...], str] = {}
    for count in range(1, len(real) + 1):
        for axes in itertools.combinations(real, count):
            (own,) = (group for group in axis_groups(mesh, axes) if rank in group)
            name = "data" if axes == ("replicate", "shard") else " + ".join(axes)
            names.setdefault(tuple(own), "world" if axes == tuple(real) and count > 1 else name)

    def name_of(call: Collective) -> str:
        if call.ranks in names:
            return names[call.ranks]
        # A DeviceMesh of the script.
        axis = call.label.startswith(_OWN_MESH) and call.label[len(_OWN_MESH) :]
        return axis or f"{len(call.ranks)} ranks"

    return name_of
