"""One run by `fx.step`, and the same by `fx.update` or by parts, compared in every bit."""

import attrs
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh, token_rows


@attrs.frozen(kw_only=True)
class Case:
    """What the runs train on.

    Attributes:
        rows: Of the data.
        size: Of a batch.
        weighted: Average over tokens.
        stream: Data of unknown length.
        poison: (rank, batch of an epoch) whose loss is not a number.
        leave: Batches after which the first epoch is left; None stays to its end.
    """

    rows: int
    size: int = 2
    weighted: bool = False
    stream: bool = False
    poison: tuple[int, int] | None = None
    leave: int | None = None


class _Net(Transformer):
    """With a buffer that training changes, which replicas have to agree on."""

    def __init__(self):
        super().__init__(dtype=torch.float32)
        self.register_buffer("seen", torch.zeros(self.WIDTH))

    def forward(self, tokens):
        if self.training:
            self.seen.mul_(0.5).add_(self.embed.weight.detach().float().mean() * tokens.sum())
        return super().forward(tokens)


class _Stream(IterableDataset):
    def __init__(self, table):
        self.table = table

    def __iter__(self):
        return iter(self.table)


def _loss(ctx, model, batch, case):
    tokens, targets, mask = batch
    logits = model(tokens).flatten(0, 1)
    each = F.cross_entropy(logits, targets.flatten(), reduction="none")
    if case.poison == (ctx.rank, batch.position.index):
        each = each * torch.nan
    kept = mask.flatten()
    return fx.Weighted((each * kept).sum(), kept.sum()) if case.weighted else each.mean()


def _by_step(ctx, batch, model, case):
    return fx.step(ctx, batch, fx.StepFns(model, lambda m, b: _loss(ctx, m, b, case)))


def _by_update(ctx, batch, model, case):
    with fx.ops.autocast(model):
        loss = _loss(ctx, model, batch, case)
    return fx.update(ctx, batch, model, loss)


def _by_parts(ctx, batch, model, case):
    with fx.ops.autocast(model):
        loss = _loss(ctx, model, batch, case)
    fx.ops.backward(loss, model, batch)
    return fx.ops.apply(model)


def _by_parts_in_blocks(ctx, batch, model, case):
    with fx.ops.sync(model, batch), fx.ops.autocast(model):
        fx.ops.backward(_loss(ctx, model, batch, case), model)
    return fx.ops.apply(model)


WAYS = {
    "step": _by_step,
    "update": _by_update,
    "parts": _by_parts,
    "parts in blocks": _by_parts_in_blocks,
}


def _run(ctx, plan, case, way):
    model = fx.wrap(
        _Net(),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    tokens, mask = token_rows(case.rows)
    table = TensorDataset(tokens[:, :-1], tokens[:, 1:], mask)
    loader = DataLoader(_Stream(table) if case.stream else table, batch_size=case.size)
    told, numbers, losses = [], [], []
    for number, epoch in enumerate(fx.shard(loader, ctx, plan).epochs(2)):
        for count, batch in enumerate(epoch):
            try:
                result = WAYS[way](ctx, batch, model, case)
            except fx.errors.StepError as error:
                told.append(str(error))
                continue
            if isinstance(result, fx.Report):
                losses += [result.loss, float(result.weight)]
                skipped = result.skipped
            else:
                skipped = result.due and not result.applied
            told.append((result.applied, skipped, batch.position))
            numbers += [] if result.grad_norm is None else [result.grad_norm]
            if number == 0 and count + 1 == case.leave:
                break
    tensors = (*model.module.parameters(), *model.module.buffers())
    held = [getattr(one, "_local_tensor", one).detach().clone() for one in tensors]
    return (told, model.optimizer.param_groups[0]["lr"]), numbers + held, losses


def both_ways(ctx, plan, case, mesh=None, way="update"):
    """Both runs on this rank: of each, what it reported, its numbers and values, and its losses."""
    with on_mesh(ctx, mesh) as placed:
        return _run(placed, plan, case, "step"), _run(placed, plan, case, way)


def check_equal(results):
    """Both runs of every rank are equal in every bit."""
    for (told, values, losses), (other_told, other_values, other_losses) in results:
        assert other_told == told
        torch.testing.assert_close(other_values, values, rtol=0, atol=0, equal_nan=True)
        if other_losses:
            torch.testing.assert_close(other_losses, losses, rtol=0, atol=0, equal_nan=True)
