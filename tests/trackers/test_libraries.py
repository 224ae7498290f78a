"""Each tracker against its real package, without a network; what it wrote is read back."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxtrain.trackers import read_run

ROOT = Path(__file__).parents[2]
LOSSES = [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.125)]
# Of this project's tests only: no library calls home, and none writes into the user's folders.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "WANDB_ERROR_REPORTING": "false",
    "COMET_LOGGING_CONSOLE": "ERROR",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "CLEARML_LOG_LEVEL": "ERROR",
    "DVC_NO_ANALYTICS": "1",
    "DVC_STUDIO_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "AIM_UI_TELEMETRY_ENABLED": "0",
}
HOMES = ("HOME", "TRACKIO_DIR", "CLEARML_CACHE_DIR", "SWANLAB_SAVE_DIR")


def _run(name, folder, package=None, *how):
    package = package or name
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-trackers")
    home = folder / "home"
    home.mkdir()
    env = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT), **dict.fromkeys(HOMES, str(home))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.trackers._offline", name, str(folder), *how],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = json.loads(lines[-1])
    assert found["state"]["identities"][0][name] == found["again"]["identities"][0][name]
    assert " failed in " not in done.stderr and "could not be opened" not in done.stderr
    # Beside every library, the curve of the JSON lines is whole and has no step twice.
    if name != "clearml":
        assert read_run(folder).curve("loss") == LOSSES
    return found


pytestmark = [pytest.mark.trackers, pytest.mark.timeout(300)]


def test_tensorboard(tmp_path):
    found = _run("tensorboard", tmp_path)
    assert found["losses"] == [list(one) for one in LOSSES]
    assert {"loss", "train/grad_norm", "odd name: %$"} <= set(found["scalars"])
    assert found["images"] == ["images/gray", "color"]
    assert len(found["hparams"]) == 3 and found["text"] == "hello"


def test_wandb(tmp_path):
    found = _run("wandb", tmp_path)
    first, second = found["runs"]
    assert first["id"] == second["id"] == found["state"]["id"]
    history = [{k: json.loads(v) for k, v in row.items()} for row in first["history"]]
    assert [(row["_step"], row["position/rows"]) for row in history] == [(1, 32), (2, 64), (3, 96)]
    assert [row["loss"] for row in history[:2]] == [1.0, 0.5]
    names = {name.removesuffix("/_type") for row in history for name in row}
    assert {"images/gray", "color", "note", "rows", "odd name: %$"} <= names
    losses = [(json.loads(row["_step"]), json.loads(row["loss"])) for row in second["history"]]
    assert losses == LOSSES[2:]
    assert json.loads(first["config"]["plan.seed"]) == 5 and first["exit"] == 0
    media = [path for path in tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png")]
    assert len(media) == 2


def test_trackio(tmp_path):
    found = _run("trackio", tmp_path)
    # Step 3 was logged with two values before the run continued from step 2.
    assert [step for step, _ in found["losses"]] == [1, 2, 3, 3, 4]
    assert len(found["runs"]) == 1
    assert {"images/gray", "color", "note", "rows"} <= set(found["names"])


WHOLE = {"tensorboard", "trackio", "mlflow", "dvclive"}  # in files of which nothing is uploaded


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_run_that_was_killed_has_each_step_once(name, tmp_path):
    found = _run(name, tmp_path, None, "killed")
    losses = [tuple(one) for one in found["losses"]]
    assert losses == LOSSES
    if name == "trackio":
        assert found["tables"] == 1
    if name == "mlflow":
        assert found["table"] == [[1], [2]]


def test_comet(tmp_path):
    found = _run("comet", tmp_path, "comet_ml")
    first, second = found["runs"]
    metrics = [(name, step, value) for name, step, value in first["metrics"]]
    assert [(s, v) for name, s, v in metrics if name == "loss"][:3] == LOSSES[:3]
    losses = [(s, v) for name, s, v in map(tuple, second["metrics"]) if name == "loss"]
    assert losses == LOSSES[2:]
    assert first["params"]["plan.seed"] == 5 and first["params"]["lr"] == 0.1
    assert found["state"]["id"] in first["path"] and found["state"]["id"] in second["path"]


def test_aim(tmp_path):
    found = _run("aim", tmp_path)
    assert sorted(value for _, value in found["losses"]) == [0.125, 0.25, 0.5, 1.0]
    assert found["hparams"]["context.world_size"] == 1
    assert {"loss", "train/grad_norm", "odd name: %$"} <= set(found["names"])


def test_mlflow(tmp_path):
    found = _run("mlflow", tmp_path)
    finite = [(step, value) for step, value in found["losses"] if not math.isnan(value)]
    assert finite == LOSSES
    assert found["params"]["plan.seed"] == "5" and found["params"]["lr"] == "0.1"
    assert found["status"] == "FINISHED"
    assert "odd name: %$" not in found["metrics"] and "train/grad_norm" in found["metrics"]
    expected = {"images", "color-3.png", "note-3.txt", "rows-3.json", "notes"}
    assert expected <= set(found["artifacts"])


def test_clearml(tmp_path):
    found = _run("clearml", tmp_path)
    assert [tuple(one) for one in found["losses"][:3]] == LOSSES[:3]
    assert found["hyperparams"]["General"]["plan.seed"]["value"] == "5"
    assert {"training_stats_scalar", "plot"} <= set(found["types"])


def test_dvclive(tmp_path):
    found = _run("dvclive", tmp_path)
    assert [tuple(reversed(one)) for one in found["losses"]] == [(v, s) for s, v in LOSSES]
    assert "plan.seed: 5" in found["params"]
    assert {"plots/images/images/gray-3.png", "plots/images/color-3.png"} <= set(found["files"])
    assert not (tmp_path / "dvc.yaml").exists()


def test_swanlab(tmp_path):
    found = _run("swanlab", tmp_path)
    first, second = found["runs"]
    for step, loss in LOSSES[:3]:
        number = f"{loss:g}"
        assert f'key: "loss"\n  step: {step}\n' in first and f"number: {number}\n" in first
    assert 'key: "loss"\n  step: 4\n' in second and "number: 0.125" in second
    assert 'key: "images/gray"' in first and 'key: "note"' in first
    assert "RUN_STATE_FINISHED" in first and "RUN_STATE_FINISHED" in second
