"""An iterator of `fit` that a name keeps open after `break`."""

import gc
import shutil
import threading
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
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

    with pytest.raises(fx.errors.ContextError, match="closed"):
        _left_open(ctx, tmp_path, evaluate=evaluate, evaluate_every=1)


def test_an_error_of_its_last_save_is_that_of_closing(tmp_path):
    ctx = fx.detect({}, device="cpu")
    reports = _left_open(ctx, tmp_path / "run", to=())
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(fx.CheckpointError, match="run"):
        fx.close(ctx)
    assert list(reports) == []


@pytest.mark.parametrize(("error", "stopped"), [(None, True), (KeyError("body"), False)])
def test_it_ends_with_its_block(tmp_path, error, stopped):
    with fx.detect({}, device="cpu") as ctx:
        expected = nullcontext() if error is None else pytest.raises(KeyError)
        with expected, _fitted(ctx, tmp_path) as reports:
            for report in reports:
                if report.position.updates == 3 and error is not None:
                    raise error
                if report.position.updates == 3:
                    break
        assert _saved(tmp_path) == [3]
        assert list(reports) == []
        left = list(_fitted(ctx, tmp_path, resume="unless stopped"))
    assert bool(left) != stopped  # a run whose loop stopped it is left alone


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
