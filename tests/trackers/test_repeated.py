"""Trackers that cannot remove entries: what a run logs again after a crash is not written twice."""

import sys
from types import SimpleNamespace

import fxtrain as fx
from fxtrain.trackers import read_run
from fxtrain.trackers.services import CLEARML
from tests.trackers._trackers import own_tracker


def _position(step):
    return fx.Position(updates=step, samples=8 * step)


def _log(run, steps):
    for step in steps:
        run.log({"loss": step, "even": None if step % 2 else step}, _position(step))
        if step == 3:
            run.text("note", "hello", _position(step))


def _continued(ctx, folder, **functions):
    """A run that is killed after step 5 and continued from step 2; what the tracker was given."""

    def write(kept, entry):
        values = entry.value if entry.kind == "log" else {entry.name: entry.value}
        kept.append((entry.step, dict(values)))

    kept, mine = own_tracker(write=write, kinds=("log", "text"), **functions)
    with fx.track(folder, ctx, [fx.JsonLines(), mine]) as run:
        _log(run, range(1, 6))
    with fx.track(folder, ctx, [fx.JsonLines(), mine], resume="folder", position=_position(2)) as r:
        _log(r, range(3, 8))
    assert read_run(folder).curve("loss") == [(step, step) for step in range(1, 8)]
    return [(step, name, value) for step, values in kept for name, value in values.items()]


def _last(kept, start):
    found = {}
    for step, values in kept:
        found |= dict.fromkeys(values, step)
    return found


def test_a_tracker_that_knows_its_last_steps_has_every_step_once(ctx, tmp_path, told):
    kept = _continued(ctx, tmp_path, last_steps=_last)
    assert [step for step, name, _ in kept if name == "loss"] == list(range(1, 8))
    assert [step for step, name, _ in kept if name == "even"] == [2, 4, 6]
    assert [step for step, name, _ in kept if name == "note"] == [3]
    (line,) = told()
    assert "Mine cannot remove the entries after the position" in line


def test_what_the_last_step_lacked_is_written(ctx, tmp_path):
    """The process was killed between two calls at step 5."""
    kept, mine = own_tracker(last_steps=_last)
    with fx.track(tmp_path, ctx, [mine]) as run:
        run.log({"loss": 5}, 5)
    with fx.track(tmp_path, ctx, [mine], resume="folder", position=_position(4)) as run:
        run.log({"loss": 5}, 5)
        run.log({"eval": 1}, 5)
    assert kept == [(5, {"loss": 5.0}), (5, {"eval": 1.0})]


def test_a_tracker_that_cannot_tell_is_named_and_gets_everything(ctx, tmp_path, told):
    def fail(native, start):
        raise OSError("no route")

    kept = _continued(ctx, tmp_path, last_steps=fail)
    assert [step for step, name, _ in kept if name == "loss"] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    (line,) = told()
    assert "Mine failed in last_steps: OSError: no route" in line


def test_clearml_continues_a_task_at_its_own_steps(ctx, tmp_path, monkeypatch):
    """Otherwise it adds the last iteration of the task to every step that is logged."""
    offsets = []

    class Task:
        current_task = staticmethod(lambda: None)

        @staticmethod
        def init(*, continue_last_task, **settings):
            if continue_last_task:
                offsets.append(6)
            return SimpleNamespace(id="t1", set_initial_iteration=offsets.append)

    monkeypatch.setitem(sys.modules, "clearml", SimpleNamespace(Task=Task))
    config = fx.trackers.ClearML(project="p", online=True)
    start = SimpleNamespace(name="run", identity="t1", resumed=True)
    CLEARML.open(config, start)
    assert offsets[-1] == 0
    offsets.clear()
    CLEARML.open(config, SimpleNamespace(name="run", identity="", resumed=False))
    assert offsets == []
