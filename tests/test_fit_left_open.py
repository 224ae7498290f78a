"""Iterators of `fit` that a name keeps open after `break`, and several that advance by turns."""

import gc
import random
import shutil
import threading
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.trackers import Tracker, read_run
from tests._errors import raises_code
from tests._slow import slow_after
from tests.launched._run import FXTRAIN, PYTHON, run_fork


def _fitted(ctx, folder, **how):
    model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    loader = fx.shard(DataLoader(torch.ones(16, 1), batch_size=2), ctx)
    return fx.fit(ctx, fns, loader, folder, epochs=3, show=False, **how)


def _left_open(ctx, folder, **how):
    reports = _fitted(ctx, folder, **how)
    for report in reports:
        if report.position.updates == 3:
            break
    return reports


def _saved(folder):
    return [int(path.name[-2:]) for path in sorted(folder.glob("update-*"))]


@pytest.mark.parametrize("way", ["with", "close", "raises"])
def test_it_ends_with_its_context(tmp_path, way):
    ctx = fx.detect({}, device="cpu")
    reports = _left_open(ctx, tmp_path)
    assert not _saved(tmp_path)
    if way == "raises":
        with pytest.raises(KeyError), ctx:
            raise KeyError("after the loop")
    elif way == "with":
        with ctx:
            pass
    else:
        fx.close(ctx)
    assert _saved(tmp_path) == [3]
    assert list(reports) == []


def test_a_context_that_closes_inside_the_run_leaves_it_alone(tmp_path):
    ctx = fx.detect({}, device="cpu")

    def evaluate():
        fx.close(ctx)
        return 1.0

    with raises_code("FX105"):
        _left_open(ctx, tmp_path, evaluate=evaluate, evaluate_every=1)


def test_an_error_of_its_last_save_is_that_of_closing(tmp_path):
    ctx = fx.detect({}, device="cpu")
    reports = _left_open(ctx, tmp_path / "run", to=())
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("no folder")
    with raises_code("FX606"):
        fx.close(ctx)
    assert list(reports) == []


@pytest.mark.parametrize("error", [None, KeyError("body")])
def test_it_ends_with_its_block(tmp_path, error):
    with fx.detect({}, device="cpu") as ctx:
        expected, closed = nullcontext() if error is None else pytest.raises(KeyError), []
        mine = Tracker(name="mine", write=print, close=lambda native, failed: closed.append(failed))
        with expected, _fitted(ctx, tmp_path, to=[mine]) as reports:
            for report in reports:
                if report.position.updates == 3 and error is not None:
                    raise error
                if report.position.updates == 3:
                    break
        assert closed == [error is not None]
        assert _saved(tmp_path) == [3]
        assert list(reports) == []


SCRIPT = """
import pathlib, sys
import fxtrain as fx
from tests.test_fit_left_open import _left_open

ctx = fx.detect(device="cpu", timeout_s=30)
reports = _left_open(ctx, pathlib.Path(sys.argv[1]), to=(), save_every=2)
if sys.argv[2] == "raises":
    raise ValueError("its own")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["ends", "raises"])
def test_the_end_of_the_script_does_not_save_it(tmp_path, ranks, way):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = PYTHON if ranks == 1 else (*FXTRAIN, "launch", f"--ranks={ranks}")
    folder = tmp_path / "run"
    ended = run_fork(*command, str(tmp_path / "script.py"), str(folder), way)
    assert (ended.code == 0) == (way == "ends"), ended.err
    assert ("its own" in ended.err) == (way == "raises")
    assert "Exception ignored" not in ended.err
    assert "SIGABRT" not in ended.err
    assert f"the run in {folder} is still open at the end of the script" in ended.err
    assert _saved(folder) == [2]
    fx.checkpoint.verify(fx.latest(folder))


def test_a_run_that_has_ended_leaves_nothing(tmp_path):
    """Of its iterator, its loop, its trackers, their threads, and functions for the end."""

    def run(number):
        with fx.detect({}, device="cpu") as ctx:
            reports = _left_open(ctx, tmp_path / str(number), save_every=1, log_every=1)
            return weakref.ref(reports), weakref.ref(ctx.comm.state)

    def left():
        gc.collect()
        kinds = Counter(type(one).__qualname__ for one in gc.get_objects())
        names = ("partial", "ReferenceType", "finalize", "_Loop", "Entries", "Run", "Lock")
        return [*map(kinds.get, names), threading.active_count()]

    run(0)
    left()  # which fills caches too
    before = left()
    held = [one for number in range(1, 4) for one in run(number)]
    gc.collect()
    assert [one() for one in held] == [None] * 6
    held.clear()
    assert left() == before


def _start(ctx, folder, seed, accumulate):
    plan = fx.Plan(seed=seed, accumulate=accumulate)
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    data = torch.linspace(0, 1, 30).view(10, 3)
    loader = fx.shard(DataLoader(data, batch_size=2, shuffle=True), ctx, plan)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    return model, fx.fit(ctx, fns, loader, folder, updates=4, log_every=1, show=False)


def _leave(reports, way):
    """End a run early; the caller drops its name."""
    if way == "close":
        reports.close()
    elif way == "raise":
        with pytest.raises(KeyError), reports:
            raise KeyError("in the body")


@pytest.mark.parametrize("seed", slow_after(1, range(3)))
def test_interleaved_runs_are_those_left_alone(tmp_path, seed):
    rng = random.Random(seed)
    runs = [(rng.randrange(5), rng.choice([1, 2, 3])) for _ in range(rng.choice([2, 3]))]
    with fx.detect({}, device="cpu") as first, fx.detect({}, device="cpu") as second:
        alone = []
        for k, run in enumerate(runs):
            model, reports = _start(first, tmp_path / f"alone{k}", *run)
            list(reports)
            alone.append(model)
        contexts = [rng.choice([first, second]) for _ in runs]
        folders = [tmp_path / str(k) for k in range(len(runs))]
        models, opened = {}, {}
        live = list(range(len(runs)))
        while live:
            k = rng.choice(live)
            if k in opened and rng.random() < 0.15:
                _leave(opened.pop(k), rng.choice(["close", "raise", "drop"]))
                gc.collect()
            if k not in opened:
                models[k], opened[k] = _start(contexts[k], folders[k], *runs[k])
                if next(opened[k], None):
                    with raises_code("FX605"):
                        next(_start(contexts[k], folders[k], *runs[k])[1])
            elif next(opened[k], None) is None:
                live.remove(k)
    for k, model in enumerate(alone):
        assert read_run(folders[k]).curve("loss") == read_run(tmp_path / f"alone{k}").curve("loss")
        weights, expected = (fx.unwrap(one).state_dict() for one in (models[k], model))
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
