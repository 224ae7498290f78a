"""Pipeline parallelism: laws on every schedule, bad plans, models that do not split, traffic."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.backends.pipeline.partition import partition_of
from fxtrain.backends.pipeline.stage import TensorMeta, as_sent
from fxtrain.ops.transport.exchange import CallState
from fxtrain.testing import (
    LAWS,
    Task,
    Transformer,
    all_at_once,
    count_collectives,
    fake_world,
    on_ranks,
)
from fxtrain.testing.training import reference
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._laws import LAW, LONG, TOGETHER
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP, synced_each
from tests.cluster._pipelines import FOUR, SHARDS, SPLITS, held

pytestmark = PIPELINES

NAMES = [law.__name__ for law in LAWS]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in {*TOGETHER, *LONG} else ())
        for name in ("all_at_once", *NAMES)
    ],
)
def test_laws(pair, name):
    LAW[name](pair, fx.Plan(strategy=fx.PP()), fx.Mesh(pipeline=2))


@pytest.mark.slow
@pytest.mark.parametrize("law", [all_at_once, synced_each, *LAWS[4:]], ids=lambda law: law.__name__)
def test_laws_of_stages_in_a_loop_and_copies(clusters, law):
    config = fx.PP(schedule="interleaved_1f1b", microbatches=2, split=FOUR)
    law(clusters[4], fx.Plan(strategy=config), fx.Mesh(pipeline=2))


@pytest.mark.slow
def test_recomputed_and_compiled_blocks(pair):
    # Whatever happens at a split is outside of a block's one graph.
    compiled = fx.Compile(backend="eager", blocks=("Block",), fullgraph=True)
    plan = fx.Plan(strategy=fx.PP(), recompute=("Attention",), compile=compiled)
    LAWS[0](pair, plan, fx.Mesh(pipeline=2))


def test_at_one_rank_it_is_the_plain_model(clusters):
    for law in (LAWS[1], LAWS[-2]):
        law(clusters[1], fx.Plan(strategy=fx.PP(microbatches=2)))


SCHEDULES = {
    "gpipe": (4, fx.PP(schedule="gpipe", microbatches=2, split=FOUR)),
    "looped_bfs": (2, fx.PP(schedule="looped_bfs", microbatches=2, split=FOUR)),
    "zero_bubble": (2, fx.PP(schedule="interleaved_zero_bubble", microbatches=4, split=FOUR)),
    "zbv_zero_bubble": (2, fx.PP(schedule="zbv_zero_bubble", microbatches=4, split=FOUR)),
    "dualpipe_v": (2, fx.PP(schedule="dualpipe_v", split=FOUR)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_as_one_process(clusters, name):
    n, config = SCHEDULES[name]
    plan = fx.Plan(strategy=config, clip_norm=0.05)
    task = Task(plan=plan, mesh=fx.Mesh(pipeline=n), size=4, weighted=True)
    wanted = reference(task, 1)
    for run in clusters[n].run(on_ranks, task):
        torch.testing.assert_close(run.losses, wanted.losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(run.norms, wanted.norms, rtol=1e-9, atol=0)
        for key, value in wanted.parameters.items():
            torch.testing.assert_close(run.parameters[key], value, rtol=1e-9, atol=1e-11)


def test_stages_are_balanced_and_tied_parameters_are_on_both_ends():
    net = nn.Sequential(*(nn.Linear(n, 1, bias=False) for n in (9, 1, 1, 1, 5, 4)))
    partition = partition_of(net, fx.PP(), 3)
    assert partition.starts == ("1", "5") and partition.ranks == (0, 1, 2)
    partition = partition_of(Transformer(), fx.PP(schedule="zbv_zero_bubble", split=FOUR), 2)
    assert partition.ranks == (0, 1, 1, 0)
    assert partition.stages["head.weight"] == partition.stages["embed.weight"] == {0, 3}
    assert partition.holders("head.weight") == (0,) and partition.holders("gain") == (0, 1)
    assert partition.stages["blocks.1.up.bias"] == {2}


class Net(nn.Module):
    """Blocks, and something that a pipeline may not like."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        if case == "early head":
            self.head = nn.Linear(4, 4)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        if case != "early head":
            self.head = nn.Linear(4, 4)
        self.double()

    def forward(self, x):
        start = h = self.embed(x[x[:, 0] > -0.9] if self.case == "input" else x)
        if self.case == "shape":
            h = h[h.sum(1) > 0]
        if self.case == "value" and h.sum() > 0:
            h = h * 2
        if self.case == "write":
            h = torch.zeros_like(x).copy_(h)
        if self.case == "list":
            h = self.blocks[1](self.blocks[0](h).tanh())
        else:
            for block in self.blocks:
                h = block(h).tanh()
        return self.head(h + start if self.case == "around" else h)


def _rows(model, ctx, plan, rows=4):
    x = torch.linspace(-1, 1, 16 * rows, dtype=torch.float64).reshape(-1, 4)
    return fx.shard(DataLoader(TensorDataset(x), batch_size=rows), ctx, plan)


def _loss(model, batch):
    return model(batch[0]).square().mean()


def test_a_stage_sends_nothing_that_the_next_one_does_not_wait_for():
    told = TensorMeta(0, (2, 4), torch.float32, True)
    assert as_sent(torch.ones(2, 4), told).shape == (2, 4)
    with raises_code("FX200", "[3, 4]"):
        as_sent(torch.ones(3, 4), told)


LOSSES = {
    "no call": lambda model, batch: torch.ones((), requires_grad=True),
    "backward": lambda model, batch: fx.ops.backward(torch.ones((), requires_grad=True), model),
    "gradients": lambda model, batch: model(batch[0]),
}


def _trained(placed, case, rows=4, **options):
    """One update of a model with something that a pipeline may not like."""
    torch.manual_seed(0)
    plan = fx.Plan(strategy=fx.PP(split=("blocks.1",), **options))
    model = fx.wrap(Net(case), placed, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    batch = next(iter(_rows(model, placed, plan, rows=rows)))
    if case in ("backward", "gradients"):
        LOSSES[case](model, batch)
    fx.step(placed, batch, fx.StepFns(model=model, loss=LOSSES.get(case, _loss)))
    return {name: p.detach() for name, p in fx.unwrap(model).named_parameters()}


REFUSED = {
    "shape": "a shape that depends on data",
    "value": "needs values",
    "input": "micro-batches send it [[1, 4]] and [[2, 4]], so shapes depend on data",
    "write": "writes what an earlier stage computes",
    "around": "as a connection around the split does",
    "early head": "name the parameter in PP(shared=...)",
    "rows": "a batch of 3 rows on a rank is not divisible by that",
    "no call": "did not call the model",
    "gradients": "inside fx.step",
    "backward": "does not support a separate backward",
}


def _refusals(ctx):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    told = {}
    for case in REFUSED:
        try:
            _trained(placed, case, rows=3 if case == "rows" else 4)
        except fx.FxError as error:
            told[case] = (type(error).__name__, str(error))
    return told


def test_a_model_that_does_not_split_is_the_same_error_everywhere(pair):
    first, second = pair.run(_refusals)
    assert first == second
    late = ("no call", "gradients")
    for case, words in REFUSED.items():
        kind, text = first[case]
        assert words in text
        assert kind == ("StepError" if case in late else "PlanError"), text


@pytest.mark.parametrize("rank", slow_after(1, [0, 1]))
def test_a_dry_run_says_that_a_model_does_not_split(rank):
    for case in ("shape", "value", "write", "around", "early head"):
        train = functools.partial(_trained, case=case)
        run = fx.dry_run(train, world=2, rank=rank, mesh=fx.Mesh(pipeline=2))
        problem = run.problems[0]
        assert problem.fatal and REFUSED[case] in problem.text, problem.text


def test_an_error_in_a_stage_is_raised_as_it_is():
    def loss(model, batch):
        model(batch[0])
        raise KeyError("labels") from ValueError("why")

    def train(ctx):
        model = fx.wrap(Net("list"), ctx, fx.Plan(strategy=fx.PP()), optimizer=_sgd)
        fx.step(ctx, next(iter(_rows(model, ctx, model.plan))), fx.StepFns(model, loss))

    with pytest.raises(KeyError, match="labels") as error:
        fx.dry_run(train, world=2, rank=1, mesh=fx.Mesh(pipeline=2))
    assert isinstance(error.value.__cause__, ValueError)


def _others(ctx):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    return [_trained(placed, "early head", shared=("head.*",)), _trained(placed, "list")]


def test_models_of_other_shapes_train(pair):
    wanted = []
    for case in ("early head", "list"):
        torch.manual_seed(0)
        net = Net(case)
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(-1, 4)[:4]
        net(x).square().mean().backward()
        wanted.append({n: p.detach() - 0.1 * p.grad for n, p in net.named_parameters()})
    for got in pair.run(_others):
        torch.testing.assert_close(got, wanted)


def _sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def _evaluated(ctx, schedule, outputs):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    config = fx.PP(schedule=schedule, split=FOUR, outputs=outputs)
    model = fx.wrap(Transformer(), placed, fx.Plan(strategy=config)).eval()
    with torch.no_grad():
        return [model(torch.arange(8 * rows).reshape(rows, 8) % 24) for rows in (4, 3, 4)]


@pytest.mark.slow
def test_outputs_are_on_the_last_rank_or_all(pair):
    with torch.no_grad():
        wanted = [Transformer()(torch.arange(8 * n).reshape(n, 8) % 24) for n in (4, 3, 4)]
    for got in pair.run(_evaluated, "interleaved_1f1b", "all"):
        torch.testing.assert_close(got, wanted)
    # There and back: the last stage is on rank 0.
    first, last = pair.run(_evaluated, "dualpipe_v", "last")
    torch.testing.assert_close(first, wanted)
    assert last == [None] * 3


def _in_windows(ctx, schedule, look):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    plan = fx.Plan(strategy=fx.PP(schedule=schedule, microbatches=2), accumulate=2)
    model = fx.wrap(Transformer(blocks=4), placed, plan, optimizer=_sgd)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    tokens = torch.arange(128).reshape(16, 8) % 24
    for batch in fx.shard(DataLoader(tokens, batch_size=4), placed, plan):
        fx.step(placed, batch, fns)
        if look:
            fx.evaluate(placed, model, DataLoader(tokens, batch_size=4), fns.loss)
    return {name: value.tolist() for name, value in fx.weights(model)}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", slow_after(1, ["1f1b", "interleaved_1f1b"]))
def test_evaluations_inside_a_window_change_no_gradient(pair, schedule):
    wanted = pair.run(_in_windows, schedule, False)
    assert pair.run(_in_windows, schedule, True) == wanted


def _noise(ctx):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    plan = fx.Plan(strategy=fx.PP(split=("blocks.1",)))
    model = fx.wrap(Net("list"), placed, plan, optimizer=_sgd)
    seen = []

    def loss(model, batch):
        noise = torch.rand_like(batch[0])
        seen.append(noise)
        return F.mse_loss(model(batch[0] + noise), noise)

    torch.manual_seed(ctx.rank)
    batch = next(iter(_rows(model, placed, plan)))
    for _ in range(2):
        fx.step(placed, batch, fx.StepFns(model=model, loss=loss))
    return seen


def test_what_a_loss_draws_by_chance_is_the_same_on_all_stages(pair):
    first, last = pair.run(_noise)
    assert len(first) == 4 and len(last) == 8
    # Another one in each micro-batch and in each step, also on the same batch.
    assert len({noise.sum().item() for noise in first}) == 4
    for index, noise in enumerate(first[:2] * 2 + first[2:] * 2):
        assert torch.equal(last[index], noise)


class Centered(nn.Module):
    """A running mean, written in Python."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean.clone()


def _averaged():
    torch.manual_seed(0)
    parts = (nn.Linear(4, 4), Centered(), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    return nn.Sequential(*parts, nn.Linear(4, 4), Centered(), nn.Linear(4, 4)).double()


def _buffers(ctx, schedule):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    config = fx.PP(schedule=schedule, microbatches=4, split=("2", "4", "6"))
    model = fx.wrap(_averaged(), placed, fx.Plan(strategy=config), optimizer=_sgd)
    batch = next(iter(_rows(model, placed, model.plan, rows=8)))
    fx.step(placed, batch, fx.StepFns(model=model, loss=_loss))
    return dict(fx.unwrap(model).named_buffers())


@pytest.mark.parametrize("schedule", slow_after(1, ["looped_bfs", "zbv_zero_bubble"]))
def test_what_modules_average_equals_that_of_one_process(pair, schedule):
    net = _averaged()
    x = torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(-1, 4)
    for part in x[:8].split(2):
        net(part)
    for got in pair.run(_buffers, schedule):
        torch.testing.assert_close(got, dict(net.named_buffers()))


def _traffic(ctx):
    """What a step sends, once its schedule is known."""
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    plan = fx.Plan(strategy=fx.PP(split=("blocks.1",), microbatches=4), clip_norm=1.0)
    model = fx.wrap(Net("list"), placed, plan, optimizer=_sgd)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]).square().mean())
    batches = iter(_rows(model, placed, plan, rows=8))
    fx.step(placed, next(batches), fns)
    with count_collectives() as counted:
        fx.step(placed, next(batches), fns)
    return counted.counts, counted.bytes


def test_a_step_sends_activations_and_their_gradients(pair):
    activations = 8 * 4 * 8  # rows, width, bytes
    for counts, sent in pair.run(_traffic):
        assert counts == {"send": 4, "recv": 4, "broadcast": 1, "all_reduce": 1}
        assert sent == {"send": activations, "recv": activations, "broadcast": 32, "all_reduce": 8}


class _Reads(TorchFunctionMode):
    """Counts calls with which the host reads floating-point tensors, as it waits for a GPU."""

    NAMES = ("cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__")
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        read = getattr(func, "__name__", "") in self.NAMES
        self.count += read and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def _measured(ctx):
    """Metrics of every kind, whose sizes and values change; reads and exchanges of a step."""
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=20)
    plan = fx.Plan(strategy=fx.PP(split=("blocks.1",), microbatches=2))
    model = fx.wrap(Net("list"), placed, plan, optimizer=_sgd)
    steps = []

    def loss(model, batch):
        out, at = model(batch[0]), len(steps)
        return out.square().mean(), {
            "mean": batch[0].mean(),
            "text": f"step {at}",
            "number": at + 0.5 * batch.part,
            "count": torch.tensor(at + batch.part),
            "parts": [torch.full((3 + at,), float(batch.part), dtype=torch.bfloat16)],
            "rows": batch[0][:, 0],
            "none": torch.ones(0),
            "flags": torch.ones(1, dtype=torch.bool).expand(3),
        }

    fns, pipeline = fx.StepFns(model=model, loss=loss), placed.axis("pipeline").comm
    for batch in _rows(model, placed, plan):
        calls = pipeline.slot(CallState).count
        with _Reads() as reads:
            report = fx.step(placed, batch, fns)
        calls = pipeline.slot(CallState).count - calls
        steps.append((batch[0], report.aux, reads.count, calls))
    return steps


def test_metrics_of_the_last_stage_are_on_every_rank_and_make_no_host_wait(pair):
    for steps in pair.run(_measured):
        assert len(steps) == 4
        for at, (x, aux, reads, calls) in enumerate(steps):
            wanted = {
                "mean": x.mean(),
                "text": f"step {at}",
                "number": at + 0.25,
                "count": torch.tensor(2 * at + 1),
                "parts": [torch.full((3 + at,), 0.5, dtype=torch.bfloat16)],
                "rows": x[:, 0],
                "none": torch.ones(0),
                "flags": torch.ones(3, dtype=torch.bool),
            }
            assert aux.pop("text") == wanted.pop("text")
            torch.testing.assert_close(aux, wanted)
            assert reads == 0
            assert calls == 1 or at == 0  # which compares schedules too


BAD = {
    "axis": (fx.Mesh(), fx.PP(), {}, "has one rank. Use more"),
    "context": (fx.Mesh(pipeline=2, context=2), fx.PP(), {}, "context=2, which PP does not use"),
    "shard": (fx.Mesh(pipeline=2, shard=2), fx.PP(), {}, "shard=2, which PP without stages="),
    "tensor": (fx.Mesh(pipeline=2, tensor=2), fx.PP(), {}, "tensor=2, which PP without stages="),
    "silent": (fx.Mesh(pipeline=2, tensor=2), held(), {}, r"Use FSDP\(tensor=fx\.TP"),
    "no tensor": (SHARDS, held(tensor=fx.TP(styles=(UP, DOWN))), {}, "tensor axis, which has one"),
    "wrap": (SHARDS, held(wrap=("Blok",)), {}, "Did you mean Block"),
    "zero bubble": (
        SHARDS,
        fx.PP(schedule="zbv_zero_bubble", split=FOUR, stages=fx.FSDP()),
        {},
        r"Use stages=FSDP\(mode='grads_and_optimizer'",
    ),
    "sequence": (
        SPLITS,
        fx.PP(
            split=("blocks.1.norm_2",),
            stages=fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION), sequence=True)),
        ),
        {},
        r"before blocks\.1\.norm_2, inside blocks\.1, but TP\(sequence=True\)",
    ),
    "name": (None, fx.PP(split=("block.1", "x", "y")), {}, r"'block\.1'. Did you mean blocks\.1"),
    "number": (None, fx.PP(split=("blocks.1",)), {}, "names 1 modules, but 4 pipeline ranks"),
    "layers": (None, fx.PP(), {}, r"into 4 stages, but it has 2 blocks \(blocks\.0, blocks\.1"),
    "parts": (None, fx.PP(split=FOUR, microbatches=3), {}, "at least one micro-batch per stage"),
    "rounds": (
        fx.Mesh(pipeline=2),
        fx.PP(schedule="interleaved_1f1b", split=FOUR, microbatches=7),
        {},
        "a multiple of its 3 rounds, such as 6",
    ),
    "each": (None, fx.PP(stages_per_rank=2), {}, "this schedule needs exactly 1 per rank"),
    "shared": (None, fx.PP(split=FOUR, shared=("heads",)), {}, "no parameter matches 'heads'"),
    "compile": (None, fx.PP(split=FOUR), {"compile": fx.Compile()}, "Compile blocks"),
    "middle": (
        fx.Mesh(pipeline=2),
        fx.PP(split=("blocks.0.norm_2",)),
        {"recompute": ("Block",)},
        r"before blocks\.0\.norm_2, which is inside blocks\.0, a Block that Plan\.recompute",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_does_not_fit_is_refused_once_plans_are_compared(name):
    mesh, config, fields, words = BAD[name]
    told = set()
    for rank in (0, 3):
        with fake_world(4, rank=rank, mesh=mesh or fx.Mesh(pipeline=4)) as ctx:
            calls = ctx.comm.slot(CallState).count
            with pytest.raises(fx.PlanError, match=words) as error:
                fx.wrap(Transformer(), ctx, fx.Plan(strategy=config, **fields))
            assert ctx.comm.slot(CallState).count == calls + 1
            told.add(str(error.value))
    assert len(told) == 1
