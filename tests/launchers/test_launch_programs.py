"""Files that launchers write: batch files, and files for one user only."""

import os
import subprocess
from pathlib import Path

import attrs
import pytest

from fxtrain.launchers import (
    SlurmOptions,
    prepare,
)
from fxtrain.launchers.launcher import write_files
from tests.launchers._specs import HERE, VALUE, spec_of


def test_a_batch_file_is_a_program_of_the_shell(tmp_path):
    options = SlurmOptions(
        partition="gpu", time="1:00:00", gpus_per_node="8", warn_s=60, setup=["module load cuda"],
        extra=["--exclusive"],
    )  # fmt: skip
    spec = spec_of("slurm", ranks=8, nodes=2, env=["A=it's"], options=options)
    invocation = prepare(spec, attrs.evolve(HERE, folder="/my run"))
    (text,) = invocation.files.values()
    # A value is in the environment of sbatch, and not in the file.
    assert dict(invocation.env) == {"A": "it's"} and "it'" not in text
    assert invocation.argv[:2] == ("sbatch", "--export=ALL,A")
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --partition=gpu",
        "#SBATCH --time=1:00:00", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@60", "#SBATCH --exclusive", "cd '/my run'",
        "module load cuda",
    ):  # fmt: skip
        assert line in text.splitlines()
    made = next(line for line in text.splitlines() if "/dev/urandom" in line)
    shown = f"{made}; printenv FXTRAIN_RUN_SECRET"
    env = {"PATH": os.environ["PATH"]}  # without a secret that a launch in this process left
    first, second = (
        subprocess.check_output(["bash", "-c", shown], text=True, env=env) for _ in "12"
    )
    assert len(first.strip()) == 64 and first != second
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("extra", "says"),
    [((), "ALL,A"), (("--export=NONE",), "A"), (("--export=B,C", "--exclusive"), "B,C,A")],
)
def test_a_batch_job_takes_variables_by_name(extra, says):
    spec = spec_of("slurm", env=["A=1"], options=SlurmOptions(extra=extra))
    assert prepare(spec, HERE).argv[1] == f"--export={says}"


WITH_FILES = {
    "slurm": {},
    "kubernetes": {"image": "me/train:1"},
    "ray": {},
    "sagemaker": {"role": "me", "instance_type": "ml.g5.xlarge", "image_uri": "i"},
}


@pytest.mark.parametrize("launcher", WITH_FILES)
def test_files_are_for_this_user_only(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = spec_of(launcher, env=[f"TOKEN={VALUE}"], options=WITH_FILES[launcher])
    invocation = prepare(spec, HERE)
    (path,) = map(Path, invocation.files)
    path.parent.mkdir(exist_ok=True)
    path.write_text("an older one, which everybody can read")
    path.chmod(0o644)
    write_files(invocation)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == invocation.files[str(path)]
    assert (VALUE in path.read_text()) == (launcher != "slurm")
