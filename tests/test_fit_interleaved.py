"""Several runs in one process, advanced by turns, are those that were left alone."""

import gc
import random

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.trackers import read_run
from tests._slow import slow_after


def _start(ctx, folder, seed, accumulate):
    plan = fx.Plan(seed=seed, accumulate=accumulate)
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    data = torch.linspace(0, 1, 30).view(10, 3)
    loader = fx.shard(DataLoader(data, batch_size=2, shuffle=True), ctx, plan)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    return model, fx.fit(ctx, fns, loader, folder, updates=4, log_every=1, show=False)


def _leave(reports, way):
    """End a run early; the caller drops its name."""
    if way == "close":
        reports.close()
    elif way == "raise":
        with pytest.raises(KeyError), reports:
            raise KeyError("in the body")


@pytest.mark.parametrize("seed", slow_after(1, range(3)))
def test_interleaved_runs_are_those_left_alone(tmp_path, seed):
    rng = random.Random(seed)
    runs = [(rng.randrange(5), rng.choice([1, 2, 3])) for _ in range(rng.choice([2, 3]))]
    with fx.detect({}, device="cpu") as first, fx.detect({}, device="cpu") as second:
        alone = []
        for k, run in enumerate(runs):
            model, reports = _start(first, tmp_path / f"alone{k}", *run)
            list(reports)
            alone.append(model)
        contexts = [rng.choice([first, second]) for _ in runs]
        folders = [tmp_path / str(k) for k in range(len(runs))]
        models, opened = {}, {}
        live = list(range(len(runs)))
        while live:
            k = rng.choice(live)
            if k in opened and rng.random() < 0.15:
                _leave(opened.pop(k), rng.choice(["close", "raise", "drop"]))
                gc.collect()
            if k not in opened:
                models[k], opened[k] = _start(contexts[k], folders[k], *runs[k])
                if next(opened[k], None):
                    with pytest.raises(fx.PlanError, match="is in use by process"):
                        next(_start(contexts[k], folders[k], *runs[k])[1])
            elif next(opened[k], None) is None:
                live.remove(k)
    for k, model in enumerate(alone):
        assert read_run(folders[k]).curve("loss") == read_run(tmp_path / f"alone{k}").curve("loss")
        weights, expected = (fx.unwrap(one).state_dict() for one in (models[k], model))
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
