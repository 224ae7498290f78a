"""Replicas as threads of this process, which die and join at updates, beside a real lighthouse."""

import contextlib
import threading
import time
from collections import defaultdict

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.replicas import training
from fxtrain.replicas.rounds import Rounds
from tests._patience import patience

ROWS = 44
BATCH = 3


class Died(Exception):
    """A replica whose process would have been killed."""


@attrs.frozen(kw_only=True)
class Life:
    """When a replica starts, after an update of replica 0, and in which update it dies."""

    joins: int = 0
    dies: int | None = None


@attrs.define
class Diary:
    """What one replica did.

    Attributes:
        updates: What it yielded.
        rows: Numbers of its rows, by update; of the last attempt.
        parameters: After each update.
        outer: Outer parameters and momentum after each exchange, of a run with `local`.
        sent: The same, where it was sent to a replica that joined.
        entered: The same, where it was received.
        error: What ended it, if anything did.
    """

    updates: list = attrs.field(factory=list)
    rows: dict = attrs.field(factory=lambda: defaultdict(list))
    parameters: dict = attrs.field(factory=dict)
    outer: dict = attrs.field(factory=dict)
    sent: list = attrs.field(factory=list)
    entered: list = attrs.field(factory=list)
    error: BaseException | None = None


def net(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 2)
    return layers


def loader(batch_size=BATCH):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    rows = TensorDataset(torch.arange(ROWS), x, x.sum(1, keepdim=True).sin())
    return DataLoader(rows, batch_size=batch_size, shuffle=True)


def wrapped(ctx, plan, seed, optimizer=None):
    return fx.wrap(
        net(seed),
        ctx,
        plan,
        optimizer=optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2)),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    )


def loss_of(model, batch, *, weighted):
    _, x, y = batch
    if not weighted:
        return F.mse_loss(model(x), y)
    weight = batch[0].double()[:, None] + 1
    return fx.Weighted((weight * (model(x) - y).square()).sum(), weight.sum())


def alone(plan, count, updates, *, weighted=False):
    """Parameters, rows and position after each update of one process with all rows."""
    diary = Diary()
    with fx.detect(env={}, device="cpu") as ctx:
        model = wrapped(ctx, plan, 0)

        def loss(model, batch):
            diary.rows[model.window.updates + 1] += batch[0].tolist()
            return loss_of(model, batch, weighted=weighted)

        fns = fx.StepFns(model=model, loss=loss)
        for batch in fx.shard(loader(BATCH * count), ctx, plan).updates(updates):
            report = fx.step(ctx, batch, fns)
            if not report.position.micro:
                diary.updates.append(report)
                diary.parameters[report.updates] = _values(model)
    return diary


@attrs.define
class _Team:
    """Replicas that live in threads."""

    plan: fx.Plan
    lives: list
    updates: int
    settings: fx.replicas.Replicas
    weighted: bool
    folder: object
    optimizer: object = None
    diaries: list = attrs.field(factory=list)
    threads: list = attrs.field(factory=list)

    def start(self, update):
        """Start the replicas that join after an update of replica 0."""
        for number, life in enumerate(self.lives):
            if life.joins == update:
                self.threads.append(threading.Thread(target=self._live, args=(number,)))
                self.threads[-1].start()
                time.sleep(0.3 * patience() if update else 0)  # it asks the lighthouse meanwhile

    def _live(self, number):
        try:
            with fx.detect(env={}, device="cpu") as ctx:
                self._train(ctx, number, self.diaries[number], self.lives[number])
        except Died:
            pass
        except BaseException as error:  # raised again by the test
            self.diaries[number].error = error

    def _train(self, ctx, number, diary, life):
        model = wrapped(ctx, self.plan, life.joins, self.optimizer)
        HERE.diary = diary

        def loss(model, batch):
            now = model.window.updates + 1
            if life.dies is not None and now >= life.dies:
                raise Died
            diary.rows[now] += batch[0][batch.valid].tolist()
            return loss_of(model, batch, weighted=self.weighted)

        fns = fx.StepFns(model=model, loss=loss)
        rows = fx.shard(loader(), ctx, self.plan)
        for update in fx.replicas.train(
            ctx, fns, rows, self.settings, updates=self.updates, folder=self.folder
        ):
            diary.updates.append(update)
            diary.parameters[update.updates] = _values(model)
            if number == 0:
                self.start(update.updates)
                time.sleep(0.02)


HERE = threading.local()  # the diary of the replica that a thread is


@attrs.define(kw_only=True, eq=False)
class _Noted(Rounds):
    """Averages that write the outer state into the diary of their replica."""

    diary: Diary

    def _outer(self):
        parts = [*self.now.anchor.values(), *self.now.momentum.values()]
        parts = parts or self.now.parameters.values()
        return torch.cat([one.detach().flatten().clone() for one in parts])

    def apply(self, position, counters):
        found = super().apply(position, counters)
        self.diary.outer[position.updates] = self._outer()
        return found

    def under_way(self):
        self.diary.sent.append(self._outer())
        return super().under_way()

    def enter(self, tensors, facts):
        super().enter(tensors, facts)
        self.diary.entered.append(self._outer())
        if self.now.anchor:  # the newcomer trains from the outer parameters on
            held = torch.cat([one.detach().flatten() for one in self.now.parameters.values()])
            assert torch.equal(self._outer()[: len(held)], held)
        assert all(not one.count_nonzero() for one in self.now.residual.values())


@contextlib.contextmanager
def noted():
    """Have diaries tell of the outer state of replicas that train independently."""

    def independent(model, local, updates):
        model, rounds = rounds_of(model, local, updates)
        values = {field.name: getattr(rounds, field.name) for field in attrs.fields(Rounds)}
        return model, _Noted(**values, diary=HERE.diary)

    rounds_of = training.independent
    training.independent = independent
    try:
        yield
    finally:
        training.independent = rounds_of


def together(
    plan,
    lives,
    updates,
    lighthouse,
    *,
    batch="keep",
    weighted=False,
    folder=None,
    local=None,
    optimizer=None,
    min_count=1,
):
    """Run replicas through their lives, and return what each did.

    Replica 0 starts at once and does not die.
    """
    count = sum(not life.joins for life in lives)
    settings = fx.replicas.Replicas(
        count=count,
        lighthouse=lighthouse,
        batch=batch,
        timeout_s=10 * patience(),
        heartbeat_s=60,
        local=local,
        min_count=min_count,
    )
    team = _Team(plan, lives, updates, settings, weighted, folder, optimizer)
    team.diaries = [Diary() for _ in lives]
    with noted():
        team.start(0)
        for thread in team.threads:
            thread.join(60 * patience())
    assert not any(thread.is_alive() for thread in team.threads)
    for diary in team.diaries:
        if diary.error is not None:
            raise diary.error
    return team.diaries


def _values(model):
    return torch.cat([one.detach().flatten().clone() for one in model.parameters()])
