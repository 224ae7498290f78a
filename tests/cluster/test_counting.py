"""Counting collectives and their bytes, whoever issues them: exact, on two ranks."""

from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fxtrain import ops
from fxtrain.testing import count_collectives


def _found(traffic):
    assert list(traffic.bytes) == list(traffic.counts)
    return {kind: (n, traffic.bytes[kind]) for kind, n in traffic.counts.items()}


def _ddp(ctx):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.Linear(512, 512, bias=False)
    )
    model = DistributedDataParallel(layers, bucket_cap_mb=1)
    found = []
    for _ in range(3):
        with count_collectives() as forward:
            loss = model(torch.randn(4, 512)).sum()
        with count_collectives() as backward:
            loss.backward()
        found.append((_found(forward), _found(backward)))
    return found


def test_ddp_is_counted_though_its_reducer_is_in_cpp(pair):
    mib = 1 << 20
    weights = 2 * mib + 2 * 512 * 4
    buffers = (2, 2 * 512 * 4 + 8)  # mean and variance travel together, the number of batches alone
    for steps in pair.run(_ddp):
        assert steps[2] == ({"broadcast": buffers}, {"all_reduce": (2, weights)})
        assert [backward["all_reduce"][1] for _, backward in steps] == [weights] * 3


def _compressed(ctx):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(nn.Linear(8, 4))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with count_collectives() as traffic:
        with model.no_sync():
            model(torch.ones(2, 8)).sum().backward()
        model(torch.ones(2, 8)).sum().backward()
    return _found(traffic)


def test_a_hook_of_ddp_is_counted_at_the_size_that_it_sends(pair):
    assert pair.run(_compressed) == [{"all_reduce": (1, 2 * (8 * 4 + 4))}] * 2


def _fsdp(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9))
    fully_shard(model[0])
    fully_shard(model)
    with count_collectives() as forward:
        loss = model(torch.randn(4, 8)).sum()
    with count_collectives() as backward:
        loss.backward()
    with count_collectives() as clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    with count_collectives() as whole:
        model[0].weight.full_tensor()
    return [_found(traffic) for traffic in (forward, backward, clip, whole)]


def test_fsdp2_is_counted_with_its_padding(pair):
    inner, outer = 4 * (8 * 8 + 8), 4 * (10 * 8 + 10)  # nine rows are padded to ten
    for forward, backward, clip, whole in pair.run(_fsdp):
        assert forward == {"all_gather": (2, (inner + outer) // 2)}
        # The root stays gathered from forward to backward.
        assert backward == {"all_gather": (1, inner // 2), "reduce_scatter": (2, inner + outer)}
        # The norms of four parameters; torch 2.9 adds those of a layer first.
        assert clip in ({"all_reduce": (1, 4 * 4)}, {"all_reduce": (2, 2 * 4)})
        assert whole == {"all_gather": (1, 4 * 8 * 8 // 2)}


def _dtensor(ctx):
    mesh = DeviceMesh("cpu", torch.arange(2))
    rows = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    with count_collectives() as gathered:
        rows.redistribute(mesh, [Replicate()]).to_local() + 1
    with count_collectives() as summed:
        rows.sum().full_tensor()
    return [_found(gathered), _found(summed)]


def test_dtensor_is_counted(pair):
    assert pair.run(_dtensor) == [[{"all_gather": (1, 48)}, {"all_reduce": (1, 4)}]] * 2


def _compiled(ctx):
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(x):
        return all_reduce(x, "sum", group) + 1, reduce_scatter_tensor(x, "sum", 0, group)

    before = _counted(lambda: both(torch.ones(6)))  # also in the call that compiles
    return [before, _counted(lambda: both(torch.ones(6)))]


def _counted(call):
    with count_collectives() as traffic:
        call()
    return _found(traffic)


def test_functional_collectives_are_counted_in_compiled_code(pair):
    found = {"all_reduce": (1, 24), "reduce_scatter": (1, 24)}
    assert pair.run(_compiled) == [[found, found]] * 2


def _raw(ctx, name):
    x, two, peer = torch.ones(3), [torch.ones(3), torch.ones(3)], 1 - ctx.rank
    root = ctx.rank == 0

    def exchange():
        p2p = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.ones(3), peer)]
        for work in dist.batch_isend_irecv(p2p):
            work.wait()

    def coalesced():
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(two[0])
            dist.all_reduce(two[1])
        manager.wait()

    def objects():
        dist.all_gather_object([None, None], "a")

    calls = {
        "all_gather": lambda: dist.all_gather(two, x),
        "all_reduce": lambda: dist.all_reduce(x.to(torch.bfloat16)),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
        "async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(x, 0),
        "coalesced": coalesced,
        "exchange": exchange,
        "gather": lambda: dist.gather(x, two if root else None),
        "objects": objects,
        "reduce": lambda: dist.reduce(x, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(x, two),
        "scatter": lambda: dist.scatter(x, two if root else None),
        "send": lambda: dist.send(x, 1) if root else dist.recv(x, 0),
    }
    return _counted(calls[name])


RAW = {
    "all_gather": {"all_gather": (1, 12)},
    "all_reduce": {"all_reduce": (1, 6)},
    "all_to_all": {"all_to_all": (1, 16)},
    "async": {"all_reduce": (1, 12)},
    "barrier": {"barrier": (1, 0)},
    "broadcast": {"broadcast": (1, 12)},
    "coalesced": {"all_reduce": (1, 24)},
    "exchange": {"send": (1, 12), "recv": (1, 12)},
    "gather": {"gather": (1, 12)},
    "reduce": {"reduce": (1, 12)},
    "reduce_scatter": {"reduce_scatter": (1, 24)},
}


@pytest.mark.parametrize("name", sorted(RAW))
def test_calls_of_torch_are_counted(pair, name):
    assert pair.run(_raw, name) == [RAW[name]] * 2


def test_calls_in_which_ranks_differ_are_counted_as_each_takes_part(pair):
    assert pair.run(_raw, "send") == [{"send": (1, 12)}, {"recv": (1, 12)}]
    assert pair.run(_raw, "scatter") == [{"scatter": (1, 24)}, {"scatter": (1, 0)}]
    for found in pair.run(_raw, "objects"):
        assert found["all_gather"][0] == 2


def _mine(ctx):
    x = torch.ones(9000)
    calls = (ops.gather, ops.reduce, ops.broadcast)
    return [_counted(partial(call, x, ctx)) for call in calls]


def test_the_bytes_of_ops_are_a_packet_and_the_tree(pair):
    packet, tree = {"send": (1, 8192), "recv": (1, 8192)}, (1, 36000)
    for gather, reduce, broadcast in pair.run(_mine):
        assert gather == packet | {"all_gather": tree}
        assert reduce == packet | {"all_reduce": tree}
        assert broadcast == packet | {"broadcast": tree}


def _outside(ctx):
    with count_collectives() as first:
        dist.all_reduce(torch.ones(1))
        with count_collectives() as second:
            dist.barrier()
    dist.all_reduce(torch.ones(1))
    return first.counts, second.counts, [call.operator for call in first.calls]


def test_a_block_counts_what_is_in_it_and_in_blocks_within(pair):
    operators = ["c10d::allreduce_", "c10d::barrier"]
    for first, second, found in pair.run(_outside):
        assert (first, second) == ({"all_reduce": 1, "barrier": 1}, {"barrier": 1})
        assert found == operators
