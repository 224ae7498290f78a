"""`fx.update`: the loss is computed by the loop itself, and everything else is as in `fx.step`."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.errors import StepError
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._both_ways import Case, both_ways, check_equal
from tests.cluster._models import PIPELINES

CUTS = (
    fx.Style(modules="blocks.*.attention.[qkv]", style="colwise"),
    fx.Style(modules="blocks.*.attention.o", style="rowwise"),
)
# Beside those of `property_tests/test_update.py`.
STRATEGIES = {
    "fp16 messages": (2, fx.Plan(strategy=fx.DDP(hook=fx.CommHook(name="fp16"))), None),
    "ignored": (2, fx.Plan(strategy=fx.FSDP(ignore=("gain",))), None),
    "tensor": (2, fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=CUTS))), fx.Mesh(tensor=2)),
    "context": (2, fx.Plan(context=fx.CP(tables=("position",))), fx.Mesh(context=2)),
    "local sgd": (2, fx.Plan(local=fx.LocalSGD(every=2)), None),
    "diloco": (2, fx.Plan(local=fx.DiLoCo(every=2)), None),
    "four replicas": (4, fx.Plan(), None),
}


@pytest.mark.parametrize("name", slow_after(1, STRATEGIES))
@pytest.mark.parametrize("way", slow_after(1, ["update", "parts in blocks"]))
def test_every_way_is_a_step_in_every_bit(clusters, name, way):
    n, plan, mesh = STRATEGIES[name]
    accumulated = attrs.evolve(plan, accumulate=3, clip_norm=0.1, precision="bf16")
    weighted = Case(rows=7 * n, weighted=True)
    check_equal(clusters[n].run(both_ways, accumulated, weighted, mesh, way))
    check_equal(clusters[n].run(both_ways, plan, Case(rows=5 * n), mesh, way))


@pytest.mark.parametrize("way", slow_after(1, ["update", "parts", "parts in blocks"]))
def test_rows_that_are_placeholders_reach_no_buffer(pair, way):
    plan = fx.Plan(even="uneven", local=fx.LocalSGD(every=2))  # whose ranks keep their own buffers
    case = Case(rows=13, size=3, stream=True)
    check_equal(pair.run(both_ways, plan, case, None, way))


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(4, 2)


def _table(n=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


SGD = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731


def _wrapped(ctx, plan, net=None, size=2):
    model = fx.wrap(_net() if net is None else net, ctx, plan, optimizer=SGD)
    return model, fx.shard(DataLoader(_table(), batch_size=size), ctx, plan)


class _Outputs:
    """A model's outputs in an object of which nobody knows what it holds."""

    def __init__(self, logits):
        self.logits = logits


class _Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _net()

    def forward(self, x):
        return _Outputs(self.inner(x))


def _gradients(ctx, how):
    """The gradient that each micro-batch of a window leaves on this rank."""
    plan = fx.Plan(accumulate=2)
    if how == "unused":
        plan = fx.Plan(accumulate=2, strategy=fx.DDP(unused_parameters=True))
    model, loader = _wrapped(ctx, plan, _Opaque() if how == "opaque" else None)
    left = []
    for batch in loader:
        if how == "inside":
            logits = model.module(batch[0])
        elif how == "opaque":
            logits = model(batch[0]).logits
        else:
            logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        if how == "alone":
            loss.backward()
        elif how == "by hand":
            with fx.ops.sync(model, enabled=batch.position.micro == 0):
                fx.ops.backward(loss, model)
        else:
            # An update drops gradients; of a due one, weights tell whether they were reduced.
            fx.update(ctx, batch, model, loss)
        (weight, _) = model.parameters()
        left.append((weight.detach() if weight.grad is None else weight.grad).clone())
    return left


@pytest.mark.parametrize("how", ["model", "unused", "inside", "by hand"])
def test_replicas_reduce_gradients_where_an_update_is_due_and_only_there(pair, how):
    (first, second), (other_first, other_second) = pair.run(_gradients, how)
    assert not torch.equal(first, other_first)
    assert torch.equal(second, other_second)


@pytest.mark.parametrize("how", ["alone", "opaque"])
def test_replicas_reduce_gradients_of_a_backward_that_nobody_announces(pair, how):
    (first, second), (other_first, other_second) = pair.run(_gradients, how)
    assert torch.equal(first, other_first) and torch.equal(second, other_second)


def _losses_first(ctx):
    """Both losses of two models, and then both updates."""
    plan = fx.Plan()
    maker, loader = _wrapped(ctx, plan, nn.Linear(4, 4))
    judge, _ = _wrapped(ctx, plan)
    for batch in loader:
        made = maker(batch[0])
        of_judge = F.cross_entropy(judge(made.detach()), batch[1])
        of_maker = -F.cross_entropy(judge(made), batch[1])
        fx.update(ctx, batch, maker, of_maker)
        fx.update(ctx, batch, judge, of_judge)
    return [p.detach() for model in (maker, judge) for p in model.parameters()]


def test_replicas_of_two_models_stay_equal_whichever_loss_comes_first(pair):
    one, other = pair.run(_losses_first)
    assert all(map(torch.equal, one, other))


def _pipeline(ctx):
    mesh = fx.Mesh(pipeline=2)
    with fx.detect({}, device="cpu", mesh=mesh, timeout_s=ctx.comm.timeout_s) as placed:
        plan = fx.Plan(strategy=fx.PP(split=("1",)))
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model, loader = _wrapped(placed, plan, net, size=4)
        batch = next(iter(loader))
        try:
            fx.update(placed, batch, model, F.cross_entropy(model(batch[0]), batch[1]))
        except StepError as error:
            return str(error)
        return None


@PIPELINES
def test_a_pipeline_says_why_it_cannot(pair):
    for words in pair.run(_pipeline):
        assert "fx.update cannot take a loss computed before. Train with fx.step" in words


def _refused(ctx, words, *args):
    with pytest.raises(StepError, match=words):
        fx.update(ctx, *args)


def test_what_is_refused(ctx):
    model, loader = _wrapped(ctx, fx.Plan())
    batch = next(iter(loader))
    loss = F.cross_entropy(model(batch[0]), batch[1])
    _refused(ctx, "update takes a Batch, found Wrapped", model, batch, loss)
    _refused(ctx, "update takes a wrapped model, found Linear", batch, model.module, loss)
    _refused(ctx, r"found list\. .* or fx\.batch\(data", batch.data, model, loss)
    _refused(ctx, "The loss is a function", batch, model, lambda: loss)
    _refused(ctx, r"has shape \[2, 2\]", batch, model, model(batch[0]))
    with torch.no_grad():
        _refused(ctx, "does not require grad", batch, model, model(batch[0]).sum())
    bare = fx.wrap(_net(), ctx)
    _refused(ctx, "^update: this model has no optimizer", batch, bare, bare(batch[0]).sum())
    fx.update(ctx, batch, model, loss)
    _refused(ctx, "backward has already run on this loss", batch, model, loss)
    fx.unwrap(model)
    _refused(ctx, "^update: this model was unwrapped", batch, model, loss)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_loss_outside_of_autocast_is_refused_with_the_lines_that_do_it(ctx, compute):
    model, loader = _wrapped(ctx, fx.Plan(precision=compute))
    batch = next(iter(loader))
    with raises_code("FX502", "fx.ops.autocast(model)"):
        fx.update(ctx, batch, model, F.cross_entropy(model(batch[0]), batch[1]))
    total = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    with raises_code("FX502", f"precision='{compute}'"):
        fx.update(ctx, batch, model, fx.Weighted(total, len(batch[1])))
    assert fx.update(ctx, batch, model, F.cross_entropy(model(batch[0]).float(), batch[1]))


def _with_own_calls(ctx, call):
    """Train under a scheduler that the loop advances as well; the error on this rank."""
    plan = fx.Plan(accumulate=2)
    net = _net()
    optimizer = SGD(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model = fx.wrap(net, ctx, plan, optimizer=optimizer, scheduler=scheduler)
    loader = fx.shard(DataLoader(_table(), batch_size=1), ctx, plan)
    try:
        for epoch in loader.epochs(2):
            for inputs, targets in epoch:
                fx.update(ctx, epoch.batch, model, F.cross_entropy(model(inputs), targets))
                if call == "each update" and epoch.batch.position.micro == 0:
                    scheduler.step()
            if call == "each epoch":
                scheduler.step()
            if call == "restored":
                scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 0})
    except StepError as error:
        return str(error)
    return scheduler.last_epoch


@pytest.mark.parametrize(
    ("call", "update"), [("each update", 1), ("each epoch", 2), ("none", None), ("restored", None)]
)
def test_a_scheduler_that_the_loop_advances_too_is_an_error_on_every_rank(pair, call, update):
    first, second = pair.run(_with_own_calls, call)
    assert first == second
    if update is None:
        assert first == (4 if call == "none" else 0)
    else:
        assert first.startswith(f"The loop called ExponentialLR.step() after update {update}, and")
