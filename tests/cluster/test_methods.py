"""Methods other than forward: what the plan names runs as forward runs, under every strategy."""

import copy

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code

WIDTH = 8
TP = fx.TP(
    styles=(
        fx.Style(modules="blocks.*.up", style="colwise"),
        fx.Style(modules="blocks.*.down", style="rowwise"),
    )
)
# By name: ranks, fields of the plan, and a mesh.
PLACES = {
    "single": (1, {}, None),
    "streamed": (1, {"strategy": fx.Offload()}, None),
    "ddp": (2, {}, None),
    "ddp, accumulated, bf16": (2, {"accumulate": 2, "precision": "bf16"}, None),
    "ddp, compiled": (2, {"compile": fx.Compile(backend="eager", fullgraph=True)}, None),
    "zero": (2, {"strategy": fx.DDP(shard_optimizer=True)}, None),
    "local": (2, {"local": fx.LocalSGD(every=2)}, None),
    "fsdp": (2, {"strategy": fx.FSDP()}, None),
    "fsdp, accumulated, bf16": (
        2,
        {"strategy": fx.FSDP(), "accumulate": 2, "precision": "bf16", "recompute": "_Block"},
        None,
    ),
    "fsdp, compiled": (
        2,
        {"strategy": fx.FSDP(), "compile": fx.Compile(backend="eager", blocks=("_Block",))},
        None,
    ),
    "tensor": (2, {"strategy": fx.FSDP(tensor=TP)}, fx.Mesh(tensor=2)),
}
QUICK = ("single", "ddp", "ddp, accumulated, bf16")


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A model with statistics of its own, and whose methods call each other and forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def encode(self, x, *, twice=False):
        for block in [*self.blocks] * (1 + twice):
            x = block(x)
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return x - self.mean.to(x.dtype)

    def scores(self, x):
        return self.head(self.encode(x))

    def through_forward(self, x):
        return self(x)

    def forward(self, x):
        return self.scores(x)


def _trained(ctx, options, mesh, method, *, by_hand):
    """Kind of the outputs and weights after three updates whose losses a method computes."""
    with on_mesh(ctx, mesh) as placed:
        plan = fx.Plan(methods=("scores", "through_forward", "encode"), **options)
        torch.manual_seed(0)
        sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        model = fx.wrap(Net(), placed, plan, optimizer=sgd)
        call = model if method == "forward" else getattr(model, method)
        fns = fx.StepFns(model, lambda _, batch: call(batch.data).float().square().mean())
        position = fx.Position()
        for step in range(3 * plan.accumulate):
            data_rank = placed.axis("data").rank
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9 * step + data_rank))
            batch = fx.batch(x, placed, plan, after=position)
            if by_hand:
                report = fx.update(placed, batch, model, fns.loss(model, batch))
            else:
                report = fx.step(placed, batch, fns)
            position = report.position
        model.eval()
        with torch.no_grad():
            out = call(x)
        weights = {name: value.clone() for name, value in fx.weights(model)}
        fx.unwrap(model)
        return out, weights


def _all_ways(ctx, options, mesh):
    ways = [("forward", False), ("scores", False), ("through_forward", False)]
    ways += [("forward", True), ("scores", True)]
    return [_trained(ctx, options, mesh, method, by_hand=hand) for method, hand in ways]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PLACES]
)
def test_a_method_trains_as_forward_does(clusters, name):
    n, options, mesh = PLACES[name]
    results = clusters[n].run(_all_ways, options, mesh)
    for ways in results:
        for out, weights in ways:
            wanted_out, wanted = ways[0]
            assert out.dtype == wanted_out.dtype
            assert torch.equal(out, wanted_out)
            assert all(torch.equal(weights[key], value) for key, value in wanted.items())
    if "local" not in options:
        for key, value in results[0][0][1].items():
            assert torch.equal(results[-1][0][1][key], value), f"{key} differs between ranks"


def _one_part_only(ctx, strategy):
    model = fx.wrap(
        Net(),
        ctx,
        fx.Plan(strategy=strategy, methods="encode"),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    head = model.module.head.bias.detach().clone()
    fns = fx.StepFns(model, lambda m, batch: m.encode(batch.data, twice=True).square().mean())
    try:
        for _ in range(2):
            report = fx.step(ctx, fx.batch(torch.full((4, WIDTH), 1.0 + ctx.rank), ctx), fns)
    except fx.errors.StepError as error:
        return str(error)
    assert torch.equal(model.module.head.bias, head)
    return report.applied, {name: value.clone() for name, value in fx.weights(model)}


def test_a_method_that_leaves_parameters_out_is_answered_as_such_a_forward(pair):
    for text in pair.run(_one_part_only, fx.DDP()):
        assert "Without gradient: head.weight, head.bias" in text
        assert "fx.DDP(unused_parameters=True)" in text
    (applied, first), (_, second) = pair.run(_one_part_only, fx.DDP(unused_parameters=True))
    assert applied
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def ctx():
    with fx.detect(env={}, device="cpu") as ctx:
        yield ctx


def _attribute_error(model, name):
    with pytest.raises(AttributeError) as caught:
        getattr(model, name)
    return str(caught.value)


def test_a_method_that_the_plan_does_not_name_says_what_to_do(ctx):
    model = fx.wrap(Net(), ctx)
    assert _attribute_error(model, "encode") == (
        "A wrapped model has no attribute 'encode'. To compute with it as with forward, use "
        "fx.Plan(methods=('encode',)). model.module.encode runs without the plan: without its "
        "precision, and on the shards of FSDP."
    )
    assert "let a method of the module do so" in _attribute_error(model, "head")
    assert _attribute_error(model, "missing").endswith("if the module has it.")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("encod", "no method of Net. Did you mean encode?"),
        ("head", "no method of Net. Did you mean"),
        ("zzz", "Did you mean encode, scores, through_forward?"),
        ("forward", "which every module or every wrapped model has"),
        ("generate", "which every module or every wrapped model has"),
        ("half", "Name methods of Net itself"),
    ],
)
def test_a_plan_that_names_no_method_of_the_model_is_refused(ctx, name, says):
    with pytest.raises(fx.errors.PlanError) as caught:
        fx.wrap(Net(), ctx, fx.Plan(methods=name))
    assert says in str(caught.value)


def test_a_closed_handle_refuses_its_methods(ctx):
    model = fx.wrap(Net(), ctx, fx.Plan(methods="encode"))
    encode = model.encode
    net = fx.unwrap(model)
    assert "forward" not in vars(net)
    with raises_code("FX500", "model.encode"):
        encode(torch.ones(2, WIDTH))


def test_a_copy_of_the_module_runs_its_own_forward(ctx):
    model = fx.wrap(Net(), ctx, fx.Plan(methods="encode"))
    net, x = copy.deepcopy(model.module).eval(), torch.ones(2, WIDTH)
    with torch.no_grad():
        net.head.bias.add_(1)
        model.eval()
        torch.testing.assert_close(net(x), model(x) + 1)


class _Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def of_image(self, x):
        return torch.tanh(self.image(x))

    def of_text(self, x):
        return torch.tanh(self.text(x))


def _contrasted(ctx, strategy):
    torch.manual_seed(0)
    model = fx.wrap(
        _Towers(),
        ctx,
        fx.Plan(strategy=strategy, methods=("of_image", "of_text")),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )

    def loss(model, batch):
        return (model.of_image(batch.data) * model.of_text(batch.data)).sum()

    for _ in range(2):
        rows = torch.full((4, WIDTH), 1.0 + ctx.rank)
        fx.step(ctx, fx.batch(rows, ctx), fx.StepFns(model, loss))
    return {name: value.clone() for name, value in fx.weights(model)}


@pytest.mark.parametrize("strategy", [fx.DDP(unused_parameters=True), fx.FSDP()])
def test_two_methods_train_together(pair, strategy):
    torch.manual_seed(0)
    net = _Towers()
    for _ in range(2):
        losses = []
        for rank in range(2):
            x = torch.full((4, WIDTH), 1.0 + rank)
            losses.append((net.of_image(x) * net.of_text(x)).sum())
        net.zero_grad()
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for parameter in (*net.image.parameters(), *net.text.parameters()):
                parameter -= 0.1 * parameter.grad
    for weights in pair.run(_contrasted, strategy):
        torch.testing.assert_close(weights, dict(net.state_dict()))
