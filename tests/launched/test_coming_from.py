"""Scripts as people have them: raw, with Accelerate and with fxtrain, and the lines they differ."""

import importlib.util
import json
import runpy

import pytest

from tests.launched._run import FXTRAIN, PYTHON, ROOT, TORCHRUN, run_fork

pytestmark = pytest.mark.timeout(330)
FOLDER = ROOT / "examples" / "coming_from"
LINES = runpy.run_path(str(FOLDER / "changed_lines.py"))
TASKS = list(LINES["TASKS"])


def _norms(*command, script, size=16, options=(), **env):
    words = str(FOLDER / f"{script}.py"), "--in-order", "--size", str(size), *options
    ended = run_fork(*command, *words, timeout_s=300, **env)
    assert ended.code == 0, ended.err
    return json.loads(ended.out.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """What the raw scripts give, by task."""
    folder = ("--folder", str(tmp_path_factory.mktemp("raw")))
    return {task: _norms(*PYTHON, script=f"{task}_raw", options=folder) for task in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_fxtrain_gives_what_the_raw_script_gives(task, raw, tmp_path):
    script, options = f"{task}_fxtrain", ("--folder", str(tmp_path / "runs"))
    wanted = pytest.approx(raw[task], abs=2e-3)
    if task == "checkpoints":  # two ranks resume what one has begun
        _norms(*PYTHON, script=script, options=(*options, "--epochs", "2"))
    else:
        assert _norms(*PYTHON, script=script, options=options) == wanted
    launch = (*FXTRAIN, "launch", "--ranks", "2")
    assert _norms(*launch, script=script, size=8, options=options) == wanted


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="no accelerate here")
@pytest.mark.parametrize("task", TASKS)
def test_accelerate_gives_what_the_raw_script_gives(task, raw, tmp_path):
    got = _norms(
        *(*TORCHRUN, "--standalone", "--nproc-per-node", "2"),
        script=f"{task}_accelerate",
        size=8,
        options=("--folder", str(tmp_path / "runs")),
        ACCELERATE_USE_CPU="true",  # as its launcher sets for --cpu
    )
    assert got == pytest.approx(raw[task], abs=2e-3)


def test_the_table_is_what_the_scripts_say():
    assert LINES["table"]() in (FOLDER / "README.md").read_text()


def test_fxtrain_needs_as_few_lines_as_accelerate():
    accelerate, ours = (
        {task: LINES["counts"](task, one)[0] for task in TASKS} for one in ("accelerate", "fxtrain")
    )
    assert all(ours[task] <= accelerate[task] for task in TASKS)
    assert sum(ours.values()) < sum(accelerate.values())
    assert ours["text"] <= 8
