"""Compiled modules and blocks on ranks: what is compiled, and what is logged."""

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.backends.single import SINGLE
from fxtrain.backends.wrapping import problems_of
from fxtrain.ops import micro_batches
from tests._errors import raises_code
from tests.cluster._small_nets import train_small


def test_modules_of_torch_itself_are_compiled_too(ctx):
    from torch._dynamo.utils import counters

    counters.clear()
    net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    fx.wrap(net, ctx, fx.Plan(compile=fx.Compile(backend="eager")))(torch.ones(1, 2))
    assert counters["stats"]["unique_graphs"] == 1


def test_weights_are_prepacked_for_inference_only(ctx, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: given.append(options) or call)
    plan = fx.Plan(compile=fx.Compile(prepack=True))
    fx.wrap(nn.Linear(2, 1), ctx, plan)
    assert given[0]["options"] == {"freezing": True}


GRAPHS = {
    "reduce-overhead": True,
    "max-autotune": True,
    "max-autotune-no-cudagraphs": False,
    None: False,
}


@pytest.mark.parametrize("mode", GRAPHS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_gradients_that_a_graph_overwrites_are_not_accumulated(device, mode):
    ctx = fx.DistContext(device=torch.device(device))
    plan = fx.Plan(strategy=fx.Single(), compile=fx.Compile(mode=mode), accumulate=2)
    net = nn.Linear(2, 2)
    problems = problems_of(SINGLE, ctx, plan, net)
    assert len(problems) == (GRAPHS[mode] and device == "cuda")
    if problems:
        with raises_code("FX202", "accumulate=2", "169545"):
            fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW)
    assert problems_of(SINGLE, ctx, attrs.evolve(plan, accumulate=1), net) == ()


@pytest.mark.parametrize("kind", ["step", "update", "parts", "evaluate"])
def test_a_step_of_graphs_begins_before_each_forward(ctx, monkeypatch, kind):
    events = []
    monkeypatch.setattr(micro_batches, "uses_cuda_graphs", lambda *_: True)
    monkeypatch.setattr(
        torch.compiler, "cudagraph_mark_step_begin", lambda: events.append("begins")
    )
    plan = fx.Plan(compile=fx.Compile(backend="eager", blocks=("Linear",)))
    model = fx.wrap(nn.Linear(2, 1), ctx, plan, optimizer=torch.optim.AdamW)
    batch = fx.batch(torch.ones(2, 2), ctx, plan)

    def loss(model, batch):
        events.append("forward")
        out = model(batch.data)
        if out.requires_grad:
            out.register_hook(lambda _: events.append("backward"))
        return out.mean()

    for _ in range(2):
        if kind == "step":
            fx.step(ctx, batch, fx.StepFns(model, loss))
        elif kind == "update":
            fx.update(ctx, batch, model, loss(model, batch))
        elif kind == "parts":
            fx.ops.backward(loss(model, batch), model, batch)
            fx.ops.apply(model)
    if kind == "evaluate":
        loader = fx.shard(DataLoader(torch.ones(4, 2), batch_size=2), ctx, plan)
        fx.evaluate(ctx, model, loader, loss)
        assert events == ["begins", "forward"] * 2
    else:
        assert events == ["forward", "backward", "begins"] * 2


class _Blocks(nn.Module):
    """Of torch's modules, in a loop that torch leaves at the first hook inside."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


COMPILED = {
    "a Sequential": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), ()),
    "a module": (_Blocks, ()),
    "blocks": (_Blocks, ("Sequential",)),
}


def _compiled(ctx, name, strategy):
    from torch._dynamo.utils import counters

    make, blocks = COMPILED[name]
    torch.compiler.reset()
    counters.clear()
    compile_ = fx.Compile(backend="eager", blocks=blocks)
    losses = {}
    for plan in (fx.Plan(strategy=strategy), fx.Plan(strategy=strategy, compile=compile_)):
        torch.manual_seed(0)
        net = make()
        before = {path: "forward" in vars(part) for path, part in net.named_modules()}
        model, reports = train_small(ctx, plan, net=net, epochs=1)
        losses[plan] = [float(report.loss) for report in reports]
    fx.unwrap(model)
    undone = before == {path: "forward" in vars(part) for path, part in net.named_modules()}
    return [*losses.values()], counters["stats"]["calls_captured"], undone


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("strategy", [fx.FSDP(), fx.FSDP(wrap=("Linear",))], ids=["", "linear"])
@pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning")
def test_what_stands_behind_hooks_of_fsdp_is_compiled(pair, name, strategy):
    for (plain, compiled), calls, undone in pair.run(_compiled, name, strategy):
        assert compiled == pytest.approx(plain, rel=1e-5)
        assert calls >= 2 and undone


class _WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        loss = (self.layer(x) - 1).square().mean()
        return loss, {"loss": loss.detach()}


def test_a_report_keeps_no_output_of_a_compiled_model(ctx):
    """Under CUDA graphs the next call writes into the memory of outputs."""
    plan = fx.Plan(compile=fx.Compile(backend="eager"))
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    model, outputs = fx.wrap(_WithLoss(), ctx, plan, optimizer=sgd), []

    def loss(model, batch):
        outputs.append(model(batch.data))
        return outputs[-1]

    report = fx.step(ctx, fx.batch(torch.randn(2, 4), ctx, plan), fx.StepFns(model, loss))
    ((total, aux),) = outputs
    with torch.no_grad():
        total.zero_()
        aux["loss"].zero_()
    assert float(report.loss) == float(report.aux["loss"]) > 0


def test_fp16_on_a_cpu_is_advised_against_once(ctx, caplog):
    for compute in ("fp32", "bf16", "fp16"):
        fx.wrap(torch.nn.Linear(2, 1), ctx, fx.Plan(precision=compute))(torch.ones(1, 2))
    assert caplog.text.count('Use precision="bf16"') == 1


def test_it_is_told_how_many_graphs_were_compiled(ctx, caplog):
    plan = fx.Plan(compile=fx.Compile(backend="eager"))
    with caplog.at_level("INFO", logger="fxtrain.compile"):
        model = fx.wrap(nn.Sequential(nn.Linear(2, 2)), ctx, plan)
        model(torch.ones(1, 2)), model(torch.ones(1, 2))
    (record,) = caplog.records
    assert record.message.startswith("torch.compile created 1 graph of Sequential, ")
