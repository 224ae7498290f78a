"""A run that is stopped and continued has the curve of one that was not."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

import fxtrain as fx
from fxtrain.trackers import Tracker, read_run
from tests._errors import raises_code


def _position(step):
    return fx.Position(updates=step, samples=8 * step, epoch=step // 5)


def _curve(folder):
    log = read_run(folder)
    assert log.damaged == 0
    return [(e["step"], e.get("rows"), e.get("epoch"), e["values"]) for e in log.entries]


FOLDERS = st.sampled_from(["a", "b"])
COUNTS = st.integers(0, 4)


class Runs(RuleBasedStateMachine):
    """Runs in two folders that start, log, are saved and killed, and continue.

    The model has, by folder, the id of its run and the curve that a reader has to find.
    """

    saved = Bundle("saved")

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.place = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.ctx = self.stack.enter_context(fx.detect(env={}, device="cpu"))
        self.runs: dict[str, tuple[str, list[int]]] = {}

    @initialize(bare=st.booleans())
    def choose_positions(self, bare):
        self.at = int if bare else _position  # `bare`: logged by updates only

    def teardown(self):
        self.stack.close()

    def track(self, name, **more):
        return fx.track(self.place / name, self.ctx, **more)

    def log(self, run, name, start, count):
        """Log the next steps; the state after the first of them, and the step that it is of."""
        steps = self.runs[name][1]
        step, state = start, run.state()
        for step in range(start + 1, start + count + 1):
            run.log({"loss": torch.tensor(float(step)), "even": step % 2 or None}, self.at(step))
            steps.append(step)
            if step == start + 1:
                state = run.state()
        return state, self.runs[name][0], min(step, start + 1)

    @rule(target=saved, name=FOLDERS, count=COUNTS)
    def start(self, name, count):
        if name in self.runs:
            with raises_code("FX200", self.runs[name][0]):
                self.track(name)
            return multiple()
        with self.track(name) as run:
            self.runs[name] = run.id, []
            return self.log(run, name, 0, count)

    @rule(target=saved, name=FOLDERS, count=COUNTS, at=saved)
    def resume(self, name, count, at):
        state, identity, step = at
        known, steps = self.runs.get(name, (identity, []))
        where = {"resume": state, "position": _position(step)}
        if known != identity:
            with raises_code("FX200", known, identity):
                self.track(name, **where)
            return multiple()
        with self.track(name, **where) as run:
            assert run.id == identity
            self.runs[name] = identity, [each for each in steps if each <= step]
            return self.log(run, name, step, count)

    @rule(target=saved, name=FOLDERS, count=COUNTS)
    def restart_what_the_folder_has(self, name, count):
        with self.track(name, resume="folder", position=fx.Position()) as run:
            assert run.id == self.runs.get(name, (run.id,))[0]
            self.runs[name] = run.id, []
            return self.log(run, name, 0, count)

    @rule(name=FOLDERS, at=saved)
    def is_killed_within_a_line(self, name, at):
        """Its next start removes what was written of the line."""
        state, identity, _ = at
        if self.runs.get(name, ("",))[0] != identity:
            return
        with (self.place / name / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step":1,"rows":8,"val')
        steps = self.runs[name][1]
        self.track(name, resume=state, position=_position(max(steps, default=0))).close()

    @invariant()
    def every_curve_is_that_of_one_run(self):
        for name, (identity, steps) in self.runs.items():
            log = read_run(self.place / name)
            assert json.loads((self.place / name / "run.json").read_text())["id"] == identity
            assert log.damaged == 0
            assert log.curve("loss") == [(step, float(step)) for step in steps]
            if self.at is _position:
                rows = [(entry["rows"], entry["epoch"]) for entry in log.entries]
                assert rows == [(8 * step, step // 5) for step in steps]


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


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
def test_a_process_that_is_killed_and_continued_has_the_same_curve(tmp_path, process_state):
    for stop in (3, 13):  # before the first checkpoint, and between two
        _killed(tmp_path / "killed", stop)
    for name in ("killed", "whole"):  # to the end
        sys.argv[:] = ["", str(tmp_path / name), "0"]
        exec(SCRIPT, {})
    assert _curve(tmp_path / "killed") == _curve(tmp_path / "whole")
    assert [step for step, *_ in _curve(tmp_path / "whole")] == list(range(1, 33))


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
