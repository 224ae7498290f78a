"""The context with a mesh that a pool's ranks opened last, for the next call with that mesh."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from fxtrain import ops
from fxtrain.state import CommState, DistContext, Mesh

__all__ = ["groups_of", "on_mesh"]

_last: WeakKeyDictionary[CommState, tuple[Mesh, DistContext]] = WeakKeyDictionary()


@contextmanager
def on_mesh(ctx: Any, mesh: Mesh | None) -> Iterator[DistContext]:
    """A context of the same ranks with a mesh.

    The last one stays open for the next block with the same mesh, and so do torch's caches for
    it. After an error it is closed.
    """
    if mesh is None:
        yield ctx
        return
    state = ctx.comm.state
    last, placed = _last.pop(state, (None, None))
    if placed is None or last != mesh or not _works(placed):
        if placed is not None:  # its groups cost time while they are open
            placed.comm.finish(None)
        kind, wait_s = ctx.device.type, ctx.comm.timeout_s
        placed = ops.detect({}, device=kind, mesh=mesh, timeout_s=wait_s)
    with ExitStack() as closing:
        closing.enter_context(placed)
        yield placed
        closing.pop_all()
    _last[state] = (mesh, placed)


def groups_of(ctx: DistContext) -> list[Any]:
    """Process groups that a context opened, and those of its last mesh."""
    state = ctx.comm.state
    _, placed = _last.get(state, (None, None))
    return state.opened_groups + (placed.comm.state.opened_groups if placed else [])


def _works(placed: DistContext) -> bool:
    state = placed.comm.state
    return not any(one.closed or one.failure for one in (state, *state.children))
