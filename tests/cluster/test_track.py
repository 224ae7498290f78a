"""Tracking on several ranks: who writes, what it costs the others, and errors of all at once."""

import pytest
import torch

import fxtrain as fx
from fxtrain.ops.transport.exchange import CallState
from fxtrain.testing import Cluster
from fxtrain.trackers import Tracker, read_run


def _log(ctx, folder, ranks):
    calls = ctx.comm.slot(CallState).count
    with fx.track(folder, ctx, ranks=ranks, settings={"lr": 0.1}) as run:
        opened = ctx.comm.slot(CallState).count
        for step in range(1, 4):
            run.log({"rank": torch.tensor(float(ctx.rank))}, fx.Position(updates=step))
        run.image("i", torch.zeros(2, 2), 3)
        run.flush()
        state = run.state()
        native = run.native(fx.JsonLines)
    return state, native is not None, opened - calls, ctx.comm.slot(CallState).count - opened


def test_rank_0_writes_and_the_others_pay_nothing(cluster, tmp_path):
    found = cluster.run(_log, str(tmp_path), "main")
    states, natives, at_start, later = zip(*found, strict=True)
    assert all(state == states[0] for state in states)
    assert natives == tuple(rank == 0 for rank in range(cluster.n))
    assert set(later) == {0}
    assert max(at_start) <= 2
    assert read_run(tmp_path).curve("rank") == [(1, 0.0), (2, 0.0), (3, 0.0)]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["images", "metrics.jsonl", "run.json"]


def test_every_rank_writes_if_asked(cluster, tmp_path):
    found = cluster.run(_log, str(tmp_path), "all")
    assert all(state == found[0][0] for state, *_ in found)
    assert len(found[0][0]["identities"]) == cluster.n
    for rank in range(cluster.n):
        log = read_run(tmp_path / f"rank{rank}" if rank else tmp_path)
        assert log.curve("rank") == [(step, float(rank)) for step in (1, 2, 3)]
        assert log.starts[0]["params"]["context.rank"] == rank


def _refused(ctx, folder, how):
    to, path, ranks, settings = [fx.JsonLines()], folder, "main", {}
    if how == "unknown" and ctx.is_last:
        to = ["tensorbord"]
    elif how == "used":
        fx.track(folder, ctx, resume="folder", position=fx.Position()).close()
    elif how == "path" and ctx.is_last:
        path = 3
    elif how == "settings" and ctx.is_main:
        settings = {"a": _Spiteful()}
    elif how == "later" and ctx.is_last:
        to, ranks = [fx.JsonLines(), Tracker(name="mine", open=_missing, write=_raise)], "all"
    elif how == "later":
        ranks = "all"
    elif how == "missing":
        to = [Tracker(name="mine", open=_missing, write=_raise)]
    try:
        fx.track(path, ctx, to, ranks=ranks, settings=settings)
    except fx.FxError as error:
        return type(error).__name__, str(error)
    return "none", ""


class _Spiteful:
    def __str__(self):
        raise RuntimeError("no words for it")


def _missing(config, start):
    raise fx.errors.MissingPackageError("mine needs a package")


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("unknown", "PlanError", "fx.TensorBoard"),
        ("used", "PlanError", "belongs to the run"),
        ("path", "PlanError", "a path is a string"),
        ("missing", "MissingPackageError", "needs a package"),
        ("settings", "PlanError", "no words for it"),
        ("later", "MissingPackageError", "needs a package"),
    ],
)
def test_what_is_wrong_on_one_rank_is_the_same_error_on_every_rank(
    cluster, tmp_path, how, kind, words
):
    found = cluster.run(_refused, str(tmp_path), how)
    assert len(set(found)) == 1
    assert found[0][0] == kind and words in found[0][1]


def _train(ctx, folder):
    torch.manual_seed(0)
    model = fx.wrap(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)),
        ctx,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
    fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data).square().mean())
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = fx.shard(torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True), ctx)
    fx.ops.seed(1, ctx, per_rank=True)
    run = fx.track(folder, ctx, TRACKERS) if folder else None
    for batch in loader.at(fx.Position()).epochs(2):
        for one in batch:
            report = fx.step(ctx, one, fns)
            if run is not None:
                run.log({"loss": report.loss, "p": next(model.parameters())[0, 0]}, report.position)
                run.image("weights", next(model.parameters()), report.position)
                run.text("bad", object(), report.position)
    if run is not None:
        run.close()
    return [parameter.detach().clone() for parameter in fx.unwrap(model).parameters()]


def _seeds(config, start):
    torch.manual_seed(7)
    torch.rand(3)
    return []


def _raise(*_):
    raise RuntimeError("broken")


TRACKERS = (
    fx.JsonLines(),
    fx.trackers.Terminal(),
    Tracker(name="seeds", open=_seeds, write=lambda native, entry: native.append(entry)),
    Tracker(name="broken", write=_raise, flush=_raise, close=_raise),
    Tracker(name="closed", open=_raise, write=_raise),
)


@pytest.mark.parametrize("world", [1, 2])
def test_whatever_trackers_do_parameters_are_the_same_bit_for_bit(
    clusters: dict[int, Cluster], tmp_path, world
):
    plain = clusters[world].run(_train, "")
    tracked = clusters[world].run(_train, str(tmp_path / "run"))
    for mine, theirs in zip(plain, tracked, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert len(read_run(tmp_path / "run").curve("loss")) == 2 * 48 // (4 * world)
