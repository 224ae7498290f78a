"""Training runs that tests of checkpoints stop, save and go on with."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx

KINDS = ("plain", "weighted", "two optimizers", "fp16", "bf16", "scheduled", "compressed")


class Noisy(Dataset):
    """Rows with random augmentation from all three generators."""

    def __init__(self, n=40):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.rand(6) * random.random() * 0.1
        return {"x": self.x[index] + noise, "y": (self.x[index].sum() > 0).long(), "i": index}


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Tanh(), nn.Linear(8, 2)
        )


def _mean(model, batch):
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def _weighted(model, batch):
    losses = F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="none")
    weights = (1 + batch["i"] % 3) * batch.valid
    return fx.Weighted((losses * weights).sum(), weights.sum())


def _two(params):
    half = len(params) // 2
    return {
        "a": torch.optim.AdamW(params[:half], lr=0.01),
        "b": torch.optim.SGD(params[half:], lr=0.05, momentum=0.9),
    }


def plan_of(kind, accumulate, strategy=None, **more):
    precision = kind if kind in ("fp16", "bf16") else "fp32"
    if precision == "fp16":  # scales that overflow now and then
        precision = fx.Precision(compute="fp16", scale=fx.LossScale(initial=2.0**20, interval=2))
    if kind == "compressed":
        strategy = fx.DDP(hook=fx.CommHook(name="power_sgd", power_sgd=fx.PowerSGD(start_iter=2)))
    return fx.Plan(
        strategy=strategy or fx.DDP(),
        precision=precision,
        accumulate=accumulate,
        clip_norm=1.0,
        seed=11,
        **more,
    )


def start(ctx, kind, plan):
    model = fx.wrap(
        net(),
        ctx,
        plan,
        optimizer=_two if kind == "two optimizers" else lambda p: torch.optim.AdamW(p, lr=0.01),
        scheduler=(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=200))
        if kind == "scheduled"
        else None,
    )
    return model, fx.StepFns(model=model, loss=_weighted if kind == "weighted" else _mean)


def loader_of(ctx, plan, workers=0, size=4):
    loader = DataLoader(Noisy(), batch_size=size, shuffle=True, num_workers=workers, drop_last=True)
    return fx.shard(loader, ctx, plan)


def go_on(ctx, loader, fns, steps, epochs=9):
    """Train on so many micro-batches; the last report and the rows seen."""
    rows, report = [], None
    for epoch in loader.epochs(epochs):
        for batch in epoch:
            if not steps:
                return report, rows
            report = fx.step(ctx, batch, fns)
            rows += batch["i"][batch.valid].tolist()
            steps -= 1
    return report, rows


def bits(tensor):
    """What tells tensors apart to the bit: NaN, as of fp16 that overflows, equals itself."""
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return (tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).tolist() if len(flat) else [])


def leaves(model):
    """Everything that decides how a model goes on, as plain tensors."""
    state = model.strategy.state(model)
    found = {str(key): tensor.detach().clone() for key, tensor in state.tensors.items()}
    found |= {f"own {key}": tensor.detach().clone() for key, tensor in state.own.items()}
    found["torch"] = torch.get_rng_state()
    found["python"] = torch.tensor(hash(random.getstate()))
    return found, repr(state.values)
