"""Training as an iterator: the hand-written loop, and runs that stop and continue."""

import functools
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh, token_rows
from fxtrain.trackers import Tracker, read_run
from tests._slow import slow_after
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP

ON_RANKS = settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
UPDATES = 16  # of two epochs at two ranks, without accumulation
DDP, FSDP = fx.DDP(), fx.FSDP(min_params=1)


def _made(ctx, strategy, accumulate=1):
    """A model with dropout and running statistics, and 47 rows for it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    plan = fx.Plan(strategy=strategy, accumulate=accumulate, clip_norm=1.0, seed=3)
    model = fx.wrap(
        net,
        ctx,
        plan,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    )
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]).square().mean())
    rows = torch.randn(47, 4, generator=torch.Generator().manual_seed(1))
    loader = fx.shard(DataLoader(TensorDataset(rows), batch_size=3, shuffle=True), ctx, plan)
    fx.ops.seed(5, ctx, per_rank=True)
    return model, fns, loader, DataLoader(TensorDataset(rows[:7]), batch_size=2)


def _weights(model):
    return {name: value.tolist() for name, value in fx.weights(model, device="cpu")}


def _by_hand(ctx, strategy, accumulate):
    model, fns, loader, _ = _made(ctx, strategy, accumulate)
    reports = [fx.step(ctx, batch, fns) for epoch in loader.epochs(2) for batch in epoch]
    return _weights(model), [float(report.loss) for report in reports]


def _fitted(ctx, folder, strategy, accumulate, **how):
    """Weights and losses of a run that ends by itself."""
    model, fns, loader, _ = _made(ctx, strategy, accumulate)
    options = {"epochs": 2, "show": False, **how}
    reports = list(fx.fit(ctx, fns, loader, folder, **options))
    return _weights(model), [float(report.loss) for report in reports]


CASES = [(1, DDP, 1), (2, DDP, 1), (2, DDP, 3), (2, FSDP, 3)]


@pytest.mark.parametrize(("ranks", "strategy", "accumulate"), slow_after(3, CASES))
def test_it_is_the_hand_written_loop_bit_for_bit(clusters, tmp_path, ranks, strategy, accumulate):
    wanted = clusters[ranks].run(_by_hand, strategy, accumulate)
    found = clusters[ranks].run(_fitted, str(tmp_path), strategy, accumulate)
    assert found == wanted


def _raise(*_):
    raise RuntimeError("broken")


def _hindered(ctx, folder):
    broken = Tracker(name="broken", write=_raise, flush=_raise, close=_raise)
    return _fitted(ctx, folder, DDP, 1, to=(fx.JsonLines(), broken), show=True, log_every=1)


def test_trackers_that_fail_change_no_bit(pair, tmp_path):
    assert pair.run(_hindered, str(tmp_path)) == pair.run(_by_hand, DDP, 1)
    assert len(read_run(tmp_path).curve("loss")) == UPDATES


def _stopped(ctx, folder, strategy, accumulate, stops):
    """A run in pieces, each of which ends at an update in its own way."""
    seen = []
    for stop, way in [*stops, (None, "ends")]:
        model, fns, loader, held_out = _made(ctx, strategy, accumulate)
        extra = {"bodies": 0, "stopping": fx.EarlyStopping(patience=100)}
        loss = fns.loss

        def fails(model, batch, stop=stop, loss=loss):
            if batch.position.updates == stop:
                raise ArithmeticError("in the loss")
            return loss(model, batch)

        start = functools.partial(
            fx.fit,
            ctx,
            fx.StepFns(model=model, loss=fails) if way == "fails" else fns,
            loader,
            folder,
            epochs=2,
            show=False,
            log_every=3,
            save_every=4,
            extra=extra,
            evaluate=lambda model=model, rows=held_out: {
                "score": fx.evaluate(ctx, model, rows, lambda m, b: m(b[0]).square())
            },
            evaluate_every=5,
        )
        seen.append(_piece(ctx, start, extra, stop, way))
    return _weights(model), seen, extra["bodies"], extra["stopping"].waited


def _piece(ctx, start, extra, stop, way):
    """What the body of one piece sees: updates, and where it evaluated."""
    seen = []
    held = start() if way in ("closes", "stops", "one stops") else None
    try:
        for report in held or start():
            extra["bodies"] += 1
            if report.metrics is not None:
                extra["stopping"] = extra["stopping"].update(1.0)
            seen.append((report.position.updates, report.metrics is not None))
            if report.position.updates != stop:
                continue
            if way.endswith("stops") and (way == "stops" or ctx.is_last):
                held.stop()
            if way == "break" or (way == "one breaks" and ctx.is_main):
                break
            if way == "raises":
                raise KeyError("in the body")
            if way == "closes":
                held.close()
            if way == "signal" and ctx.is_last:
                os.kill(os.getpid(), signal.SIGUSR1)
    except (KeyError, ArithmeticError):
        pass
    return seen


WAYS = ("signal", "stops", "one stops", "one breaks", "fails", "break", "raises", "closes")


def _curves(folder):
    log = read_run(folder)
    names = ("loss", "lr", "grad_norm", "skipped", "eval/score")
    return {name: log.curve(name) for name in names}


def _whole(pool, folder, strategy, accumulate):
    """What a run gives that is not stopped, and its curves."""
    return pool.run(_stopped, str(folder), strategy, accumulate, []), _curves(folder)


def _check_pieces(pool, folder, strategy, accumulate, stops, undisturbed=None):
    whole, wanted = undisturbed or _whole(pool, folder / "whole", strategy, accumulate)
    found = pool.run(_stopped, str(folder / "pieces"), strategy, accumulate, stops)
    assert _curves(folder / "pieces") == wanted
    assert [step for step, _ in wanted["loss"]] == sorted({step for step, _ in wanted["loss"]})
    for (weights, seen, bodies, waited), (right, (all_seen,), count, times) in zip(
        found, whole, strict=True
    ):
        assert weights == right
        assert (bodies, waited) == (count, times)
        if all(way != "fails" for _, way in stops) and accumulate == 1:
            assert [one for piece in seen for one in piece] == all_seen


@pytest.mark.slow
@ON_RANKS
@given(
    stops=st.lists(
        st.tuples(st.integers(1, UPDATES), st.sampled_from(WAYS)),
        min_size=1,
        max_size=3,
        unique_by=lambda one: one[0],
    ).map(sorted),
    accumulate=st.sampled_from([1, 1, 2]),
)
def test_a_run_in_pieces_is_the_whole_run(pair, tmp_path_factory, stops, accumulate):
    _check_pieces(pair, tmp_path_factory.mktemp("runs"), DDP, accumulate, stops)


@pytest.fixture(scope="module")
def undisturbed(pair, tmp_path_factory):
    return _whole(pair, tmp_path_factory.mktemp("whole"), DDP, 1)


@pytest.mark.parametrize("way", slow_after(1, WAYS))
def test_every_way_to_stop_is_continued(pair, undisturbed, tmp_path, way):
    _check_pieces(pair, tmp_path, DDP, 1, [(7, way)], undisturbed)


def _stopped_by_the_last(ctx, folder):
    """Updates until the last rank stops the run, and reports after the next start."""
    _, fns, loader, _ = _made(ctx, DDP, 1)
    with fx.fit(ctx, fns, loader, folder, epochs=2, show=False) as reports:
        for report in reports:
            if ctx.is_last and report.position.updates == 3:
                reports.stop()
    _, fns, loader, _ = _made(ctx, DDP, 1)
    again = fx.fit(ctx, fns, loader, folder, epochs=2, show=False, resume="unless stopped")
    return report.position.updates, len(list(again))


def test_one_rank_stops_the_run_of_all(pair, tmp_path):
    assert pair.run(_stopped_by_the_last, str(tmp_path)) == [(3, 0)] * 2


@pytest.mark.slow
def test_shards_and_one_process_continue_too(clusters, tmp_path):
    _check_pieces(clusters[2], tmp_path / "shards", FSDP, 2, [(3, "break")])
    _check_pieces(clusters[1], tmp_path / "one", DDP, 1, [(7, "signal"), (8, "break")])


CASES_STRATEGIES = {
    "LocalSGD": (None, {"local": fx.LocalSGD(every=3)}),
    "TP": (fx.Mesh(tensor=2), {"strategy": fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))}),
    "CP": (fx.Mesh(context=2), {"context": fx.CP()}),
    "PP": (fx.Mesh(pipeline=2), {"strategy": fx.PP()}),
}


def _loss(model, batch):
    tokens, targets = batch.data
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _made_strategies(ctx, options):
    plan = fx.Plan(**options, seed=3)
    net = Transformer(dtype=torch.float64)
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
    tokens, _ = token_rows(24)
    rows = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = fx.shard(DataLoader(rows, batch_size=4), ctx, plan)
    return model, fx.StepFns(model=model, loss=_loss), loader


def _trained(ctx, mesh, options, folder, stop):
    """Weights after two epochs: by hand without a folder, else by `fit`, stopped once."""
    with on_mesh(ctx, mesh) as placed:
        model, fns, loader = _made_strategies(placed, options)
        if folder is None:
            for epoch in loader.epochs(2):
                for batch in epoch:
                    fx.step(placed, batch, fns)
            return _weights(model)
        for end in (stop, None):
            model, fns, loader = _made_strategies(placed, options)
            how = {"epochs": 2, "updates": end, "log_every": 2, "show": False}
            list(fx.fit(placed, fns, loader, folder, **how))
        return _weights(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow_after(
        1,
        [pytest.param(name, marks=PIPELINES if name == "PP" else ()) for name in CASES_STRATEGIES],
    ),
)
def test_a_run_in_two_pieces_is_the_hand_written_loop(pair, tmp_path, name):
    mesh, options = CASES_STRATEGIES[name]
    wanted = pair.run(_trained, mesh, options, None, None)
    assert pair.run(_trained, mesh, options, str(tmp_path), 3) == wanted
    steps = [step for step, _ in read_run(tmp_path).curve("loss")]
    assert steps == sorted({*range(2, steps[-1] + 1, 2), 3, steps[-1] // 2, steps[-1]})
