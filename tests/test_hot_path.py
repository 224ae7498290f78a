"""What steps and loaders add to a loop by hand, in Python calls: exact, whatever the machine."""

import functools
import gc
import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

PACKAGE = str(Path(fx.__file__).parent)
LIMIT = 12  # of Python functions entered
FIT_LIMIT, LOADER_LIMIT = 9, 11  # the same, per step and per batch
SAVE_LIMIT = 19  # the same, of fxtrain itself, per tensor
X, Y = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)


def _net():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _adam(params):
    return torch.optim.AdamW(params, lr=0.1)


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
    assert theirs and len(ours) - len(theirs) <= 16, [name for name in ours if "fxtrain" in name]


def test_a_step_adds_few_python_calls():
    for plan in (fx.Plan(clip_norm=1.0), fx.Plan(), fx.Plan(strategy=fx.Single(), clip_norm=1.0)):
        ours, theirs = _calls(_with_step(plan)), _calls(_by_hand(plan.clip_norm))
        assert theirs and len(ours) - len(theirs) <= LIMIT, [
            name for name in ours if "fxtrain" in name
        ]


class _WithOwnZeroGrad(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):  # noqa: FBT002 - as torch has it
        self.zeroed = getattr(self, "zeroed", 0) + 1


def test_the_zero_grad_of_an_optimizer_that_has_its_own_is_called():
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(8, 1), ctx, optimizer=lambda p: _WithOwnZeroGrad(p, lr=0.1))
        fx.ops.backward(model(X).sum(), model)
        fx.ops.apply(model)
    assert model.optimizer.zeroed == 1
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_fit_adds_few_calls_to_a_loop_of_steps(tmp_path):
    net = nn.Linear(4, 1)
    rows = torch.randn(200, 4)
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, optimizer=_sgd)
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())

        def loop():
            for batch in fx.shard(DataLoader(rows, batch_size=2), ctx):
                yield fx.step(ctx, batch, fns)

        def fitted():
            loader = fx.shard(DataLoader(rows, batch_size=2), ctx)
            return fx.fit(
                ctx, fns, loader, tmp_path, epochs=1, to=(), show=False, save_epochs=False
            )

        counts = []
        for reports in (loop(), fitted()):
            counts.append(
                len(_calls(lambda reports=reports: next(itertools.islice(reports, 9, 10))))
            )
            reports.close()
    assert counts[1] - counts[0] <= FIT_LIMIT * 10


def test_a_loader_adds_few_calls_to_a_batch():
    data = TensorDataset(X.repeat(50, 1))
    with fx.detect({}, device="cpu") as ctx:
        loader = DataLoader(data, batch_size=2, shuffle=True)
        epochs = fx.shard(loader, ctx).epochs(9)
        counts = [
            # torch's own sampler is entered for every row
            sum("sampler.py" not in name for name in _calls(lambda run=run: sum(1 for _ in run())))
            for run in (lambda: loader, lambda: next(epochs))
        ]
    assert counts[1] - counts[0] <= LOADER_LIMIT * 100


def test_a_save_adds_few_calls_for_a_tensor(tmp_path):
    counts = []
    with fx.detect({}, device="cpu") as ctx:
        for depth in (2, 12):
            net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))
            model = fx.wrap(net, ctx, optimizer=_adam)
            with ops.sync(model):
                ops.backward(model(torch.ones(1, 2)).sum(), model)
            ops.apply(model)
            save = functools.partial(fx.save, tmp_path / str(depth), ctx, model)
            names = _calls(functools.partial(save, position=fx.Position(updates=1)))
            counts.append(sum(name.startswith(PACKAGE) for name in names))
    tensors = 10 * 2 * 4  # a weight and a bias in each layer, each with three states
    assert counts[1] - counts[0] <= SAVE_LIMIT * tensors
