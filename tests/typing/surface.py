"""What a type checker knows of fxtrain. pyright (strict) and mypy check it; it never runs."""

from collections.abc import Mapping
from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fxtrain as fx


class Net(nn.Module):
    """A model of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Rows(Dataset[dict[str, Tensor]]):
    """Rows that are dicts."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(4), "y": torch.ones(())}

    def __len__(self) -> int:
        return 8


class Pairs(Dataset[tuple[Tensor, int]]):
    """Rows that are pairs of a tensor and a label."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(4), 1

    def __len__(self) -> int:
        return 8


def plans() -> None:
    """Short forms and full ones."""
    fx.Plan(strategy="fsdp", precision="bf16", recompute="Block", compile=True, quantize="bnb4")
    plan = fx.Plan(strategy=fx.FSDP(shard=2), precision=fx.Precision(compute="fp16"))
    assert_type(plan.precision, fx.Precision)
    assert_type(plan.accumulate, int)
    assert_type(plan.recompute, tuple[str, ...])


def models(ctx: fx.DistContext, plan: fx.Plan) -> None:
    """A wrapped model knows its module."""
    model = fx.wrap(
        Net(),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10),
    )
    assert_type(model, fx.Wrapped[Net])
    assert_type(model.module, Net)
    assert_type(model.module.head, nn.Linear)
    assert_type(fx.unwrap(model), Net)
    with fx.gathered(model) as net:
        assert_type(net, Net)
    with fx.gathered(model, ranks="main") as some:
        assert_type(some, Net | None)


def ready_made(ctx: fx.DistContext) -> None:
    """An optimizer that is there already, and several."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fx.wrap(net, ctx, optimizer=optimizer)
    fx.wrap(net, ctx, optimizer=lambda params: [torch.optim.SGD(params, lr=0.1)])
    fx.wrap(net, ctx, optimizer=fx.from_config(lr=1e-3))


class Named(dict[str, Tensor]):
    """What a collate function of the user's returns."""


def named(rows: list[tuple[Tensor, Tensor]]) -> Named:
    """Collate rows."""
    return Named(x=torch.stack([x for x, _ in rows]))


def loaders(ctx: fx.DistContext) -> None:
    """A batch knows its data: what torch makes of the rows of a dataset."""
    pairs = fx.shard(DataLoader(Pairs(), batch_size=2), ctx)
    assert_type(pairs, fx.Sharded[list[Tensor]])
    own: fx.Sharded[Named] = fx.shard(DataLoader[Any](Pairs(), collate_fn=named), ctx)
    assert_type(next(iter(own)).data, Named)
    for epoch in pairs.epochs(2):
        assert_type(epoch, fx.Sharded[list[Tensor]])
        for batch in epoch:
            assert_type(batch, fx.Batch[list[Tensor]])
            assert_type(batch.data, list[Tensor])
            assert_type(batch[0], Tensor)
            assert_type(batch.to("cpu"), fx.Batch[list[Tensor]])
            for column in batch:
                assert_type(column, Tensor)
    for table in fx.shard(DataLoader(Rows(), batch_size=2), ctx):
        assert_type(table["x"], Tensor)
        assert_type(dict(table.items()), dict[str, Tensor])
    for tensors in fx.shard(DataLoader(TensorDataset(torch.ones(8))), ctx):
        assert_type(tensors[0], Tensor)


def shaped(pair: fx.Batch[tuple[Tensor, list[str]]]) -> None:
    """Entries of different types."""
    assert_type(pair[0], Tensor)
    assert_type(pair[1], list[str])


def training(ctx: fx.DistContext, model: fx.Wrapped[Net], batch: fx.Batch[list[Tensor]]) -> None:
    """A loss by a lambda, or by a function with types."""

    def loss(model: fx.Wrapped[Net], batch: fx.Batch[list[Tensor]]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    fns = fx.StepFns(model, loss)
    assert_type(fns.model, fx.Wrapped[Net])
    report = fx.step(ctx, batch, fns)
    assert_type(report.loss, Tensor)
    by_lambda = fx.StepFns(model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    fx.step(ctx, batch, by_lambda)
    fx.update(ctx, batch, model, fx.Weighted(torch.ones(()), 3))


def collectives(ctx: fx.DistContext, batch: fx.Batch[list[Tensor]]) -> None:
    """Trees keep their types."""
    assert_type(fx.ops.gather(batch.data, ctx), list[Tensor])
    assert_type(fx.ops.reduce(1.5, ctx), float)
    assert_type(fx.ops.gather_objects(3, ctx), list[int])
    assert_type(fx.ops.broadcast_object("a", ctx), str)
    assert_type(fx.ops.agree(4, ctx), int)
    assert_type(fx.ops.unpad(fx.ops.pad({"x": torch.ones(2)}, ctx), ctx), dict[str, Tensor])
    assert_type(fx.ops.split(["a", "b"], ctx), list[str])
    assert_type(fx.ops.map(len, ["a", "bc"], ctx), list[int])
    assert_type(fx.ops.any_rank(True, ctx), bool)


def double(value: int) -> int:
    """A function for ranks."""
    return 2 * value


def launched() -> None:
    """Results of ranks have the type of the function's."""
    assert_type(fx.launch(double, (3,), ranks=2), list[int])


def trackers(ctx: fx.DistContext, settings: Mapping[str, Any]) -> None:
    """A single tracker or several."""
    with fx.track("runs/a", ctx, fx.JsonLines(), settings=settings) as run:
        assert_type(run, fx.trackers.Run)
        run.log({"loss": 0.5}, 1)


def evaluations(
    ctx: fx.DistContext, model: fx.Wrapped[Net], rows: DataLoader[dict[str, Tensor]]
) -> None:
    """A number, or a dict of numbers, by what the function returns."""

    def loss(model: fx.Wrapped[Net], batch: fx.Batch[dict[str, Tensor]]) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    def several(model: fx.Wrapped[Net], batch: fx.Batch[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"loss": loss(model, batch)}

    assert_type(fx.evaluate(ctx, model, rows, loss), float)
    assert_type(fx.evaluate(ctx, model, rows, several), dict[str, float])
    assert_type(fx.evaluate(ctx, model, rows, several, metrics={"a": object()}), Any)


def evaluated_as_trained(ctx: fx.DistContext, model: fx.Wrapped[Net]) -> None:
    """A function of the batches that `shard` makes of a loader also takes those of the loader."""

    def loss(model: fx.Wrapped[Net], batch: fx.Batch[list[Tensor]]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def several(model: fx.Wrapped[Net], batch: fx.Batch[list[Tensor]]) -> dict[str, Tensor]:
        return {"loss": loss(model, batch)}

    rows = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)))
    for batch in fx.shard(rows, ctx):
        loss(model, batch)
    assert_type(fx.evaluate(ctx, model, rows, loss), float)
    assert_type(fx.evaluate(ctx, model, rows, several), dict[str, float])
