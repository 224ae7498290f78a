"""Variables of jobs, which the suite removes before it runs."""

import re
from pathlib import Path

import pytest

from fxtrain.launchers import child
from fxtrain.launchers.built_in import job_variables
from fxtrain.state import topology
from tests._job_variables import is_of_a_job, remove_job_variables

_NAME = re.compile(r"[\"'](RANK|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)[\"']")


READERS = [topology, job_variables, child]


@pytest.mark.parametrize("reader", READERS, ids=lambda module: module.__name__)
def test_every_variable_that_tells_a_rank_is_removed(reader):
    names = {*_NAME.findall(Path(reader.__file__).read_text())}
    assert names & {"RANK", "SLURM_PROCID"}
    assert [name for name in sorted(names) if not is_of_a_job(name)] == []


def test_variables_of_the_account_stay():
    kept = {"HOME": "/root", "PATH": "/bin", "OMP_NUM_THREADS": "1", "FXTRAIN_GPU_TESTS_ON": "cpu",
            "SLURM_CONF": "/etc/slurm.conf", "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    variables = {"FXTRAIN_PLAN__SEED": "1", "https_proxy": "x", "NO_PROXY": "x", **kept}
    remove_job_variables(variables)
    assert variables == kept
