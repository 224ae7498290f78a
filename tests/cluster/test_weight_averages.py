"""Averages of weights: torch's own, under every strategy, and in runs that resume."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.ops.whole_tensors import full_values
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import PIPELINES

DECAY = 0.8
RESIDENT = fx.state.Placement(units=(fx.state.Unit(name="", device="cpu"),))
PLANS = {
    "single": (1, fx.Plan()),
    "ddp": (2, fx.Plan(accumulate=2)),
    "fsdp": (2, fx.Plan(strategy=fx.FSDP(min_params=1), accumulate=2)),
    "fsdp, whole until backward": (
        2,
        fx.Plan(strategy=fx.FSDP(min_params=1, mode="grads_and_optimizer")),
    ),
}
TENSOR = fx.TP(
    styles=(fx.Style(modules="2", style="colwise"), fx.Style(modules="3", style="rowwise"))
)
ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(4, 1))
    net[2].bias.requires_grad_(False)
    return net.double()


def _adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def _loss(model, batch):
    return model(batch[0]).square().mean()


def _batches(loader):
    return (batch for epoch in loader.epochs(2) for batch in epoch)


def _made(ctx, plan, **how):
    model = fx.wrap(_net(), ctx, plan, optimizer=_adam)
    loader = fx.shard(DataLoader(TensorDataset(ROWS), batch_size=3, shuffle=True), ctx, plan)
    return model, fx.StepFns(model=model, loss=_loss), loader, fx.ema(model, decay=DECAY, **how)


def _values(model):
    return {name: value for name, value in fx.weights(model, device="cpu")}


def _averaged(average):
    with average.applied() as model:
        return _values(model)


def _on_tensor_mesh(ctx, plan):
    with on_mesh(ctx, fx.Mesh(tensor=2)) as placed:
        return _run(placed, plan)


def _run(ctx, plan):
    """What fx.ema has, what torch's functions make of each update's weights, and the model's."""
    model, fns, loader, average = _made(ctx, plan)
    names = [name for name, one in model.module.named_parameters() if one.requires_grad]
    lerp, theirs = get_ema_multi_avg_fn(DECAY), None
    for batch in _batches(loader):
        report = fx.step(ctx, batch, fns)
        average.update(report)
        if report.applied:
            found = [one for name, one in _values(model).items() if name in names]
            if theirs is None:
                theirs = found
            else:
                lerp(theirs, found, None)
    before, mine = _values(model), _averaged(average)
    with pytest.raises(KeyError), average.applied():
        with torch.no_grad():
            model.eval()(ROWS)
        raise KeyError
    return names, mine, dict(zip(names, theirs, strict=True)), before, _values(model)


@pytest.mark.parametrize("name", slow_after(3, PLANS))
def test_it_is_torchs_average_bit_for_bit(clusters, name):
    ranks, plan = PLANS[name]
    _check_run(clusters[ranks].run(_run, plan))


@pytest.mark.slow
def test_it_is_torchs_average_under_tensor_parallelism(pair):
    _check_run(pair.run(_on_tensor_mesh, fx.Plan(strategy=fx.FSDP(tensor=TENSOR, min_params=1))))


def _check_run(found):
    for names, mine, theirs, before, after in found:
        assert len(names) == 7
        for key, value in before.items():
            assert torch.equal(mine[key], theirs.get(key, value)), key
            assert torch.equal(after[key], value), key
        assert not any(torch.equal(mine[key], before[key]) for key in names)


# The averages of well-known code: how `fx.ema` is called for them, the average by their formula,
# and the decay of an update by theirs; None leaves the average as it is.
def _inverse(n):
    return 1 - (1 + n / 2.0) ** -0.75


LIBRARIES = {
    "DiT": (
        {"decay": 0.7, "start": "weights", "formula": "sum"},
        lambda a, p, decay: a.mul_(decay).add_(p, alpha=1 - decay),
        lambda n: 0.7,
    ),
    "diffusers": (
        {"decay": lambda n: min(0.7, _inverse(n)), "start": "weights", "formula": "difference"},
        lambda a, p, decay: a.sub_((1 - decay) * (a - p)),
        lambda n: min(0.7, _inverse(n)) if n else 0.0,
    ),
    "ema_pytorch": (
        {"decay": lambda n: min(0.7, _inverse(max(n - 2, 0))), "update_every": 2},
        lambda a, p, decay: a.copy_(p) if decay == 0.0 else a.lerp_(p, 1 - decay),
        lambda n: None if n % 2 else min(0.7, _inverse(n - 2)) if n > 2 else 0.0,
    ),
}


def _as_in(ctx, plan, name):
    how, average, decay_of = LIBRARIES[name]
    model = fx.wrap(_net().float(), ctx, plan, optimizer=_adam)
    loader = fx.shard(DataLoader(TensorDataset(ROWS.float()), batch_size=3), ctx, plan)
    mine, fns = fx.ema(model, **how), fx.StepFns(model=model, loss=_loss)
    trained = [key for key, one in model.module.named_parameters() if one.requires_grad]
    theirs, n = {key: _values(model)[key].clone() for key in trained}, 0
    for batch in _batches(loader):
        report = fx.step(ctx, batch, fns)
        mine.update(report)
        if report.applied:
            values, decay = _values(model), decay_of(n)
            for key in trained if decay is not None else ():
                average(theirs[key], values[key], decay)
            n += 1
    found = _averaged(mine)
    return n, mine.updates, [torch.equal(found[key], theirs[key]) for key in trained]


@pytest.mark.parametrize("name", slow_after(1, LIBRARIES))
@pytest.mark.parametrize("plan", ["single", "ddp", "fsdp"])
def test_it_is_the_average_of_other_code_bit_for_bit(clusters, plan, name):
    ranks, settings = PLANS[plan]
    for n, updates, equal in clusters[ranks].run(_as_in, settings, name):
        assert n == updates >= 4 and len(equal) == 7 and all(equal)


def _own(ctx, plan, folder, code, updates):
    model = fx.wrap(_net(), ctx, plan, optimizer=_adam)
    loader = fx.shard(DataLoader(TensorDataset(ROWS), batch_size=3, shuffle=True), ctx, plan)
    fns = fx.StepFns(model=model, loss=_loss)
    names = {"fx": fx, "torch": torch, "ctx": ctx, "model": model, "loader": loader, "fns": fns}
    for until in updates:
        exec(code.replace("runs/own", folder).replace("updates=4", f"updates={until}"), names)
    return {name: full_values(one).tolist() for name, one in names["mean"].items()}


@pytest.mark.parametrize("plan", slow_after(2, ["single", "ddp", "fsdp"]))
def test_the_average_of_the_docs_is_the_same_after_a_restart(clusters, tmp_path, plan):
    text = (Path(__file__).parents[2] / "docs" / "averages.md").read_text()
    code = text.split("## An average of your own")[1].split("```python\n")[1].split("```")[0]
    ranks, settings = PLANS[plan]
    found = [
        clusters[ranks].run(_own, settings, str(tmp_path / name), code, updates)
        for name, updates in (("whole", (4,)), ("parts", (2, 4)))
    ]
    assert found[0] == found[1] and found[0][0] == found[0][-1]


def test_it_is_an_averaged_model_in_one_process():
    net = _net()
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, optimizer=_adam)
        fns, average = fx.StepFns(model=model, loss=_loss), fx.ema(model, decay=DECAY)
        loader = fx.shard(DataLoader(TensorDataset(ROWS), batch_size=4), ctx)
        for batch in _batches(loader):
            average.update(fx.step(ctx, batch, fns))
            theirs.update_parameters(net)
        with average.applied():
            for mine, one in zip(net.parameters(), theirs.module.parameters(), strict=True):
                assert torch.equal(mine, one)


def _uninterrupted(ctx, plan):
    _, fns, loader, average = _made(ctx, plan, warmup=True)
    for batch in _batches(loader):
        average.update(fx.step(ctx, batch, fns))
    return _averaged(average), average.updates


def _interrupted(ctx, plan, folder):
    """The same, saved and restored into other objects."""
    model, fns, loader, average = _made(ctx, plan, warmup=True)
    for batch in itertools.islice(_batches(loader), 4):
        average.update(fx.step(ctx, batch, fns))
    fx.save(folder, ctx, model, position=batch.position, extra={"ema": average.state})
    model, fns, loader, average = _made(ctx, plan, warmup=True)
    restored = fx.restore(folder, ctx, model, extra={"ema": average.state})
    for batch in _batches(loader.at(restored.position)):
        average.update(fx.step(ctx, batch, fns))
    return _averaged(average), average.updates


@pytest.mark.parametrize("name", slow_after(2, ["single", "ddp", "fsdp"]))
def test_a_resumed_average_is_the_uninterrupted_one(clusters, name, tmp_path):
    ranks, plan = PLANS[name]
    wanted = clusters[ranks].run(_uninterrupted, plan)
    found = clusters[ranks].run(_interrupted, plan, str(tmp_path))
    for (mine, count), (theirs, updates) in zip(found, wanted, strict=True):
        assert count == updates >= 4
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def _restored(ctx, plan, folder):
    model, _, _, average = _made(ctx, plan)
    fx.restore(folder, ctx, model, extra={"ema": average.state})
    return _averaged(average)


def test_an_average_is_restored_under_another_strategy(clusters, pair, tmp_path):
    wanted = pair.run(_interrupted_only, PLANS["fsdp"][1], str(tmp_path))[0]
    (found,) = clusters[1].run(_restored, fx.Plan(), str(tmp_path))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def _interrupted_only(ctx, plan, folder):
    model, fns, loader, average = _made(ctx, plan)
    for batch in itertools.islice(_batches(loader), 4):
        average.update(fx.step(ctx, batch, fns))
    fx.save(folder, ctx, model, position=batch.position, extra={"ema": average.state})
    return _averaged(average)


def test_half_precision_is_averaged_in_fp32():
    with fx.detect(env={}, device="cpu") as ctx:
        net = nn.Linear(2, 1, bias=False).bfloat16()
        model = fx.wrap(net, ctx)
        average = fx.ema(model, decay=0.999)
        report = fx.Report(loss=torch.zeros(()), weight=1, applied=True, position=fx.Position())
        net.weight.data.fill_(1.0)
        average.update(report)
        net.weight.data.fill_(2.0)
        for _ in range(100):
            average.update(report)
        wanted = 2 - 0.999**100
        torch.testing.assert_close(
            average.state["weights"]["weight"], torch.full((1, 2), wanted), rtol=1e-5, atol=0
        )
        with average.applied():
            assert torch.equal(net.weight, torch.full((1, 2), wanted).bfloat16())


def test_warmup_and_skipped_updates():
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(2, 1), ctx)
        average = fx.ema(model, decay=0.99, warmup=True)
        assert [average.decay_of(n) for n in (0, 8, 10_000)] == [0.1, 0.5, 0.99]
        report = fx.Report(loss=torch.zeros(()), weight=1, applied=False, position=fx.Position())
        average.update(report)
        assert average.updates == 0


WRONG = [
    *(("decay", value) for value in (1.0, -0.1, "0.9", float("nan"))),
    *(("update_every", value) for value in (0, 1.5, True)),
    *(("start", "first"), ("formula", "mean")),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_arguments_are_named(name, value):
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(2, 1), ctx)
        with raises_code("FX200", f"{name}={value!r}"):
            fx.ema(model, **{name: value})


def test_a_function_that_gives_no_decay_is_named():
    report = fx.Report(loss=torch.zeros(()), weight=1, applied=True, position=fx.Position())
    with fx.detect(env={}, device="cpu") as ctx:
        average = fx.ema(fx.wrap(nn.Linear(2, 1), ctx), decay=lambda n: 1.5, start="weights")
        with raises_code("FX200", "1.5", "update 0"):
            average.update(report)
        assert average.updates == 0


def _refused(ctx, plan, mesh):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(net, placed, plan, optimizer=_adam)
        with pytest.raises(fx.PlanError) as error:
            fx.ema(model)
    return str(error.value)


REFUSED = [
    ("local=", fx.Plan(local=fx.LocalSGD(every=2)), None),
    ("Offload keeps", fx.Plan(strategy=fx.Offload(placement=RESIDENT)), None),
    pytest.param("PP keeps", fx.Plan(strategy=fx.PP()), fx.Mesh(pipeline=2), marks=PIPELINES),
]


@pytest.mark.parametrize(("words", "plan", "mesh"), REFUSED)
def test_values_in_other_places_are_refused(pair, words, plan, mesh):
    (text,) = set(pair.run(_refused, plan, mesh))
    assert words in text


def _fitted(ctx, plan, folder, stop):
    """A run of `fit` in two pieces."""
    for until in (stop, None):
        _, fns, loader, average = _made(ctx, plan)
        how = {"epochs": 2, "updates": until, "show": False, "extra": {"ema": average.state}}
        for report in fx.fit(ctx, fns, loader, folder, **how):
            average.update(report)
    return _averaged(average), average.updates


@pytest.mark.slow
def test_fit_saves_and_restores_it(pair, tmp_path):
    plan = fx.Plan(strategy=fx.FSDP(min_params=1))
    for stop in (3, 4):  # within an epoch, and at the end of one
        found = pair.run(_fitted, plan, str(tmp_path / str(stop)), stop)
        wanted = pair.run(_run, plan)
        for (mine, updates), (_, theirs, *_) in zip(found, wanted, strict=True):
            assert updates == 8
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)
