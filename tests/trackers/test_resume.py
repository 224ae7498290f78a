"""A run that is stopped and continued has the curve of one that was not."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.trackers import Tracker, read_run


def _position(step):
    return fx.Position(updates=step, samples=8 * step, epoch=step // 5)


def _curve(folder):
    log = read_run(folder)
    assert log.damaged == 0
    return [(e["step"], e.get("rows"), e.get("epoch"), e["values"]) for e in log.entries]


# Each stop: updates since the last checkpoint that are saved, and those that are lost after it.
STOPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=4)


@settings(max_examples=25, deadline=None)
@given(stops=STOPS, bare=st.booleans(), torn=st.booleans())
def test_wherever_it_is_stopped_the_curve_has_no_gap_and_no_double(stops, bare, torn):
    """`bare`: logged by updates only. `torn`: the process was killed within a line."""

    def log(run, steps):
        for step in steps:
            place = step if bare else _position(step)
            run.log({"loss": torch.tensor(float(step)), "even": step % 2 or None}, place)

    with tempfile.TemporaryDirectory() as place, fx.detect(env={}, device="cpu") as ctx:
        whole, parts = Path(place, "whole"), Path(place, "parts")
        here, state, ids = 0, None, set()
        for saved, lost in [*stops, (3, 0)]:
            with fx.track(parts, ctx, resume=state, position=_position(here)) as run:
                ids.add(run.id)
                log(run, range(here + 1, here + saved + 1))
                here, state = here + saved, run.state()
                log(run, range(here + 1, here + lost + 1))
            if torn:
                with (parts / "metrics.jsonl").open("ab") as file:
                    file.write(b'{"step":1,"rows":8,"val')
        if torn:  # the last start removes it
            fx.track(parts, ctx, resume=state, position=_position(here)).close()
        with fx.track(whole, ctx) as run:
            log(run, range(1, here + 1))
        assert _curve(parts) == _curve(whole)
        assert len(ids) == 1
        assert len(read_run(parts).starts) >= 1


SCRIPT = """
import sys, torch, fxtrain as fx

folder, stop = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True)
with fx.detect() as ctx:
    model = fx.wrap(net, ctx, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
    fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data).square().mean())
    loader = fx.shard(data, ctx)
    saved = fx.latest(folder)
    again = fx.restore(saved, ctx, model) if saved else None
    position = again.position if again else fx.Position()
    resume = again.extra["run"] if again else "folder"
    with fx.track(folder, ctx, resume=resume, position=position) as run:
        for epoch in loader.at(position).epochs(2):
            for batch in epoch:
                report = fx.step(ctx, batch, fns)
                run.log({"loss": report.loss}, report.position)
                updates = report.position.updates
                if updates % 5 == 0:
                    fx.save(folder, ctx, model, position=report.position,
                            extra={"run": run.state()})
                if updates == stop:
                    import os, signal
                    os.kill(os.getpid(), signal.SIGKILL)
"""


def _killed(folder, stop):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(stop)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
def test_a_process_that_is_killed_and_continued_has_the_same_curve(tmp_path, monkeypatch):
    for stop in (3, 13):  # before the first checkpoint, and between two
        _killed(tmp_path / "killed", stop)
    for name in ("killed", "whole"):  # to the end
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path / name), "0"])
        exec(SCRIPT, {})
    assert _curve(tmp_path / "killed") == _curve(tmp_path / "whole")
    assert [step for step, *_ in _curve(tmp_path / "whole")] == list(range(1, 33))


def test_a_folder_in_use_is_not_taken_by_a_new_run(ctx, tmp_path):
    with fx.track(tmp_path, ctx) as run:
        run.log({"a": 1}, 1)
    with pytest.raises(fx.PlanError, match=rf"a new run was requested.*{run.id}"):
        fx.track(tmp_path, ctx)
    assert read_run(tmp_path).curve("a") == [(1, 1.0)]


def test_a_folder_of_another_run_is_named(ctx, tmp_path):
    with fx.track(tmp_path / "a", ctx) as first:
        first.log({"a": 1}, 1)
    with fx.track(tmp_path / "b", ctx) as second:
        pass
    with pytest.raises(fx.PlanError, match=rf"resume is the run {second.id}.*{first.id}"):
        fx.track(tmp_path / "a", ctx, resume=second.state(), position=fx.Position())
    assert read_run(tmp_path / "a").curve("a") == [(1, 1.0)]


def test_a_run_continues_in_another_folder_with_its_id(ctx, tmp_path):
    with fx.track(tmp_path / "a", ctx) as run:
        pass
    with fx.track(tmp_path / "b", ctx, resume=run.state(), position=_position(2)) as more:
        assert more.id == run.id


def test_the_folders_own_run_restarts(ctx, tmp_path):
    at = {"resume": "folder", "position": fx.Position()}
    with fx.track(tmp_path, ctx, **at) as run:
        run.log({"a": 1}, _position(1))
    with fx.track(tmp_path, ctx, **at) as again:
        again.log({"a": 2}, _position(1))
    assert again.id == run.id
    assert read_run(tmp_path).curve("a") == [(1, 2.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "run.json"), ('{"format": 2}', "found 2; choose 1"), ("[]", "choose a table of id"),
     ('{"format": 1, "id": "x", "identities": []}', "found 'x'")],
)  # fmt: skip
def test_a_damaged_identity_is_named(ctx, tmp_path, text, words):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(fx.PlanError, match=words):
        fx.track(tmp_path, ctx)


def test_trackers_get_back_what_they_call_the_run(ctx, tmp_path):
    seen = []
    mine = Tracker(
        name="mine",
        open=lambda config, start: seen.append((start.identity, start.resumed)) or len(seen),
        write=lambda native, entry: None,
        identity=lambda native: f"theirs-{native}",
    )
    with fx.track(tmp_path, ctx, [mine, mine]) as run:
        state = run.state()
    assert state["identities"] == [{"mine": "theirs-1", "mine-2": "theirs-2"}]
    state["identities"].append({"mine": "of rank 1"})  # which tracks no more
    (tmp_path / "run.json").write_text(json.dumps(state))
    with fx.track(tmp_path, ctx, [mine], resume=state, position=fx.Position()) as more:
        pass
    assert seen == [("", False), ("", False), ("theirs-1", True)]
    opened, other = more.state()["identities"]
    assert opened == {"mine": "theirs-3", "mine-2": "theirs-2"}
    assert other == {"mine": "of rank 1"}
    assert json.loads((tmp_path / "run.json").read_text())["id"] == run.id


@pytest.mark.slow
def test_tensorboard_reads_what_is_logged_later_last(ctx, tmp_path):
    """Its reader sorts files by name: a second, then a host and a process."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    now = int(time.time())
    earlier = [f"events.out.tfevents.{second}.~.1.0" for second in (now, now + 1)]
    for name in earlier:
        (folder / name).touch()
    with fx.track(tmp_path, ctx, fx.TensorBoard()) as run:
        run.log({"a": 1}, 1)
    assert sorted(path.name for path in folder.iterdir())[:-1] == earlier
