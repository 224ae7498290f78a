"""Dry runs over an axis of many ranks, which cost no more than over few."""

import functools

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param

import fxtrain as fx
from fxtrain.ops.splitting import chunk_of
from fxtrain.profiling.rehearsal import lazy_chunks
from fxtrain.profiling.watching import MemoryLog
from tests.profiling._loops import by_steps, net

_WORLD = 1024
_PLAN = fx.Plan(strategy=fx.FSDP(wrap=("Linear",)))


def _parts(kind, shard):
    """Bytes that one rank has of the parameters of modules of a kind, with their padding."""
    return sum(
        -(-len(p) // shard) * p[0].numel() * 4
        for module in net()
        if isinstance(module, kind)
        for p in module.parameters()
    )


@pytest.mark.slow
def test_work_does_not_grow_with_the_shard_axis(monkeypatch):
    made = []
    see = MemoryLog.see

    def counted(log, tensor):
        made[-1] += 1
        return see(log, tensor)

    monkeypatch.setattr(MemoryLog, "see", counted)
    for shard in (8, _WORLD):
        made.append(0)
        mesh = fx.Mesh(replicate=-1, shard=shard)
        run = fx.dry_run(functools.partial(by_steps, plan=_PLAN), world=_WORLD, mesh=mesh)
        blocks, rest = _parts(nn.Linear, shard), _parts(nn.BatchNorm1d, shard)
        buffers = sum(buffer.nbytes for buffer in net().buffers())
        (running,) = [row for row in run.step if row.kind == "broadcast"]
        assert (running.count, running.bytes) == (2, buffers)  # one for each dtype
        sent = {
            row.kind: (row.count, row.bytes)
            for row in run.step
            if row.axis == "shard" and row is not running
        }
        assert sent == {
            # Blocks are gathered again in backward.
            "all_gather": (3 + 3 + 1, 2 * blocks + rest),
            "reduce_scatter": (3 + 1, shard * (blocks + rest)),
        }
        assert run.memory.gradients == run.memory.parameters == blocks + rest
    few, many = made
    assert many < 1.1 * few


@pytest.mark.parametrize("n", [1, 3, 8, 16])
@pytest.mark.parametrize("rows", [1, 7, 8, 9])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_chunk_is_that_of_torch(rows, n, dim):
    shape = (rows, 2) if dim == 0 else (2, rows)
    whole = torch.arange(rows * 2).view(shape)
    expected = _fsdp_param._chunk_with_empty(whole, n, dim)
    with lazy_chunks():
        late = _fsdp_param._chunk_with_empty(whole, n, dim)
    for index, chunk in enumerate(expected):
        for found in (late[index], chunk_of(whole, n, dim, index)):
            assert found.tolist() == chunk.tolist() or found.numel() == chunk.numel() == 0
            assert found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.slow
def test_optimizers_are_shared_out_over_64_ranks():
    """Whole parameters are dealt out, so the last ranks get none."""
    plan = fx.Plan(strategy=fx.DDP(shard_optimizer=True), clip_norm=1.0)
    held = []
    for rank in (0, 63):
        run = fx.dry_run(functools.partial(by_steps, plan=plan), world=64, rank=rank)
        assert run.problems == () and run.updates >= 2
        held.append(run.memory.optimizer)
    largest = 4 * 50 * 70
    assert held[1] == 0 and 2 * largest <= held[0] < 2.1 * largest


@pytest.mark.slow
def test_copies_of_8_of_64_ranks_train_alone():
    plan = attrs.evolve(_PLAN, local=fx.DiLoCo(every=1000))
    run = fx.dry_run(
        functools.partial(by_steps, plan=plan), world=64, rank=63, mesh=fx.Mesh(shard=8)
    )
    assert run.problems == ()
    assert {row.axis for row in run.step} == {"shard"}
