"""Runs of the small transformer that laws compare: on ranks, simulated or real, and a reference."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from fxtrain import ops
from fxtrain.backends import gathered, unwrap, weights, wrap
from fxtrain.checkpoint import restore, save
from fxtrain.data import shard
from fxtrain.loop import StepFns, step
from fxtrain.ops import detect
from fxtrain.ops.micro_batches import micro_batch_of
from fxtrain.state import (
    Batch,
    DistContext,
    Mesh,
    Plan,
    Report,
    Strategy,
    Weighted,
    WeightedLoss,
    Wrapped,
)
from fxtrain.testing.cluster import MeshContexts
from fxtrain.testing.transformer import Transformer

_UPDATES = 3
# Updates and micro-batches after which whole weights are taken out, of windows of two.
_LOOKS = ((0, 1), (2, 0), (_UPDATES, 0))


@attrs.frozen(kw_only=True)
class Task:
    """A training run of the small transformer, under a plan or as a reference.

    Attributes:
        plan: The plan; the reference uses its accumulation and clipping.
        mesh: Ranks per axis; None uses the context unchanged.
        size: Rows in a rank's micro-batch.
        weighted: Average over tokens, whose number differs between rows.
        seed: Seed of the model's values; each rank adds its number.
        frozen: Whether one parameter is frozen.
        dtype: Dtype of the model.
        poke_at: Update, counted from 1, at which the last data rank overflows one element of a
            gradient.
        poke: What that entry is multiplied by: 3e38 is finite in fp32, but not under a loss
            scale; 1e300 is in float64 only.
        decay: Factor of the learning rate after each update; None has no scheduler.
        parts: Train by the parts of a step (`ops.sync`, `ops.backward`, `ops.apply`), in place of
            `step`.
        look: Take whole weights out, and lend the module out, between the micro-batches of the
            first update, after the second and at the end.
    """

    plan: Plan
    mesh: Mesh | None = None
    size: int = 2
    weighted: bool = False
    seed: int = 0
    frozen: bool = False
    dtype: torch.dtype = torch.float64
    poke_at: int | None = None
    poke: float = 3e38
    decay: float | None = None
    parts: bool = False
    look: bool = False


@attrs.frozen(kw_only=True)
class Run:
    """The result of a task.

    Attributes:
        losses: Mean loss over all rows, or tokens, of every update.
        norms: Total gradient norm of every update, if the plan clips.
        applied: Whether each update ran.
        parameters: Full parameters by name.
        tied: Whether the head and the embedding are one parameter while wrapped.
        scale: Loss scale at the end; None without one.
        lr: Learning rate at the end.
        seen: Full weights after the last micro-batch, if the task reads them.
    """

    losses: list[float]
    norms: list[float]
    applied: list[bool]
    parameters: dict[str, Tensor]
    tied: bool = True
    scale: float | None = None
    lr: float | None = None
    seen: dict[str, Tensor] = attrs.field(factory=dict)


def on_ranks(ctx: DistContext, task: Task) -> Run:
    """Train under the task's plan; call it on every rank of a pool."""
    with on_mesh(ctx, task.mesh) as placed:
        return trained(placed, ctx.rank, task)


def stopped_and_resumed(ctx: Any, task: Task, folder: str) -> tuple[Run, Run]:
    """Train and save halfway, then resume with a model that has other initial values."""
    with on_mesh(ctx, task.mesh) as placed:
        whole = trained(placed, ctx.rank, task, save_to=folder)
        other = attrs.evolve(task, seed=task.seed + 100)
        return whole, trained(placed, ctx.rank, other, start_from=folder)


def trained(
    placed: DistContext,
    rank: int,
    task: Task,
    *,
    save_to: str = "",
    start_from: str = "",
    strategy: Strategy | None = None,
) -> Run:
    """Train in a context; if asked, save halfway, start from there, or use a row of one's own."""
    data = placed.axis("data")
    own = attrs.evolve(task, seed=task.seed + rank)
    decay = None if task.decay is None else _decaying(task.decay)
    model = wrap(
        new_model(own), placed, task.plan, optimizer=sgd, scheduler=decay, strategy=strategy
    )
    tokens, mask = token_rows(_count(task, data.world_size))
    table = TensorDataset(tokens[:, :-1], tokens[:, 1:], mask)
    loader = shard(DataLoader(table, batch_size=task.size), placed, task.plan)
    if start_from:
        loader = loader.at(restore(start_from, placed, model).position)
    poked = task.poke_at if data.is_last else None
    fns = StepFns(model=model, loss=_loss(task, poked))
    train = _parts_of_step if task.parts else step
    reports: list[Report] = []
    seen: dict[str, Tensor] = {}
    for epoch in loader.epochs(1):
        for batch in epoch:
            reports.append(train(placed, batch, fns))
            now = reports[-1].position
            if task.look and (now.updates, now.micro) in _LOOKS:
                seen = _whole_weights(model)
            if save_to and now.micro == 0 and now.updates == _UPDATES // 2:
                save(save_to, placed, model, position=now)
    return attrs.evolve(_result(task, model, reports), seen=seen)


def _decaying(factor: float) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)


def _parts_of_step(_: DistContext, batch: Batch, fns: StepFns) -> Report:
    """What `step` does, by its parts."""
    model = fns.model
    with ops.sync(model, batch):
        with ops.autocast(model):
            loss: Any = fns.loss(model, batch)
        ops.backward(loss, model)
    result = ops.apply(model)
    weighted = isinstance(loss, Weighted)
    return Report(
        loss=(loss.total / loss.weight if weighted else loss).detach(),
        weight=loss.weight if weighted else len(batch.valid),
        grad_norm=result.grad_norm,
        applied=result.applied,
        skipped=result.due and not result.applied,
        position=batch.position,
    )


def _whole_weights(model: Wrapped) -> dict[str, Tensor]:
    """Full weights, checked against `gathered`, whose module is then modified."""
    seen = dict(weights(model, device="cpu"))
    with gathered(model) as module, torch.no_grad():
        state = module.state_dict()
        assert list(state) == list(seen), f"the module has {list(state)}, weights {list(seen)}"
        for name, value in state.items():
            assert torch.equal(value.cpu(), seen[name]), f"{name} differs in the module"
        for value in state.values():
            value.zero_()
        module.eval()
    return seen


def _result(task: Task, model: Wrapped, reports: list[Report]) -> Run:
    """The result over all ranks; unwraps the model."""
    losses = model.ctx.axis("loss")
    totals = torch.stack([_total(report) for report in reports])
    totals = ops.reduce(totals, losses, op="sum").unflatten(0, (-1, task.plan.accumulate)).sum(1)
    names = model.module.named_parameters(remove_duplicate=False)
    ids = {name: id(parameter) for name, parameter in names}
    tied = ids.get("head.weight") == ids.get("embed.weight")
    scale = None if model.scaler is None else model.scaler.get_scale()
    lr = model.optimizers[0].param_groups[0]["lr"]
    module = unwrap(model)
    return Run(
        losses=(totals[:, 0] / totals[:, 1]).tolist(),
        norms=[float(r.grad_norm) for r in reports if r.grad_norm is not None],
        applied=[report.applied for report in reports if report.applied or report.skipped],
        parameters={n: p.detach().cpu().clone() for n, p in module.named_parameters()},
        tied=tied,
        scale=scale,
        lr=lr,
    )


def backward_once(placed: DistContext, model: Any) -> None:
    """Run forward and backward of one batch, without an update."""

    def compute_loss(model: Any, batch: Any) -> WeightedLoss:
        loss = model(batch[0]).sum()
        return WeightedLoss(loss=loss, mean=loss.detach(), weight=1)

    micro_batch = micro_batch_of(one_batch(placed, model), model, closes=True)
    model.strategy.run(model, micro_batch, compute_loss)


def one_batch(placed: DistContext, model: Any) -> Batch:
    """A rank's batch of inputs."""
    tokens, _ = token_rows(4 * placed.axis("data").world_size)
    loader = DataLoader(TensorDataset(tokens[:, :-1]), batch_size=4)
    return next(iter(shard(loader, placed, model.plan)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """A block that computes with one thread, as ranks of a pool do, so that sums are the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def reference(task: Task, data_ranks: int) -> Run:
    """Train in one process with plain torch, each update in one batch.

    Skips the update at which the task overflows a gradient.
    """
    model = new_model(task)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    tokens, mask = token_rows(_count(task, data_ranks))
    stride = len(tokens) // _UPDATES
    losses: list[float] = []
    norms: list[float] = []
    applied = [update != task.poke_at for update in range(1, _UPDATES + 1)]
    for apply, low in zip(applied, range(0, len(tokens), stride), strict=True):
        rows = tokens[low : low + stride]
        each, kept = _token_losses(model, rows[:, :-1], rows[:, 1:], mask[low : low + stride])
        loss = (each * kept).sum() / kept.sum() if task.weighted else each.mean()
        loss.backward()
        if task.plan.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), task.plan.clip_norm)
            norms.append(float(norm))
        if task.plan.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), task.plan.clip_value)
        if apply:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return Run(losses=losses, norms=norms, applied=applied, parameters=parameters)


@contextmanager
def on_mesh(ctx: Any, mesh: Mesh | None) -> Iterator[DistContext]:
    """A context of the same ranks with a mesh.

    The last one stays open for the next block with the same mesh, and so do torch's caches for
    it. After an error it is closed.
    """
    if mesh is None:
        yield ctx
        return
    kept = ctx.comm.slot(MeshContexts)
    placed = kept.get(mesh)
    if placed is None or not _works(placed):
        for last in kept.values():  # its groups cost time while they are open
            last.comm.finish(None)
        placed = ops.detect({}, device=ctx.device.type, mesh=mesh, timeout_s=ctx.comm.timeout_s)
    kept.clear()
    with ExitStack() as closing:
        closing.enter_context(placed)
        yield placed
        closing.pop_all()
    kept[mesh] = placed


def _works(placed: DistContext) -> bool:
    state = placed.comm.state
    return not any(each.closed or each.failure for each in (state, *state.children))


def new_model(task: Task) -> Transformer:
    return Transformer(seed=task.seed, frozen=task.frozen, dtype=task.dtype)


def sgd(params: Any) -> torch.optim.Optimizer:
    # Not Adam, which turns rounding errors of gradients near zero into full steps.
    return torch.optim.SGD(params, lr=0.3, momentum=0.8)


def _count(task: Task, data_ranks: int) -> int:
    return _UPDATES * task.plan.accumulate * task.size * data_ranks


def token_rows(count: int) -> tuple[Tensor, Tensor]:
    """Token rows, and a mask of their targets with a different number in each row."""
    generator = torch.Generator().manual_seed(count)
    shape = (count, Transformer.LENGTH + 1)
    tokens = torch.randint(0, Transformer.VOCABULARY, shape, generator=generator)
    ends = 1 + torch.arange(count) * 5 % Transformer.LENGTH
    return tokens, torch.arange(Transformer.LENGTH) < ends[:, None]


def _token_losses(
    model: Any, tokens: Tensor, targets: Tensor, mask: Tensor, poke: float | None = None
) -> tuple[Tensor, Tensor]:
    logits = model(tokens, poke) if poke is not None else model(tokens)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each, mask.flatten()


def _loss(task: Task, poke_at: int | None) -> Callable[[Any, Any], Any]:
    def loss(model: Any, batch: Any) -> Any:
        poke = task.poke if batch.position.updates == poke_at else None
        tokens, targets, mask = batch
        each, kept = _token_losses(model, tokens, targets, mask, poke)
        # Not every device has autocast rules for losses.
        each = each.to(torch.promote_types(each.dtype, torch.float32))
        return Weighted((each * kept).sum(), kept.sum()) if task.weighted else each.mean()

    return loss


def _total(report: Any) -> Tensor:
    weight = torch.as_tensor(report.weight, dtype=torch.float64, device=report.loss.device)
    return torch.stack([report.loss.double() * weight, weight])


@contextmanager
def fake_world(n: int, *, rank: int = 0, mesh: Mesh | None = None) -> Iterator[DistContext]:
    """The context of one rank of `n`, whose collectives transfer nothing.

    Effects:
        Opens and closes torch's default process group in this process.

    Example:
        >>> from fxtrain.testing import fake_world
        >>> with fake_world(1024, rank=3) as ctx:
        ...     ctx.rank, ctx.world_size
        (3, 1024)
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    try:
        yield detect({}, device="cpu", mesh=mesh)
    finally:
        dist.destroy_process_group()
