"""The axes along which ranks are laid out, and their sizes."""

import itertools
import math
import re
from collections.abc import Mapping

import attrs

from fxtrain._record import closest, record
from fxtrain.errors import MeshError

# Outermost first: neighboring ranks, whose links are fastest, share the innermost axis.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
# Those over which ranks read different rows, and over which a loss is summed; and each alone.
SPANS: Mapping[str, tuple[str, ...]] = {
    "data": ("replicate", "shard"),
    "loss": ("replicate", "shard", "context"),
    **{axis: (axis,) for axis in AXES},
}


@record
class Mesh:
    """Ranks per axis; one axis may be -1, for all remaining ranks.

    Data is split over replicate × shard only; the ranks of the other axes read the same rows.
    """

    replicate: int = -1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}


def resolve_mesh(mesh: Mesh, world_size: int) -> Mesh:
    """Replace -1 by the remaining ranks of the world; a MeshError if sizes do not fit it."""
    open_axes = [axis for axis, size in mesh.sizes.items() if size == -1]
    fixed = math.prod(size for size in mesh.sizes.values() if size != -1)
    bad = {axis: size for axis, size in mesh.sizes.items() if size < 1 and size != -1}
    shown = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size != 1)
    if bad or len(open_axes) > 1:
        raise MeshError(
            f"Mesh({shown}): every axis needs a positive number of ranks, and at most one may be "
            f"-1 for all remaining ranks."
        )
    if open_axes and world_size % fixed == 0:
        return attrs.evolve(mesh, **{open_axes[0]: world_size // fixed})
    if fixed != world_size:
        raise MeshError(
            f"Mesh({shown}) describes {'a multiple of ' * bool(open_axes)}{fixed} ranks, but "
            f"this run has {world_size}. Launch another number of ranks, or set one axis to -1."
        )
    return mesh


def agreed_mesh(mesh: Mesh | None, planned: Mesh | None, size: int) -> Mesh | None:
    """The mesh of the script and of the launch's plan, which must agree; None if both are open."""
    shapes = {resolve_mesh(shape, size) for shape in (mesh, planned) if shape is not None}
    if len(shapes) == 2:
        raise MeshError(
            f"fx.detect(mesh={mesh}) and the launch's plan, which has mesh={planned}, lay out the "
            f"{size} ranks differently. Remove one of the two."
        )
    return planned if mesh is None else mesh


def read_mesh(text: str) -> Mesh:
    """A mesh from text, as in `fxtrain launch --mesh`.

    Example:
        >>> read_mesh("shard=8,tensor=2") == Mesh(shard=8, tensor=2)
        True
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES or axis in sizes or not re.fullmatch(r"-?[0-9]{1,9}", size):
            hint = "" if axis in AXES else closest(axis, AXES)
            raise MeshError(
                f"{text!r} is not a mesh: {part.strip()!r} should be axis=size, with one of "
                f"{', '.join(AXES)}, each once; for example shard=8,tensor=2.{hint}"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)


def axis_groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Partition the ranks of a resolved mesh into groups that differ only in some axes.

    Example:
        >>> axis_groups(Mesh(replicate=2, tensor=2), ("tensor",))
        [[0, 1], [2, 3]]
        >>> axis_groups(Mesh(replicate=2, tensor=2), ("replicate", "shard"))
        [[0, 2], [1, 3]]
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*(range(size) for size in mesh.sizes.values()))
    for rank, place in enumerate(places):
        fixed = tuple(index for axis, index in zip(AXES, place, strict=True) if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())
