"""`fit` under strategies beyond DDP and FSDP: the hand-written loop, and a run in two pieces."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh, token_rows
from fxtrain.trackers import read_run
from tests._slow import slow_after
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP

CASES = {
    "LocalSGD": (None, {"local": fx.LocalSGD(every=3)}),
    "TP": (fx.Mesh(tensor=2), {"strategy": fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))}),
    "CP": (fx.Mesh(context=2), {"context": fx.CP()}),
    "PP": (fx.Mesh(pipeline=2), {"strategy": fx.PP()}),
}


def _loss(model, batch):
    tokens, targets = batch.data
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _made(ctx, options):
    plan = fx.Plan(**options, seed=3)
    net = Transformer(dtype=torch.float64)
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
    tokens, _ = token_rows(24)
    rows = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = fx.shard(DataLoader(rows, batch_size=4), ctx, plan)
    return model, fx.StepFns(model=model, loss=_loss), loader


def _weights(model):
    return {name: value.tolist() for name, value in fx.weights(model, device="cpu")}


def _trained(ctx, mesh, options, folder, stop):
    """Weights after two epochs: by hand without a folder, else by `fit`, stopped once."""
    with on_mesh(ctx, mesh) as placed:
        model, fns, loader = _made(placed, options)
        if folder is None:
            for epoch in loader.epochs(2):
                for batch in epoch:
                    fx.step(placed, batch, fns)
            return _weights(model)
        for end in (stop, None):
            model, fns, loader = _made(placed, options)
            how = {"epochs": 2, "updates": end, "log_every": 2, "show": False}
            list(fx.fit(placed, fns, loader, folder, **how))
        return _weights(model)


@pytest.mark.parametrize(
    "name",
    slow_after(1, [pytest.param(name, marks=PIPELINES if name == "PP" else ()) for name in CASES]),
)
def test_a_run_in_two_pieces_is_the_hand_written_loop(pair, tmp_path, name):
    mesh, options = CASES[name]
    wanted = pair.run(_trained, mesh, options, None, None)
    assert pair.run(_trained, mesh, options, str(tmp_path), 3) == wanted
    steps = [step for step, _ in read_run(tmp_path).curve("loss")]
    assert steps == sorted({*range(2, steps[-1] + 1, 2), 3, steps[-1] // 2, steps[-1]})
