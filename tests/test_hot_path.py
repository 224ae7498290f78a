"""What `fx.step` adds to a loop written by hand, in Python calls: exact, whatever the machine."""

import gc
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

LIMIT = 20  # of Python functions entered
X, Y = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)


def _net():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def _calls(run):
    """Names of the Python functions entered, in the second of two runs."""
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    run()
    gc.collect()
    gc.disable()  # what other tests left would be finalized, and counted, here
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names


def _by_hand(clip_norm):
    model = _net()
    optimizer = _sgd(model.parameters())

    def run():
        F.cross_entropy(model(X), Y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return run


def _with_step(plan):
    ctx = fx.detect(env={}, device="cpu")
    fns = fx.StepFns(model=fx.wrap(_net(), ctx, plan, optimizer=_sgd), loss=_loss)
    batch = next(iter(fx.shard(DataLoader(TensorDataset(X, Y), batch_size=4), ctx, plan)))
    return lambda: fx.step(ctx, batch, fns)


def _with_update(plan):
    ctx = fx.detect(env={}, device="cpu")
    model = fx.wrap(_net(), ctx, plan, optimizer=_sgd)
    batch = next(iter(fx.shard(DataLoader(TensorDataset(X, Y), batch_size=4), ctx, plan)))
    return lambda: fx.update(ctx, batch, model, _loss(model, batch))


def test_an_update_adds_few_python_calls():
    ours, theirs = (_calls(make) for make in (_with_update(fx.Plan()), _by_hand(None)))
    assert 0 < len(ours) - len(theirs) <= 34, [name for name in ours if "fxtrain" in name]


def test_a_step_adds_few_python_calls():
    for plan in (fx.Plan(clip_norm=1.0), fx.Plan(), fx.Plan(strategy=fx.Single(), clip_norm=1.0)):
        ours = _calls(_with_step(plan))
        added = len(ours) - len(_calls(_by_hand(plan.clip_norm)))
        assert 0 < added <= LIMIT, [name for name in ours if "fxtrain" in name]
