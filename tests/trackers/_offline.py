"""What one tracker writes without a network, read back by its own library; a program.

    python -m tests.trackers._offline NAME FOLDER

It logs a run, continues it in the middle, and prints as JSON what the library gives back. With a
third word, "killed", a process of its own logs the first part and is killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch

import fxtrain as fx
from tests.trackers._readers import READERS

CONFIGS = {
    "tensorboard": fx.TensorBoard(),
    "wandb": fx.WandB(project="p", mode="offline", init={"tags": ["a"]}),
    "trackio": fx.trackers.Trackio(project="p"),
    "comet": fx.trackers.Comet(project="p", online=False),
    "aim": fx.trackers.Aim(experiment="p"),
    "mlflow": fx.MLflow(experiment="p"),
    "clearml": fx.trackers.ClearML(project="p", online=False),
    "dvclive": fx.trackers.DVCLive(),
    "swanlab": fx.trackers.SwanLab(project="p", mode="offline"),
}
LOSSES = {1: 1.0, 2: 0.5, 3: 0.25, 4: 0.125}


def _position(step):
    return fx.Position(updates=step, samples=32 * step)


def _log(run, steps):
    for step in steps:
        loss = torch.tensor(LOSSES[step])
        run.log({"loss": loss, "train": {"grad_norm": 2.0 * step}}, _position(step))
        loss.zero_()  # what was logged is what it was then


def write(name, folder):
    """Log steps 1 to 3 and some more, go back to step 2, and log steps 3 and 4."""
    to = [fx.JsonLines(), CONFIGS[name]]
    torch.manual_seed(3)
    random.seed(3)
    with fx.detect(env={}, device="cpu") as ctx:
        with fx.track(folder, ctx, to, plan=fx.Plan(seed=5), settings={"lr": 0.1}) as run:
            assert run.native(CONFIGS[name]) is not None
            _log(run, [1, 2])
            state = run.state()
            _log(run, [3])
            run.log({"loss": float("nan"), "odd name: %$": 1.0}, _position(3))
            run.image("images/gray", torch.full((1, 6, 8), 0.5), _position(3))
            run.image("color", torch.ones(3, 6, 8), _position(3))
            run.table("rows", {"a": [1, 2], "b": ["x", "y"]}, _position(3))
            run.text("note", "hello", _position(3))
            file = Path(folder, "note.txt")
            file.write_text("of the run")
            run.artifact("notes", file, _position(3))
        if name != "clearml":  # its offline mode allows a process one task only
            with fx.track(folder, ctx, to, resume=state, position=_position(2)) as run:
                assert run.id == state["id"]
                _log(run, [3, 4])
        again = run.state()
    drawn = torch.rand(1).item(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    # Nothing that this library did has changed the random numbers of the training.
    assert drawn == (torch.rand(1).item(), random.random())
    return {"state": state, "again": again}


def write_and_die(name, folder):
    """Log steps 1 to 3, of which a checkpoint would know 1 and 2, and end without closing."""
    ctx = fx.detect(env={}, device="cpu")
    run = fx.track(folder, ctx, [fx.JsonLines(), CONFIGS[name]])
    _log(run, [1, 2])
    Path(folder, "state.json").write_text(json.dumps(run.state()))
    _log(run, [3])
    run.table("rows", {"a": [1, 2]}, _position(3))
    run.text("note", "hello", _position(3))
    run.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def write_killed(name, folder):
    """Continue a run that was killed, from step 2."""
    command = [sys.executable, "-m", "tests.trackers._offline", name, folder, "die"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    state = json.loads(Path(folder, "state.json").read_text())
    to = [fx.JsonLines(), CONFIGS[name]]
    with (
        fx.detect(env={}, device="cpu") as ctx,
        fx.track(folder, ctx, to, resume=state, position=_position(2)) as run,
    ):
        for steps in ([3], [4]):
            _log(run, steps)
            if steps == [3]:
                run.table("rows", {"a": [1, 2]}, _position(3))
                run.text("note", "hello", _position(3))
        return {"state": state, "again": run.state()}


if __name__ == "__main__":
    name, folder, *how = sys.argv[1:]
    if how == ["die"]:
        write_and_die(name, folder)
    written = (write_killed if how else write)(name, folder)
    found = READERS[name](folder)
    sys.stdout.write("\n" + json.dumps({**written, **found}) + "\n")
