"""Rows with functions of their own, given to wrap directly: which functions count, and when."""

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.backends import strategies
from fxtrain.state import UpdateSpec
from fxtrain.testing import Task, Transformer
from fxtrain.testing.training import backward_once, on_mesh
from tests._slow import slow_after

SINGLE, DDP, FSDP, PP, DEEPSPEED = (
    strategies()[kind] for kind in (fx.Single, fx.DDP, fx.FSDP, fx.PP, fx.DeepSpeed)
)


def _wrapped(ctx, row, plan):
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    return fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), strategy=row)


def _to(value):
    """A function on gradients that puts one value everywhere."""

    def change(model, *_):
        for parameter in model.module.parameters():
            parameter.grad.fill_(value)
        return torch.tensor(float(value))

    return change


@pytest.mark.parametrize(
    ("name", "finish"),
    [
        ("clip_value", UpdateSpec(clip_value=1.0)),
        ("clip_norm", UpdateSpec(clip_norm=1.0)),
        ("scale_grads", UpdateSpec(scale=0.5)),
    ],
)
def test_an_update_changes_gradients_by_the_rows_functions(name, finish):
    plan = fx.Plan(strategy=fx.Single())
    with fx.detect({}, device="cpu") as ctx:
        model = _wrapped(ctx, attrs.evolve(SINGLE, **{name: _to(3.0)}), plan)
        fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
        fx.ops.apply(model, finish)
        assert model.module.weight.tolist() == [[-3.0, -3.0]]


def test_a_row_with_another_wrap_keeps_its_own_functions():
    def wrap(row, module, *rest):
        return SINGLE.wrap(row, module, *rest)

    row = attrs.evolve(SINGLE, wrap=wrap, finite=lambda model: False)
    with fx.detect({}, device="cpu") as ctx:
        model = _wrapped(ctx, row, fx.Plan(strategy=fx.Single(), nonfinite="skip"))
        assert model.strategy is row
        loader = fx.shard(torch.utils.data.DataLoader(torch.ones(1, 2)), ctx, model.plan)
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        assert [fx.step(ctx, batch, fns).skipped for batch in loader] == [True]


@pytest.mark.parametrize(
    ("row", "plan", "words"),
    [
        (fx.FSDP(), fx.Plan(), r"found FSDP\..*fx\.Plan\(strategy=fx\.FSDP\(\)\)"),
        (FSDP, fx.Plan(), r"carries out a FSDP, but the plan has strategy=DDP"),
        (
            attrs.evolve(PP, backward=lambda *_: None),
            fx.Plan(strategy=fx.PP()),
            r"PP has its own backward, which would never be called.*'backward'.*`fused`",
        ),
        (
            attrs.evolve(DEEPSPEED, clip_norm=lambda *_: None),
            fx.Plan(strategy=fx.DeepSpeed()),
            r"DeepSpeed has its own clip_norm",
        ),
    ],
)
def test_a_row_that_could_not_be_used_is_refused(row, plan, words):
    with (
        fx.detect({}, device="cpu") as ctx,
        pytest.raises(fx.PlanError, match=words),
    ):
        fx.wrap(torch.nn.Linear(2, 1), ctx, plan, strategy=row)


def _one_passes_another_row(ctx):
    row = attrs.evolve(DDP, name="Mine") if ctx.rank else None
    try:
        fx.wrap(torch.nn.Linear(2, 1), ctx, strategy=row)
    except fx.CollectiveError as error:
        return str(error)
    return ""


def test_ranks_that_pass_different_rows_are_told(pair):
    for text in pair.run(_one_passes_another_row):
        assert "the ranks differ in strategy" in text and "Mine" in text


def _forgetful(ctx, names, folder):
    """What the law finds where `apply` calls functions of another row."""
    from fxtrain.testing import laws

    def apply(model, finish):
        others = {name: getattr(DDP, name) for name in names}
        row = attrs.evolve(model.strategy, **others)
        return DDP.apply(attrs.evolve(model, strategy=row), finish)

    plan = fx.Plan(accumulate=2, clip_norm=0.05, clip_value=0.004, nonfinite="skip")
    task = Task(plan=plan, weighted=True)
    real = laws.strategies
    laws.strategies = lambda: {fx.DDP: attrs.evolve(DDP, apply=apply)}
    try:
        return laws.unused_functions(ctx, task, folder)
    finally:
        laws.strategies = real


@pytest.mark.parametrize("names", slow_after(1, [["clip_value"], ["clip_norm", "scale_grads"]]))
def test_the_law_names_functions_that_apply_ignores(pair, tmp_path, names):
    assert pair.run(_forgetful, names, str(tmp_path)) == [names, names]


def _own_forward_and_backward(ctx, recompute):
    """Losses and gradients of a batch under a context axis, with a row's own functions and not."""
    called = []

    def forward(model, args, kwargs):
        called.append("forward")
        return DDP.forward(model, args, kwargs)

    def backward(loss, model):
        called.append("backward")
        DDP.backward(loss * 2, model)

    plan = fx.Plan(context=fx.CP(tables=("position",)), recompute=recompute)
    with on_mesh(ctx, fx.Mesh(context=2)) as placed:
        grads = []
        for row in (None, attrs.evolve(DDP, forward=forward, backward=backward)):
            model = fx.wrap(Transformer(), placed, plan, strategy=row)
            backward_once(placed, model)
            grads.append({n: p.grad.clone() for n, p in model.module.named_parameters()})
            fx.unwrap(model)
        return called, grads


@pytest.mark.parametrize("recompute", [(), ("Block",)])
def test_a_context_axis_keeps_a_rows_forward_and_backward(pair, recompute):
    for called, (plain, doubled) in pair.run(_own_forward_and_backward, recompute):
        assert called == ["forward", "backward"]
        for name, grad in plain.items():
            torch.testing.assert_close(doubled[name], 2 * grad)


def _backward_in_words(ctx, how):
    """A row's own backward, in the words that torch has for it, under a context axis."""

    def backward(loss, model):
        if how == "tensor":
            loss.backward(gradient=torch.tensor(2.0, dtype=loss.dtype), retain_graph=True)
        elif how == "function":
            torch.autograd.backward([loss], [torch.tensor(2.0, dtype=loss.dtype)])
        elif how == "one root":
            torch.autograd.backward(loss, inputs=list(model.module.parameters()))
            torch._foreach_mul_([p.grad for p in model.module.parameters()], 2.0)

    plan = fx.Plan(context=fx.CP(tables=("position",)), recompute=("Block",))
    with on_mesh(ctx, fx.Mesh(context=2)) as placed:
        found = []
        for row in (None, attrs.evolve(DDP, backward=backward)):
            model = fx.wrap(Transformer(), placed, plan, strategy=row)
            backward_once(placed, model)
            found.append({n: p.grad.clone() for n, p in model.module.named_parameters()})
            fx.unwrap(model)
        return found


@pytest.mark.parametrize("how", ["tensor", "function", "one root"])
def test_torchs_backward_reaches_recomputed_attention(pair, how):
    for plain, doubled in pair.run(_backward_in_words, how):
        for name, grad in plain.items():
            torch.testing.assert_close(doubled[name], 2 * grad)
