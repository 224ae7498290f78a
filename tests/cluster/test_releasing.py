"""Freed memory of models and optimizers, and what they are afterwards."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.backends.core.optimizers import local_optimizer
from tests._errors import raises_code

WIDTH = 16


def _trained(ctx, plan, width=WIDTH):
    net = nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width))
    model = fx.wrap(net, ctx, plan, optimizer=torch.optim.Adam)
    loader = fx.shard(DataLoader(torch.ones(4, width), batch_size=2), ctx, plan)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    for batch in loader:
        fx.step(ctx, batch, fns)
    return model


def test_weights_and_states_are_freed():
    with fx.detect(env={}, device="cpu") as ctx:
        model = _trained(ctx, fx.Plan())
        optimizer, net = model.optimizer, model.module
        weight = net[0].weight
        states = list(optimizer.state[weight].values())
        assert len(states) == 3
        held = [weakref.ref(tensor) for tensor in (weight, *states)]
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in (weight, *states)]
        del weight, states
        gc.disable()
        try:
            before, after = fx.release(model)
        finally:
            gc.enable()
        assert not any(tensor() is not None for tensor in held)
        assert all(storage.expired() for storage in memory)
        assert before.now > 0 and after.now > 0
        assert {one.device.type for one in net.state_dict().values()} == {"meta"}
        with raises_code("FX500", "fx.release"):
            model(torch.ones(2, WIDTH))
        assert all(memory.now > 0 for memory in (*fx.release(model), *fx.release()))


def test_tied_weights_stay_tied_and_other_references_live():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net[1].weight = net[0].weight
    mine = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mine.sum().backward()
    optimizer.step()
    fx.release(optimizer)
    assert mine.grad is None and not optimizer.state and not optimizer.param_groups[0]["params"]
    assert net[0].weight is mine
    fx.release(net)
    assert net[0].weight is net[1].weight and net[0].weight.is_meta
    assert mine.tolist()  # a variable of the caller


def _on_ranks(ctx, plan):
    model = _trained(ctx, plan, width=8)
    states = [
        weakref.ref(value)
        for one in model.optimizers
        for state in local_optimizer(one).state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    assert states
    fx.release(model)
    held = weakref.ref(model.module)
    alive = sum(one() is not None for one in states)
    del model
    fx.release()
    return alive, held() is None


@pytest.mark.parametrize(
    "strategy", [fx.DDP(), fx.DDP(shard_optimizer=True), fx.FSDP(min_params=1)]
)
def test_optimizer_states_are_freed_under_every_strategy(pair, strategy):
    assert pair.run(_on_ranks, fx.Plan(strategy=strategy)) == [(0, True)] * 2


@pytest.mark.parametrize("wrong", [torch.ones(2), [nn.Linear(1, 1)], None])
def test_other_objects_are_refused_before_anything_is_freed(wrong):
    net = nn.Linear(1, 1)
    with raises_code("FX200", "release"):
        fx.release(net, wrong)
    assert not net.weight.is_meta


def test_memory_in_the_heap_is_returned_too():
    with fx.detect(env={}, device="cpu") as ctx:
        kept, freed = [], [torch.ones(1 << 16) for _ in range(400)]  # 100 MB
        before = fx.meters.memory(ctx).now
        while freed:
            freed.pop()
            kept.append(torch.ones(16))  # between them, so that the heap does not shrink by itself
        assert before - fx.release()[1].now > 80_000_000
