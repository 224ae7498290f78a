"""What replicas cannot train with, and what they say."""

import sys
import threading

import pytest
import torch

import fxtrain as fx
from fxtrain.checkpoint.folder_lock import acquire
from fxtrain.checkpoint.storage import open_storage
from fxtrain.errors import PlanError
from fxtrain.replicas import healing
from fxtrain.replicas.rounds import independent
from tests._errors import raises_code
from tests._slow import slow_after
from tests.replicas._team import Life, loader, loss_of, together, wrapped

LIGHTHOUSE = "http://127.0.0.1:9"


def _train(ctx, plan, team, updates=3, folder=None, loss=None, *, optimizer=True):
    model = wrapped(ctx, plan, 0) if optimizer else fx.wrap(torch.nn.Linear(4, 1), ctx, plan)
    fns = fx.StepFns(model=model, loss=loss or (lambda m, b: loss_of(m, b, weighted=False)))
    return list(
        fx.replicas.train(
            ctx, fns, fx.shard(loader(), ctx, model.plan), team, updates=updates, folder=folder
        )
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"count": 0}, "count"),
        ({"count": 2, "min_count": 3}, "a run of 2 replicas never has that many"),
        ({"count": 2, "batch": "grow"}, "batch"),
        ({"count": 2, "timeout_s": 0}, "timeout_s"),
        ({"count": 2, "lighthouse": "node0"}, "is no address"),
    ],
)
def test_settings(settings, text):
    with pytest.raises((PlanError, ValueError), match=text):
        fx.replicas.Replicas(**{"lighthouse": LIGHTHOUSE, **settings})


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (fx.Plan(precision="fp16"), "fp16"),
        (fx.Plan(local=fx.LocalSGD(every=2)), r"Use fx\.replicas\.Replicas\(local="),
        (fx.Plan(data=fx.Data(source="dispatch")), "dispatch"),
    ],
)
def test_plans(ctx, plan, text):
    with pytest.raises(fx.FxError, match=text):
        _train(ctx, plan, fx.replicas.Replicas(count=2, lighthouse=LIGHTHOUSE))


def test_a_model_without_an_optimizer(ctx):
    with raises_code("FX200", "optimizer"):
        team = fx.replicas.Replicas(count=2, lighthouse=LIGHTHOUSE)
        _train(ctx, fx.Plan(), team, optimizer=False)


def test_without_torchft(ctx, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft", None)
    with raises_code("FX800", "'fxtrain[replicas]'"):
        _train(ctx, fx.Plan(), fx.replicas.Replicas(count=2, lighthouse=LIGHTHOUSE))


def test_no_lighthouse(ctx, torchft):
    team = fx.replicas.Replicas(count=2, lighthouse=LIGHTHOUSE, timeout_s=0.5)
    with raises_code("FX302", "http://127"):
        _train(ctx, fx.Plan(), team)


@pytest.mark.parametrize("local", slow_after(1, [None, fx.DiLoCo(every=2)]))
def test_too_few_replicas_end_the_run_after_saving_it(ctx, lighthouse, tmp_path, local):
    team = fx.replicas.Replicas(
        count=2, min_count=2, lighthouse=lighthouse, timeout_s=0.2, local=local
    )
    with raises_code("FX302", "2 replicas", "1 were"):
        _train(ctx, fx.Plan(seed=3), team, folder=tmp_path / "run")
    assert fx.latest(tmp_path / "run") is not None


@pytest.mark.slow
def test_a_replica_that_is_left_while_another_one_saves(ctx, lighthouse, tmp_path):
    team = fx.replicas.Replicas(count=2, min_count=2, lighthouse=lighthouse, timeout_s=0.2)
    lock = acquire(open_storage(tmp_path))
    try:
        with raises_code("FX302", "1 were") as caught:
            _train(ctx, fx.Plan(seed=3), team, folder=tmp_path)
    finally:
        lock.release()
    assert "is in use by process" in caught.value.__notes__[0]


def test_a_run_continues_from_its_folder(lighthouse, tmp_path, caplog):
    plan = fx.Plan(seed=3)
    whole = together(plan, [Life(), Life()], 6, lighthouse)[0].parameters[6]
    together(plan, [Life(), Life()], 4, lighthouse, folder=tmp_path / "run")
    rest = together(plan, [Life(), Life()], 6, lighthouse, folder=tmp_path / "run")
    assert [one.updates for one in rest[0].updates] == [5, 6]
    assert torch.equal(rest[0].parameters[6], whole)
    again = together(plan, [Life(), Life()], 6, lighthouse, folder=tmp_path / "run")
    assert not again[0].updates
    # torchft warns of it in each quorum, where torch has no recorder of NCCL's calls.
    assert not [text for text in caplog.messages if "flight recorder" in text]


def test_a_replica_with_another_plan_cannot_join(lighthouse):
    team = fx.replicas.Replicas(count=1, lighthouse=lighthouse, timeout_s=10)
    joined, errors = threading.Event(), []

    def join():
        with fx.detect(env={}, device="cpu") as ctx, pytest.raises(PlanError) as caught:
            _train(ctx, fx.Plan(seed=3, clip_norm=2.0), team)
        errors.append(str(caught.value))
        joined.set()

    with fx.detect(env={}, device="cpu") as ctx:
        model = wrapped(ctx, fx.Plan(seed=3), 0)
        fns = fx.StepFns(model=model, loss=lambda m, b: loss_of(m, b, weighted=False))
        run = fx.replicas.train(
            ctx, fns, fx.shard(loader(), ctx, model.plan), team, updates=100_000
        )
        next(run)
        thread = threading.Thread(target=join)
        thread.start()
        updates = sum(1 for _ in iter(lambda: next(run).updates if not joined.is_set() else 0, 0))
        assert [next(run).live for _ in range(2)] == [1, 1]  # the others go on
        run.close()
        thread.join()
    assert updates
    assert "clip_norm" in errors[0] and "differs from those that train already" in errors[0]


def test_a_replica_with_another_version_cannot_join(ctx, monkeypatch):
    model = wrapped(ctx, fx.Plan(), 0)
    state = healing.pack_state(model, healing.Progress(position=fx.Position()))
    monkeypatch.setattr(healing, "_versions", lambda: {"fxtrain": "0.0", "torch": "2.13.0"})
    with raises_code("FX200", "0.0"):
        healing.unpack_state(model, state)


@pytest.mark.parametrize("other", [None, fx.DiLoCo(every=3)])
def test_a_replica_that_averages_otherwise_cannot_join(ctx, other):
    model, rounds = independent(wrapped(ctx, fx.Plan(), 0), fx.DiLoCo(every=2), 10)
    progress = healing.Progress(position=fx.Position())
    state = healing.pack_state(model, progress, *rounds.under_way())
    mine = None if other is None else independent(model, other, 10)[1].config
    with raises_code("FX200", "Replicas(local=", "'every'"):
        healing.unpack_state(model, state, mine)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_non_finite_values(ctx, lighthouse, nonfinite):
    def loss(model, batch):
        bad = model.window.updates == 1
        return loss_of(model, batch, weighted=False) * (float("nan") if bad else 1.0)

    team = fx.replicas.Replicas(count=1, lighthouse=lighthouse)
    plan = fx.Plan(seed=3, nonfinite=nonfinite)
    if nonfinite == "raise":
        with raises_code("FX501"):
            _train(ctx, plan, team, loss=loss)
    else:
        updates = _train(ctx, plan, team, loss=loss)
        assert [one.applied for one in updates] == [True, False, True]
