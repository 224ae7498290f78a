"""Updates of replicas that die and join: which rows each computes, and when an update counts."""

import math
import zlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._display import number
from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain.backends.core.replica_digests import verify_replicas
from fxtrain.checkpoint import save
from fxtrain.checkpoint.restoring import restore_newest
from fxtrain.data import Sharded
from fxtrain.data.sharding import share_of_replica
from fxtrain.errors import CheckpointError, CollectiveError, PlanError, StepError
from fxtrain.loop.stepping import StepFns
from fxtrain.ops.devices import as_scalar
from fxtrain.ops.micro_batches import micro_batch_of
from fxtrain.ops.schedules import advance_schedulers, steps_per_update
from fxtrain.ops.weighting import loss_and_aux
from fxtrain.ops.whole_tensors import local_values
from fxtrain.replicas.healing import Progress, pack_state, unpack_state
from fxtrain.replicas.members import Members, Replicas, join
from fxtrain.replicas.rounds import Rounds, independent
from fxtrain.state import (
    Batch,
    DistContext,
    MicroBatch,
    Position,
    UpdateSpec,
    Weighted,
    WeightedLoss,
    Wrapped,
)
from fxtrain.state.context import check_connected
from fxtrain.state.wrapped import settle_buffers

# Sums that travel with the gradients: of losses, weights, non-finite losses and rows. After them:
# the replicas' histories, and how many replicas have a gradient of each parameter.
_TOTALS = 4


@attrs.frozen(kw_only=True, eq=False)
class Update:
    """One update of all replicas, equal on each but for `index` and `healed`.

    Equality and hash are by identity, since it contains a tensor.

    Attributes:
        loss: Mean over all rows of the update, or over their total weight.
        grad_norm: Total norm before clipping, if the plan clips.
        applied: Whether the optimizers ran; False if the update was skipped as non-finite.
        position: The cursor after the update.
        updates: Updates made so far.
        live: Replicas that took part.
        index: The number of this one among them. Let replica 0 write what one should write.
        healed: Whether this replica received another one's state before this update.
        attempts: How often it was computed: more than 1 if a replica was lost meanwhile.
        averaged: With `Replicas(local=...)`, whether parameters became those of an average after
            it. `loss` and `applied` are those of this replica then.
        lost: With `Replicas(local=...)`, rows whose replicas were lost before the average that they
            would have been part of; counted where the others exchange something.
    """

    loss: float
    grad_norm: Tensor | None = attrs.field(default=None, repr=number)
    applied: bool
    position: Position
    updates: int
    live: int
    index: int
    healed: bool
    attempts: int
    averaged: bool = False
    lost: int = 0


def train(
    ctx: DistContext,
    fns: StepFns[Any],
    loader: Sharded[object],
    replicas: Replicas,
    *,
    updates: int,
    folder: StrPath | None = None,
    save_every: int | None = None,
) -> Iterator[Update]:
    """Train together with the other replicas of a run, of which some may die, and others join.

    Each replica is a launch of its own: the ranks of `ctx` hold one copy of the model, under
    `fx.Single`, `fx.DDP` or `fx.FSDP`. At an update, all rows of the global batch of `count`
    replicas are divided among those that are there; gradients are added up over them. If one is
    lost on the way, the others divide the rows again and repeat the update. One that starts,
    for the first time or again, receives parameters, optimizer and position from another replica,
    in bits equal to its own, and takes part from the next update on. No row is lost or repeated.

    With `Replicas(local=...)` each replica makes its updates independently, of its part of the
    rows, and all of them communicate only for an average. If a replica dies, its rows since the
    last average are lost, and the mean is that of the others. One that joins receives the outer
    parameters and the state of the outer optimizer there, and trains from the next update on.

    Args:
        ctx: The ranks of this replica.
        fns: The model and its loss; aux metrics are dropped.
        loader: From `fx.shard` or `fx.tokens`, for the ranks of this replica. Its batch size is
            that of a rank, or with `batch="global"` that of all ranks of all replicas.
        replicas: How many there are, and the address at which they connect.
        updates: Updates of the whole run, including those before a restart.
        folder: Where replica 0 saves checkpoints, and from where a run in which no replica is left
            continues; shared by all replicas.
        save_every: Updates between two checkpoints, which are written after an average where
            replicas train independently. The last update is saved in any case, and the newest one
            where too few replicas are left.

    Yields:
        Each update that counts.

    Effects:
        Per update, a request to the lighthouse and an all-reduce of all gradients between the
        replicas, beside what the strategy communicates between its own ranks. With
        `Replicas(local=...)` that is so per average, of parameters.

    Raises:
        CollectiveError: no lighthouse answers, or fewer than `min_count` replicas were ready in
            time; the latter with a `folder` after saving there.
        MissingPackageError: torchft is not installed.
        PlanError: the plan's strategy, mesh, precision or data cannot train so, or this replica's
            plan or versions differ from those of the others.
        StepError: non-finite values under `nonfinite="raise"`, on every replica.

    Example:
        >>> import fxtrain as fx, torch
        >>> def run(ctx, loader):
        ...     net = torch.nn.Linear(1, 1)
        ...     model = fx.wrap(net, ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        ...     fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        ...     team = fx.replicas.Replicas(count=2, lighthouse="http://node0:29510")
        ...     rows = fx.shard(loader, ctx)
        ...     for update in fx.replicas.train(ctx, fns, rows, team, updates=1000):
        ...         if update.index == 0 and update.updates % 100 == 0:
        ...             print(update.updates, update.loss, update.live)
    """
    check_connected("replicas.train", ctx)
    model = fns.model
    _check_plan(ctx, model)
    rounds = None
    if replicas.local is not None:
        model, rounds = independent(model, replicas.local, updates)
    saved = None if folder is None else restore_newest(folder, ctx, model)
    start = Position() if saved is None else saved.position
    run = _Run(
        ctx=ctx,
        fns=attrs.evolve(fns, model=model),
        loader=loader,
        updates=updates,
        progress=Progress(position=start, averaged=start.updates > 0, samples=start.samples),
        rounds=rounds,
    )
    run.part(1, 0, start)  # a loader that cannot be split is an error before anything waits
    members = join(ctx, replicas, run.pack, run.unpack)
    return _updates(run, members, updates, folder, save_every)


def _updates(
    run: "_Run", members: Members, updates: int, folder: StrPath | None, save_every: int | None
) -> Iterator[Update]:
    saved = None
    live, reached = 0, run.position.updates
    try:
        while run.position.updates < updates:
            try:
                update = run.next_update(members)
            except CollectiveError as error:
                if folder is not None and saved != run.position:
                    try:
                        save(folder, run.ctx, run.model, position=run.position)
                    except CheckpointError as other:  # such as: another replica is saving
                        error.add_note(f"This replica's state: {other}")
                raise
            if update is None:
                return
            if update.live != live:
                live = update.live
                ops.log(run.ctx).info(
                    "Update %d: %d of %d replicas.", update.updates, live, members.settings.count
                )
            if run.rounds is None or update.averaged:
                due = save_every and update.updates // save_every > reached // save_every
                reached = update.updates
                if folder is not None and update.index == 0 and (due or reached >= updates):
                    save(folder, run.ctx, run.model, position=run.position)
                    saved = run.position
            yield update
    finally:
        members.close()


@attrs.define(kw_only=True, eq=False)
class _Run:
    """How far this replica is; each update, and another replica's state, change it."""

    ctx: DistContext
    fns: StepFns[Any]
    loader: Sharded[Any]
    updates: int  # of the whole run
    progress: Progress
    rounds: Rounds | None  # of replicas that train independently
    averaged_once: bool = False  # the others
    healed: bool = False  # by another one's state since the last update
    # By number of parts of the global batches and part: its batches, and the cursor after the last.
    open: dict[tuple[int, int], tuple[Iterator[Batch], Position]] = attrs.field(factory=dict)

    @property
    def model(self) -> Wrapped:
        """The model."""
        return self.fns.model

    @property
    def position(self) -> Position:
        """The cursor after the last update."""
        return self.progress.position

    def pack(self) -> Tensor:
        """The state, for a replica that joins."""
        if self.rounds is None:
            return pack_state(self.model, self.progress)
        return pack_state(self.model, self.progress, *self.rounds.under_way())

    def unpack(self, data: Tensor) -> None:
        """Continue from another replica's state."""
        local = None if self.rounds is None else self.rounds.config
        self.progress, tensors, facts = unpack_state(self.model, data, local)
        if self.rounds is not None:
            self.rounds.enter(tensors, facts)
        self.healed = True

    def next_update(self, members: Members) -> Update | None:
        """Make one update, as often as replicas are lost while it is computed.

        None if this replica has joined where the others ended.
        """
        rounds = self.rounds
        if rounds is not None and not self.averaged_once:
            self._average(members, rounds)
            self.averaged_once = True
            if self.position.updates >= rounds.updates:
                return None
        attempts = 0
        while True:
            attempts += 1
            if rounds is None:
                members.gather(self.position.updates, self.position.updates + 1)
            self.model.strategy.begin(self.model)
            totals, batch = self._gradients(members)
            if rounds is not None:
                break
            totals = self._sum_gradients(totals, members)
            if members.commit():
                break
        healed, self.healed = self.healed, False
        loss, weight, bad, rows = totals.tolist()
        applied, grad_norm = self._apply(batch, weight, members, bad=bad > 0)
        averaged_once: dict[str, Any] = {}
        if rounds is None:
            history = zlib.crc32(totals.cpu().numpy().tobytes())
            self.progress = attrs.evolve(self.progress, history=history)
        else:
            rounds.count(weight, rows)
            if rounds.ends_at(self.position):
                averaged_once = self._average(members, rounds)
        # Healed where replicas average, it is where the others are, and has no update of its own.
        return Update(
            loss=loss / weight if weight else math.nan,
            grad_norm=grad_norm,
            applied=applied,
            position=self.position,
            updates=self.position.updates,
            healed=healed,
            **{"live": members.live, "index": members.index, "attempts": attempts, **averaged_once},
        )

    def _average(self, members: Members, rounds: Rounds) -> dict[str, Any]:
        """Gather the replicas, and average what is due over those that are there."""
        rounds.end_traffic(members)
        attempts = 0
        while True:
            attempts += 1
            updates = self.position.updates
            members.gather(2 * updates + self.progress.averaged, updates)
            if self.progress.averaged or not rounds.ends_at(self.position):
                return {}
            rounds.begin(self.position)
            rows, counters = rounds.exchange(members, self.progress)
            if members.commit():
                break
            rounds.forget()
        averaged, history = rounds.apply(self.position, counters)
        samples = self.position.samples
        lost = samples - self.progress.samples - round(rows)
        self.progress = attrs.evolve(self.progress, averaged=True, history=history, samples=samples)
        return {"averaged": averaged, "lost": lost, "attempts": attempts}

    def window(self, parts: int, part: int, position: Position) -> Iterator[Batch]:
        """The batches of one part of the update after a position."""
        batches, reached = self.open.pop((parts, part), (None, None))
        if batches is None or reached != position:  # another replica had this part meanwhile
            batches = self.part(parts, part, position).updates(self.updates)
        ranks = self.ctx.world_size
        own = slice(part * ranks, (part + 1) * ranks)
        for batch in batches:
            yield attrs.evolve(batch, rows=batch.rows[own], sizes=batch.sizes[own])
            if not batch.position.micro:
                self.open[parts, part] = batches, batch.position
                return

    def part(self, parts: int, part: int, position: Position) -> Sharded[Any]:
        """The loader of one part, from a position on."""
        return share_of_replica(self.loader, self.model.plan, part, parts).at(position)

    def _gradients(self, members: Members) -> tuple[Tensor, Batch]:
        """Compute the gradients of this replica's parts of the update, as sums over their rows.

        Returns the sums of losses, weights, non-finite losses and rows, and the last batch.
        """
        data, keep = self.ctx.axis("data"), members.settings.batch == "keep"
        parts = members.settings.count if keep else members.live
        assigned = range(members.index, parts, members.live)
        totals = torch.zeros(_TOTALS, dtype=torch.float64, device=self.ctx.device)
        batch = None
        if not assigned:  # more replicas than parts: it only follows
            *_, batch = self.window(parts, 0, self.position)
        for part in assigned:
            for batch in self.window(parts, part, self.position):
                last = part == assigned[-1] and not batch.position.micro
                weighted = self._run(micro_batch_of(batch, self.model, closes=last))
                weight = as_scalar(weighted.weight, totals).double()
                bad = ~torch.isfinite(weighted.mean)
                rows = torch.tensor(batch.rows[data.rank], dtype=torch.float64, device=bad.device)
                total = weighted.mean.double() * weight
                totals += torch.stack([total, weight, bad.double(), rows])
        assert batch is not None  # a window has at least one batch
        return ops.reduce(totals, self.ctx.axis("loss"), op="sum"), batch

    def _run(self, micro_batch: MicroBatch) -> WeightedLoss:
        """Forward and backward, which no window of the model counts."""
        self.model.status.running = micro_batch
        try:
            return self.model.strategy.run(self.model, micro_batch, self._compute_loss)
        finally:
            self.model.status.running = None

    def _sum_gradients(self, totals: Tensor, members: Members) -> Tensor:
        """Add up gradients over the replicas, in place, and the numbers that travel with them."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        present = [parameter.grad is not None for parameter in parameters]
        more = torch.tensor([self.progress.history, *present], dtype=totals.dtype, device="cpu")
        facts = torch.cat([totals, more.to(totals.device)])
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not members.sum([facts, *(local_values(parameter.grad) for parameter in parameters)]):
            return totals
        history, *replicas = facts[_TOTALS:].tolist()
        members.check_history(history, self.progress.history, self.position.updates + 1)
        for parameter, count in zip(parameters, replicas, strict=True):
            if not count:  # an optimizer leaves it alone, as where one process trains
                parameter.grad = None
        return facts[:_TOTALS]

    def _compute_loss(self, model: Wrapped, batch: Batch) -> WeightedLoss:
        """The loss times its weight, so that gradients of parts add up to the sum over all rows."""
        with ops.autocast(model):
            out = self.fns.loss(model, batch)
        loss, _ = loss_and_aux(out)
        rows, ranks = batch.sizes[self.ctx.axis("data").rank], self.ctx.axis("loss").world_size
        if isinstance(loss, Weighted):
            total, weight = loss.total, as_scalar(loss.weight, self.model.window.sums).reshape(())
            mean = total.detach() / torch.where(weight == 0, 1.0, weight).to(total.dtype)
        else:
            total, weight = loss * rows, torch.tensor(float(rows), device=loss.device)
            mean = loss.detach()
        if not rows:  # placeholders, whose values may be anything
            weight, mean = torch.zeros_like(weight), torch.zeros_like(mean)
        # The strategy averages over the ranks of this replica.
        part = total * (ranks if rows else 0.0)
        return WeightedLoss(loss=part, mean=mean, weight=weight)

    def _apply(
        self, batch: Batch, weight: float, members: Members, *, bad: bool
    ) -> tuple[bool, Tensor | None]:
        """Update the parameters, and move on to the next update."""
        model, plan = self.model, self.model.plan
        skip = plan.nonfinite != "ignore" and ops.any_rank(
            bad or not model.strategy.finite(model), self.ctx
        )
        spec = UpdateSpec(
            scale=1 / weight if weight else 0.0,
            clip_norm=plan.clip_norm,
            clip_value=plan.clip_value,
            skip=skip,
            keep_parameters=self.rounds is not None and not weight,
        )
        outcome = model.strategy.apply(model, spec)
        settle_buffers(model, keep=outcome.applied)
        rows = batch.position.samples - self.position.samples
        self.progress = attrs.evolve(self.progress, position=batch.position, averaged=False)
        model.window.end()
        if plan.verify_replicas and not model.window.updates % plan.verify_replicas:
            verify_replicas(model)
        if skip and plan.nonfinite == "raise":
            raise StepError(
                f"Non-finite values before update {self.position.updates} of {members.live} "
                f"replicas (epoch {self.position.epoch}, index {self.position.index}). Update "
                f'skipped. Use Plan(nonfinite="skip") to continue without raising.',
                code="FX501",
            )
        if outcome.applied and model.schedulers:
            steps = steps_per_update(model, rows)
            if plan.schedule == "ranks" and plan.batch == "per_rank":
                steps *= members.settings.count
            advance_schedulers(batch, model, steps)
        return outcome.applied, outcome.grad_norm


def _check_plan(ctx: DistContext, model: Wrapped) -> None:
    """Refuse what the replicas cannot add up."""
    plan = model.plan
    mesh, refused = ctx.mesh, None
    if not model.strategy.grads_in_module:
        refused = f"strategy {model.strategy.name}. Use fx.Single(), fx.DDP() or fx.FSDP()"
    elif mesh.tensor * mesh.context * mesh.pipeline > 1:
        refused = f"{shown(mesh)}. Use a mesh of data ranks within a replica"
    elif plan.local is not None:
        refused = (
            f"local={shown(plan.local)}, which is for the ranks of one launch. Use "
            f"fx.replicas.Replicas(local=...)"
        )
    elif plan.precision.compute == "fp16":
        refused = 'precision="fp16", whose loss scale is of one replica. Use precision="bf16"'
    elif plan.schedule == "epoch" or plan.weigh_by == "batches":
        refused = 'schedule="epoch" and weigh_by="batches". Use the defaults'
    elif not model.optimizers:
        refused = "a model without an optimizer. Pass one to fx.wrap"
    if refused is not None:
        raise PlanError(f"replicas.train: replicas that die and join do not support {refused}.")
