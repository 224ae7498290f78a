"""What wrap and step refuse, and in which words."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.errors import StepError
from tests._errors import raises_code
from tests.cluster._small_nets import SGD, small_data, small_net, square_loss, train_small
from tests.cluster._wrong_calls import WRONG, plateau, sgd


def _different_models(ctx):
    fx.wrap(nn.Linear(2 + ctx.rank, 2), ctx)


def test_different_models_are_an_error_everywhere(pair):
    for error in pair.outcomes(_different_models):
        assert isinstance(error, fx.CollectiveError)
        assert "Linear with 6 parameters" in str(error) and "Linear with 8" in str(error)


def _different_data(ctx):
    loader = fx.shard(DataLoader(small_data(20 + ctx.rank), batch_size=4), ctx)
    return [None for _ in loader]


def test_loaders_that_disagree_are_an_error_everywhere(pair):
    for error in pair.outcomes(_different_data):
        assert isinstance(error, fx.CollectiveError) and "rows" in str(error)


def _one_batch(ctx, plan=fx.Plan()):  # noqa: B008
    return next(iter(fx.shard(DataLoader(small_data(), batch_size=4), ctx, plan)))


BAD_LOSSES = {
    "shape": (lambda m, b: m(b[0]), "scalar"),
    "number": (lambda m, b: 3.0, "not a tensor"),
    "detached": (lambda m, b: square_loss(m, b).detach(), "does not require grad"),
    "constant": (lambda m, b: torch.tensor(1.0), "does not require grad"),
    "weight": (lambda m, b: fx.Weighted(square_loss(m, b), torch.ones(3)), "Reduce it"),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_that_cannot_be_trained_on_is_refused(ctx, name):
    loss, words = BAD_LOSSES[name]
    model = fx.wrap(small_net(), ctx, optimizer=SGD)
    with pytest.raises(StepError, match=words):
        fx.step(ctx, _one_batch(ctx), fx.StepFns(model=model, loss=loss))


ONE_ENTRY = {
    "mean": lambda m, b: square_loss(m, b),
    "weighted": lambda m, b: fx.Weighted(square_loss(m, b) * 4, 4),
}


@pytest.mark.parametrize("nonfinite", ["ignore", "skip", "raise"])
@pytest.mark.parametrize("name", ONE_ENTRY)
@pytest.mark.parametrize("shape", [pytest.param((1,), marks=pytest.mark.slow), (1, 1)])
def test_a_loss_of_one_entry_is_a_scalar(ctx, name, shape, nonfinite):
    def shaped(m, b):
        loss = ONE_ENTRY[name](m, b)
        if isinstance(loss, fx.Weighted):
            return fx.Weighted(loss.total.reshape(shape), loss.weight)
        return loss.reshape(shape)

    plan = fx.Plan(nonfinite=nonfinite, accumulate=2)
    (one, scalars), (other, shapes) = (
        train_small(ctx, plan, epochs=1, loss=loss) for loss in (ONE_ENTRY[name], shaped)
    )
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert [float(a.loss) for a in scalars] == [float(b.loss) for b in shapes]
    assert all(report.loss.shape == () for report in shapes)


def test_an_optimizer_that_needs_a_closure_is_refused_and_works_by_hand(ctx):
    for lbfgs in (torch.optim.LBFGS, lambda p: {"a": SGD(p), "b": torch.optim.LBFGS(p)}):
        with raises_code("FX200", "LBFGS.step"):
            fx.wrap(small_net(), ctx, optimizer=lbfgs)
    net = small_net()
    with raises_code("FX200", "closure"):
        fx.wrap(net, ctx, optimizer=torch.optim.LBFGS(net.parameters()))
    model, batch = fx.wrap(net, ctx), _one_batch(ctx)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = square_loss(model, batch)
        loss.backward()
        return loss

    before = optimizer.step(closure).detach()
    assert square_loss(model, batch).detach() < before


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        return self.used(x)


def _with_unused(ctx, strategy, accumulate):
    plan = fx.Plan(strategy=strategy, accumulate=accumulate)
    model = fx.wrap(_Unused(), ctx, plan, optimizer=SGD)
    fns, words = fx.StepFns(model=model, loss=square_loss), []
    for batch in fx.shard(DataLoader(small_data(), batch_size=4), ctx, plan):
        try:
            fx.step(ctx, batch, fns)
        except StepError as error:
            words.append(str(error))
    return words


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_without_gradient_is_named_with_what_allows_it(pair, accumulate):
    for words in pair.run(_with_unused, fx.DDP(), accumulate):
        assert words
        for text in words:
            assert "reached 2 of 4. Without gradient: spare.weight, spare.bias." in text
            assert "fx.DDP(unused_parameters=True)" in text
    assert pair.run(_with_unused, fx.DDP(unused_parameters=True), accumulate) == [[], []]
    assert pair.run(_with_unused, fx.FSDP(), accumulate) == [[], []]


def test_step_refuses_what_is_no_batch_and_no_trained_model(ctx):
    model = fx.wrap(small_net(), ctx, optimizer=SGD)
    with raises_code("FX500", "fx.shard"):
        fx.step(ctx, small_data()[0], fx.StepFns(model=model, loss=square_loss))
    with raises_code("FX504"):
        fx.step(ctx, _one_batch(ctx), fx.StepFns(model=fx.wrap(small_net(), ctx), loss=square_loss))
    with raises_code("FX500", "fx.wrap"):
        fx.StepFns(model=small_net(), loss=square_loss)


def test_wrap_refuses_what_it_cannot_use(ctx):
    net = small_net()
    for wrong, words in (
        (lambda: fx.wrap("net", ctx), r"torch\.nn\.Module"),
        (lambda: fx.wrap(fx.wrap(net, ctx), ctx), "found Wrapped"),
        (lambda: fx.wrap(net, "ctx"), "not a context"),
        (lambda: fx.wrap(net, ctx, {"accumulate": 2}), "not a Plan"),
        (lambda: fx.wrap(net, ctx, optimizer=lambda p: None), "returned NoneType"),
        (lambda: fx.wrap(net, ctx, optimizer=SGD(small_net().parameters())), "pass a factory"),
        (lambda: fx.wrap(net, ctx, fx.Plan(recompute=("Blok",))), "Did you mean Block"),
    ):
        with pytest.raises(fx.PlanError, match=words):
            wrong()


def test_an_optimizer_over_the_model_itself_is_accepted(ctx):
    net = small_net()
    optimizer = SGD(net.parameters())
    assert fx.wrap(net, ctx, optimizer=optimizer).optimizer is optimizer


def test_single_refuses_two_ranks():
    from fxtrain.state import DistContext

    with raises_code("FX202"):
        fx.wrap(small_net(), DistContext(world_size=2), fx.Plan(strategy=fx.Single()))


def test_power_sgd_in_several_buckets_over_gloo_is_refused_before_it_can_hang(pair):
    def problems(bucket_mib):
        hook = fx.CommHook(name="power_sgd")
        return fx.Plan(strategy=fx.DDP(bucket_mib=bucket_mib, hook=hook))

    told = pair.run(_refused, problems(0.0001))
    assert all("more than one bucket" in text for text in told)
    assert pair.run(_refused, problems(1.0)) == [None, None]


def _refused(ctx, plan, more=None):
    net = small_net()
    net.more = more
    try:
        fx.wrap(net, ctx, plan)
    except fx.PlanError as error:
        return str(error)
    return None


@pytest.mark.parametrize("size", [(), (0,)])
def test_power_sgd_refuses_what_is_no_matrix_before_it_starts_to_compress(pair, size):
    plan = fx.Plan(strategy=fx.DDP(hook=fx.CommHook(name="power_sgd")))
    for refused in pair.run(_refused, plan, nn.Parameter(torch.zeros(size))):
        assert "which more cannot be" in refused
    assert pair.run(_refused, plan, nn.Parameter(torch.zeros(1))) == [None, None]


def test_step_functions_by_position(ctx):
    model = fx.wrap(small_net(), ctx, optimizer=SGD)
    fns = fx.StepFns(model, square_loss)
    assert (fns.model, fns.loss) == (model, square_loss)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), F.cross_entropy], ids=["module", "function"]
)
def test_a_criterion_as_a_loss_is_answered_by_the_function_to_write(ctx, loss):
    model = fx.wrap(small_net(), ctx, optimizer=SGD)
    with raises_code("FX500", "model(batch[0])"):
        fx.StepFns(model, loss)


def _said(ctx):
    """The error of each call on this rank."""
    net = nn.Sequential(nn.Linear(2, 2))
    model = fx.wrap(net, ctx, optimizer=sgd, scheduler=plateau)
    rows = [{"x": torch.ones(2), "y": n % 2} for n in range(8)]
    loader = fx.shard(DataLoader(rows, batch_size=2), ctx)
    batch = next(iter(loader))
    said = {}
    for name, (call, _) in WRONG.items():
        try:
            call(ctx, model, loader, batch)
        except (fx.FxError, AttributeError) as error:
            said[name] = f"{type(error).__name__}: {error}".replace(f"rank {ctx.rank} ", "rank ")
    return said


@pytest.mark.parametrize("n", [1, 2])
def test_the_line_to_write_is_said_on_every_rank(clusters, n):
    first, *others = clusters[n].run(_said)
    assert [name for name in WRONG if WRONG[name][1] not in first.get(name, "")] == []
    assert all(other == first for other in others)


def test_a_batch_is_a_mapping_with_get(ctx_of_one):
    rows = [{"x": torch.ones(2)}] * 2
    (batch,) = fx.shard(DataLoader(rows, batch_size=2), ctx_of_one)
    assert batch.get("x").shape == (2, 2)
    assert batch.get("z") is None and batch.get("z", 3) == 3


def test_a_loader_has_the_batch_that_it_yielded_last(ctx_of_one):
    loader = fx.shard(DataLoader(torch.arange(10), batch_size=4), ctx_of_one)
    for epoch in loader.epochs(2):
        assert all(batch is epoch.batch for batch in epoch)
        assert epoch.batch.position.is_last


@pytest.fixture
def ctx_of_one():
    with fx.detect({}, device="cpu") as opened:
        yield opened
