"""What runs on the ranks of DeepSpeed tests."""

import functools
import warnings

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx


def on_rank(fn):
    """Let pass what DeepSpeed's own calls of torch warn about; everything else stays an error."""

    @functools.wraps(fn)
    def quiet(ctx, *args):
        warnings.filterwarnings(
            "ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning
        )
        return fn(ctx, *args)

    return quiet


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def grouped(params):
    """Adam over two groups, as of those who decay some parameters only."""
    groups = [{"params": params[:3], "weight_decay": 0.0}, {"params": params[3:]}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2))


def rows(n=30):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def mean(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def weighted(model, batch):
    losses = F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")
    weights = (1.0 + batch[1]) * batch.valid
    return fx.Weighted((losses * weights).sum(), weights.sum())


def train(ctx, plan, optimizer=sgd, loss=mean, epochs=2, size=4, scheduler=None, n=30):
    model = fx.wrap(net(), ctx, plan, optimizer=optimizer, scheduler=scheduler)
    loader = fx.shard(DataLoader(rows(n), batch_size=size), ctx, plan)
    fns = fx.StepFns(model=model, loss=loss)
    reports = [fx.step(ctx, batch, fns) for epoch in loader.epochs(epochs) for batch in epoch]
    return model, reports


def whole_state(ctx, model):
    """The tensors and values of a model's state, put together from what each rank has of it."""
    state = model.strategy.state(model)
    tensors = {str(key): tensor for key, tensor in state.tensors.items()}
    found = {n: t.detach().clone() for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    mine = {n: (t.start, t.values) for n, t in tensors.items() if n not in found}
    held = fx.ops.gather_objects(mine, ctx)
    for name in mine:
        parts = sorted((one[name] for one in held), key=lambda part: part[0])
        whole = torch.cat([values for _, values in parts if len(values)])
        found[name] = whole.view(tensors[name].shape)
    return found, state.values


def values(model):
    """Whole parameters in full precision; ends the engine."""
    return [parameter.detach().clone() for parameter in fx.unwrap(model).parameters()]


@on_rank
def outcome(ctx, plan, optimizer=sgd, loss=mean, size=4, n=30):
    """Losses over all ranks, norms, which micro-batches updated, the parameters at the end."""
    model, reports = train(ctx, plan, optimizer, loss, size=size, n=n)
    losses = [float(fx.ops.reduce(report.loss.float(), ctx)) for report in reports]
    norms = [None if r.grad_norm is None else float(r.grad_norm) for r in reports]
    return losses, norms, [bool(r.applied) for r in reports], values(model)


@on_rank
def _call(ctx, fn, *args):
    return fn(ctx, *args)


@attrs.frozen
class Ranks:
    """A pool that lets DeepSpeed's own warnings pass."""

    pool: object

    @property
    def n(self):
        return self.pool.n

    def run(self, fn, *args):
        return self.pool.run(_call, fn, *args)
