"""A run under an adversary, which benchmarks/chaos draws from a seed: nothing is lost."""

import json
import logging
import subprocess
import sys

import pytest

from tests.nodes._lab import ROOT, problem

pytestmark = pytest.mark.nodes
SLOW = (pytest.mark.slow, pytest.mark.timeout(1200))


@pytest.mark.parametrize(
    ("seed", "seconds", "every"),
    [
        pytest.param(2, 60, 8, id="two minutes", marks=pytest.mark.timeout(440)),
        pytest.param(8, 420, 15, id="ten minutes", marks=SLOW),
    ],
)
def test_a_run_under_an_adversary_loses_no_row_and_no_bit(seed, seconds, every, tmp_path):
    if reason := problem():
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    words = (f"--seconds={seconds}", f"--every={every}", "--alone=5", f"--seed={seed}")
    run = subprocess.run(
        (sys.executable, "-m", "benchmarks.chaos", "--only=fxtrain", *words, "--show",
         f"--json={file}"),
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300 + 2 * seconds,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(file.read_text())["fxtrain"]
    text = json.dumps(found, indent=1) + run.stderr[-8000:]
    assert found["rows lost or repeated"] == 0, text
    assert found["updates with other bits"] == 0, text
    # How many updates were made depends on the machine; that some were does not.
    assert found["goodput"] > 0, text
    logging.getLogger(__name__).info("goodput %.2f", found["goodput"])
