"""What runs on an XLA device in these tests; module level, so that it pickles."""

import warnings

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            *(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)),
            *(nn.Dropout(0.25), nn.Tanh(), nn.Linear(8, 2)),
        )


def start(ctx, plan, module=None):
    model = fx.wrap(
        module or net(),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.95),
    )

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    return model, fx.StepFns(model=model, loss=loss)


def loader_of(ctx, plan, rows=32, size=4):
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=size, shuffle=True)
    return fx.shard(loader, ctx, plan)


def numbers(model):
    """Everything that decides how a model goes on, on the CPU."""
    state = model.strategy.state(model)
    return {name: tensor.detach().cpu() for name, tensor in (state.tensors | state.own).items()}


def train(ctx, plan, loader, fns, steps):
    reports = []
    for epoch in loader.epochs(9):
        for batch in epoch:
            if len(reports) == steps:
                return reports
            reports.append(fx.step(ctx, batch, fns))
    return reports


def saved_and_restored(ctx, plan, folder):
    """A run that saves and goes on, and another that goes on from what was saved."""
    ops.seed(3, ctx)
    model, fns = start(ctx, plan)
    reports = train(ctx, plan, loader_of(ctx, plan), fns, 5)
    fx.save(folder, ctx, model, position=reports[-1].position, background=True)
    rest = train(ctx, plan, loader_of(ctx, plan).at(reports[-1].position), fns, 6)
    losses = [report.loss.item() for report in rest]
    wanted = numbers(model)
    ops.seed(99, ctx)
    model, fns = start(ctx, plan)
    position = fx.restore(folder, ctx, model).position
    rest = train(ctx, plan, loader_of(ctx, plan).at(position), fns, 6)
    return (losses, wanted), ([report.loss.item() for report in rest], numbers(model))


def smooth():
    """Without dropout, whose random numbers are the device's."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def after_restoring(ctx, plan, folder, steps):
    """Numbers of a model that was saved elsewhere, after so many more steps."""
    model, fns = start(ctx, plan, smooth())
    position = fx.restore(folder, ctx, model).position
    train(ctx, plan, loader_of(ctx, plan).at(position), fns, steps)
    return numbers(model)


def saves(ctx, plan, folder, steps):
    model, fns = start(ctx, plan, smooth())
    reports = train(ctx, plan, loader_of(ctx, plan), fns, steps)
    fx.save(folder, ctx, model, position=reports[-1].position)


def graphs_per_step(ctx, accumulate):
    """Executed graphs and compilations of each of several steps of one shape."""
    from torch_xla.debug import metrics

    plan = fx.Plan(strategy=fx.XLA(), accumulate=accumulate, clip_norm=1.0)
    _model, fns = start(ctx, plan)
    found = []
    for epoch in loader_of(ctx, plan).epochs(2):
        for batch in epoch:
            before = [metrics.counter_value(name) or 0 for name in COUNTERS]
            fx.step(ctx, batch, fns)
            after = [metrics.counter_value(name) or 0 for name in COUNTERS]
            found.append([b - a for a, b in zip(before, after, strict=True)])
    return found


COUNTERS = ("MarkStep", "UncachedCompile")


def warnings_of(ctx, **fields):
    """What steps on batches of two sizes warn of."""
    plan = fx.Plan(strategy=fx.XLA(**fields))
    _model, fns = start(ctx, plan)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(ctx, plan, loader_of(ctx, plan, rows=22), fns, 12)
    return [str(one.message) for one in found]


def in_bf16(ctx, downcast):
    """Formats of parameters, of what a layer gives, and of parameters afterwards; losses."""
    plan = fx.Plan(
        strategy=fx.XLA(downcast=downcast), precision=fx.Precision(compute="bf16", output="fp32")
    )
    module, made = net(), set()
    module[0].register_forward_hook(lambda _, __, out: made.add(out.dtype))
    model, fns = start(ctx, plan, module)
    inside = {parameter.dtype for parameter in model.parameters()}
    reports = train(ctx, plan, loader_of(ctx, plan, rows=64), fns, 60)
    losses = [report.loss.item() for report in reports]
    after = {parameter.dtype for parameter in fx.unwrap(model).parameters()}
    return inside, made, after, losses


def placed(ctx, ahead):
    """Rows as they arrive, and how the devices hold them."""
    import torch_xla

    plan = fx.Plan(strategy=fx.XLA(), data=fx.Data(prefetch=2))
    loader = loader_of(ctx, plan, rows=16)
    # As if workers read, which the processes of a pool may not have.
    loader = attrs.evolve(loader, source=attrs.evolve(loader._source, apart=ahead))
    rows, splits = [], set()
    for batch in loader:
        splits.add(torch_xla._XLAC._get_xla_sharding_spec(batch[0]).split(" ")[0])
        rows.append(batch[0].cpu())
    return torch.cat(rows), splits


def splits(ctx, mesh):
    """How parameters and optimizer states are held under a mesh, before and after a step."""
    import torch_xla

    placed = fx.detect({"PJRT_DEVICE": "CPU"}, mesh=mesh)
    model, fns = start(placed, fx.Plan(strategy=fx.XLA()))
    train(placed, model.plan, loader_of(placed, model.plan), fns, 2)
    weight = model.module[0].weight
    held = [weight, model.optimizer.state[weight]["exp_avg"]]
    return [torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in held]


def ops_alone(ctx):
    """Every collective on tensors of the device, at one rank."""
    x = torch.arange(3.0, device=ctx.device)
    tree = {"x": x, "n": 2, "s": "a"}
    batch = next(iter(loader_of(ctx, fx.Plan(), size=3)))
    seeded = []
    for _ in range(2):
        ops.seed(4, ctx)
        first = torch.rand(2, device=ctx.device).cpu()
        with ops.fork_rng(ctx, len(seeded)):
            inside = torch.rand(2, device=ctx.device).cpu()
        seeded.append((first, inside, torch.rand(2, device=ctx.device).cpu()))
    return {
        "gather": ops.gather(tree, ctx)["x"].cpu(),
        "reduce": ops.reduce({"x": x, "n": 2}, ctx, op="sum")["x"].cpu(),
        "broadcast": ops.broadcast(tree, ctx)["x"].cpu(),
        "padded": ops.unpad(ops.pad(x, ctx), ctx).cpu(),
        "valid": ops.gather_valid(batch[0], batch, ctx).shape,
        "seeded": seeded,
    }


def refusals(ctx):
    """What is refused, in words."""
    found = {}

    def note(name, call):
        try:
            call()
        except fx.FxError as error:
            found[name] = str(error)

    for name, plan in {
        "ddp": fx.Plan(),
        "fsdp": fx.Plan(strategy=fx.FSDP()),
        "fp16": fx.Plan(strategy=fx.XLA(), precision="fp16"),
        "downcast": fx.Plan(strategy=fx.XLA(downcast=True)),
        "compile": fx.Plan(strategy=fx.XLA(), compile=fx.Compile()),
        "blocks": fx.Plan(strategy=fx.XLA(blocks=("Blokc",))),
    }.items():
        note(name, lambda plan=plan: fx.wrap(net(), ctx, plan))
    note("number", lambda: fx.detect({}, device="xla:7"))
    note("kind", lambda: fx.detect({"PJRT_DEVICE": "TPU"}))
    note("mesh", lambda: fx.detect({"PJRT_DEVICE": "CPU"}, mesh=fx.Mesh(tensor=4)))
    return found
