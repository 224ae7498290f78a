"""A run under an adversary, which benchmarks/chaos draws from a seed: nothing is lost."""

import json
import subprocess
import sys

import pytest

from tests.nodes._lab import ROOT, problem

SECONDS = 40


@pytest.mark.nodes
@pytest.mark.slow
@pytest.mark.timeout(290)
@pytest.mark.parametrize("seed", [2, 8])
def test_a_run_under_an_adversary_loses_no_row_and_no_bit(seed, tmp_path):
    if reason := problem():
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    words = ("--only=fxtrain", f"--seconds={SECONDS}", "--every=10", "--alone=5", f"--seed={seed}")
    run = subprocess.run(
        (sys.executable, "-m", "benchmarks.chaos", *words, "--show", f"--json={file}"),
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(file.read_text())["fxtrain"]
    text = json.dumps(found, indent=1) + run.stderr[-8000:]
    assert found["rows lost or repeated"] == 0, text
    assert found["updates with other bits"] == 0, text
    assert found["goodput"] > 0, text
    # The last event may be too late to recover from before the end.
    assert all(event["recovered_s"] < SECONDS for event in found["events"]), text
