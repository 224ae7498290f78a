"""Restarts inside the processes of ranks: fx.ops.restarting."""

import json

import pytest
import torch
from torch import distributed as dist

from fxtrain.ops import restarting
from fxtrain.ops.restarts import _must_end
from tests._errors import raises_code
from tests.launched._run import FXTRAIN, SCRIPTS, run_fork

pytestmark = pytest.mark.timeout(200)
SCRIPT = str(SCRIPTS / "restarting.py")


def _run(folder, fault, restarts=0):
    words = ("launch", "--cpu", "--ranks", "2", "--restarts", str(restarts), SCRIPT)
    done = run_fork(*FXTRAIN, *words, str(folder), fault)
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    return done, sorted(lines, key=lambda line: line["rank"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the parameters after a run without a failure."""
    done, lines = _run(tmp_path_factory.mktemp("alone"), "none")
    assert done.code == 0, done.err
    assert [line["calls"] for line in lines] == [1, 1]
    return lines[0]["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "stuck", "late"])
def test_all_ranks_start_again_in_their_processes(fault, undisturbed, tmp_path):
    done, lines = _run(tmp_path, fault)
    assert done.code == 0, done.err
    assert [line["calls"] for line in lines] == [2, 2]
    assert {line["digest"] for line in lines} == {undisturbed}
    assert "The main function is called again in this process; 0 more to come." in done.err
    if fault != "raise":
        assert "This rank was interrupted, to start again with the others" in done.err


@pytest.mark.slow
def test_a_killed_rank_is_started_again_by_the_launcher(undisturbed, tmp_path):
    done, lines = _run(tmp_path, "killed", restarts=1)
    assert done.code == 0, done.err
    assert "exited with code 9" in done.err
    assert {line["digest"] for line in lines} == {undisturbed}


@pytest.mark.slow
def test_a_rank_that_fails_each_time_ends_with_its_error(tmp_path):
    done, lines = _run(tmp_path, "always")
    assert done.code == 1 and lines == []
    assert "OSError: a disk that failed once" in done.err


def test_a_process_group_that_exists_cannot_be_opened_again():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with raises_code("FX100", "process group"):
            restarting(lambda ctx: None)
    finally:
        dist.destroy_process_group()


def test_errors_of_an_accelerator_end_the_process():
    assert _must_end(torch.AcceleratorError("device-side assert triggered"))
    assert not _must_end(OSError("a disk that failed once"))


def test_it_is_called_as_often_as_asked():
    calls = []

    def main(ctx):
        calls.append(ctx)
        raise OSError("a disk that failed")

    with pytest.raises(OSError, match="a disk that failed"):
        restarting(main, restarts=2, env={}, device="cpu")
    assert len(calls) == 3
    assert all(ctx.comm.state.closed for ctx in calls)
