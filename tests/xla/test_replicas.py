"""Replicas by process: recorded calls, since processes on CPU devices never find each other."""

from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

import fxtrain as fx
from fxtrain.backends.xla import xla_runtime
from fxtrain.ops import opening
from fxtrain.ops.collectives import broadcast_piece, gather_piece
from fxtrain.state.topology import Topology

pytestmark = pytest.mark.xla

RANKS = 2


class _Two:
    """torch_xla's collectives as rank 1 of two sees them, where rank 0 holds one more."""

    def __init__(self):
        self.calls = []

    def all_gather(self, value, **options):
        self.calls.append(("all_gather", tuple(value.shape), options["groups"]))
        return torch.cat([value + 1, value])

    def all_reduce(self, kind, inputs, *, scale, **_):
        self.calls.append(("all_reduce", kind, len(inputs), scale))
        for tensor in inputs:
            tensor.copy_((2 * tensor + 1) * scale)

    def collective_broadcast(self, tensors, root, **_):
        self.calls.append(("broadcast", root))
        tensors[0].add_(1)


def _send(tensor, src, group):
    options = dist.BroadcastOptions()
    options.rootRank = src
    group.broadcast([tensor], options)


def _recorded(ctx):
    """On a rank of a pool, whose process has an XLA runtime."""
    model, backend = (
        xla_runtime.import_xla("core.xla_model"),
        xla_runtime.import_xla("distributed.xla_backend"),
    )
    two, group = _Two(), backend.ProcessGroupXla(None, 1, RANKS, None)
    x, n = torch.arange(3.0, device=ctx.device), torch.tensor(5, device=ctx.device)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_reduce", "collective_broadcast"):
            patch.setattr(model, name, getattr(two, name))
        # torch's own functions know only groups that it opened, which takes two processes.
        patch.setattr(dist, "get_global_rank", lambda group, rank: rank)
        patch.setattr(dist, "all_gather", lambda out, x, group: group.allgather([out], [x]))
        patch.setattr(dist, "broadcast", _send)
        rows = [gather_piece([v], RANKS, group).flatten() for v in (x, n)]
        sent = [broadcast_piece([v], 0, group, sends=False)[0] for v in (x, n)]
        grads = [x.clone(), x.clone() * 2]
        xla_runtime.mean(grads, RANKS)
        xla_runtime.register_subgroups(group, ctx.device, [[0, 1]])
        gather_piece([n], RANKS, group)
        return [[t.tolist() for t in found] for found in (rows, sent, grads)], two.calls


def test_collectives_of_values(alone):
    (((rows, sent, grads), calls),) = alone.run(_recorded)
    assert rows == [[1.0, 2.0, 3.0, 0.0, 1.0, 2.0], [6, 5]]
    assert sent == [[1.0, 2.0, 3.0], [6]]
    assert grads == [[0.5, 1.5, 2.5], [0.5, 2.5, 4.5]]
    assert calls == [
        *[("all_gather", (3,), []), ("all_gather", (1,), [])],
        *[("broadcast", 0), ("broadcast", 0)],
        ("all_reduce", "sum", 2, 0.5),
        ("all_gather", (1,), [[0, 1]]),
    ]


def _opened(ctx):
    """torch's groups as `detect` opens them for replicas, of one process."""
    wait = timedelta(seconds=20)
    rank = xla_runtime.replicate(Topology(), ctx.device)
    problem = ""
    try:
        xla_runtime.replicate(Topology(world_size=4), ctx.device)
    except fx.errors.ContextError as error:
        problem = str(error)
    opening.open_group(Topology(), ctx.device, dist.HashStore(), wait)
    try:
        # As `fx.detect`: torch_xla's own takes fewer arguments.
        control = dist.distributed_c10d.new_group(
            timeout=wait, backend="gloo", group_desc="control"
        )
        kinds = dist.get_backend(), dist.get_backend(control)
        x = torch.arange(2.0, device=ctx.device)
        rows = gather_piece([x], 1, dist.group.WORLD)
        return rank, kinds, rows[0].tolist(), problem
    finally:
        dist.destroy_process_group()


def test_torch_opens_the_groups_of_replicas(alone):
    ((rank, kinds, rows, problem),) = alone.run(_opened)
    assert (rank, kinds, rows) == (0, ("xla", "gloo"), [0.0, 1.0])
    assert "started 4 processes, but the XLA runtime has 1 devices" in problem
