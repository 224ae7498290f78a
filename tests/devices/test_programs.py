"""Commands and launched programs on the device: `fxtrain env`, `test`, and `launch`."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from tests.devices._device import STAND_IN, WHERE, gpus
from tests.launched._run import FXTRAIN, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROGRAM = str(Path(__file__).with_name("program.py"))
ON_CPU = () if torch.cuda.is_available() else ("--cpu",)


def launch(*words, ranks=1):
    """Start a program on ranks, and wait for its end."""
    return run(*FXTRAIN, "launch", "--ranks", str(ranks), *ON_CPU, *words, timeout_s=240)


def test_env_shows_the_device():
    ended = run(*FXTRAIN, "env", "--json", timeout_s=120)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    if STAND_IN:
        assert told["torch"]["is_cuda_available"] == "False"
        return
    assert torch.cuda.get_device_name() in told["torch"]["nvidia_gpu_models"]
    assert re.match(r"\d+\.\d+", told["torch"]["nvidia_driver_version"])
    assert "nccl" in told["communication"]["back ends"]
    assert re.match(r"\d+\.\d+\.\d+", told["communication"]["NCCL"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_configured_setup_is_tested_on_the_device(ranks):
    if ranks > gpus():
        pytest.skip("torch sees fewer than two CUDA devices")
    ended = run(
        *FXTRAIN, "test", "--json", "--ranks", str(ranks), "--mib", "1", timeout_s=240,
        # As on a machine with that many GPUs and no other setting.
        **({"FXTRAIN_LAUNCH__CPU": "true"} if STAND_IN else {}),
    )  # fmt: skip
    assert ended.code == 0, ended.out + ended.err
    told = json.loads(ended.out)
    assert told["problems"] == []
    assert all(one["right"] for one in told["collectives"])


@pytest.mark.parametrize("mode", ["node", "exclusive"])
def test_a_rank_is_bound_to_cores_of_its_device(mode):
    ended = launch("--numa-binding", mode, PROGRAM, "bound", WHERE)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["total"] == 8
    assert set(told["cores"]) <= os.sched_getaffinity(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_restarts_and_resumes_bit_for_bit(tmp_path, ranks):
    if ranks > gpus():
        pytest.skip("torch sees fewer than two CUDA devices")
    whole = launch(PROGRAM, "killed", WHERE, str(tmp_path / "whole"), "no", ranks=ranks)
    assert whole.code == 0, whole.err
    words = ("--restarts", "1", PROGRAM, "killed", WHERE, str(tmp_path), "yes")
    ended = launch(*words, ranks=ranks)
    assert ended.code == 0, ended.err
    told, wanted = json.loads(ended.out), json.loads(whole.out)
    assert told["resumed"] and told["device"] == WHERE
    assert told["losses"] == wanted["losses"][5:]


def test_a_rank_that_never_joins_an_update_ends_thelaunch(tmp_path):
    """Under NCCL the watchdog ends the ranks that wait, and the launcher says which."""
    if gpus() < 2:
        pytest.skip("torch sees fewer than two CUDA devices")
    begin = time.monotonic()
    ended = launch(PROGRAM, "absent", WHERE, ranks=2)
    assert ended.code == 1
    assert time.monotonic() - begin < 120
    assert re.search(r"Rank 0 of 2 (failed|ended)", ended.err), ended.err


def test_a_rank_that_waits_for_its_device_restarts_with_the_others():
    if gpus() < 2:
        pytest.skip("torch sees fewer than two CUDA devices")
    ended = launch(PROGRAM, "restarted", WHERE, ranks=2)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    first, second = told["losses"]
    assert len(second) == 4 and first[:2] == second[:2]
    # Ranks that wait in a collective of gloo are interrupted at its timeout.
    assert STAND_IN or told["share_of_timeout"] < 0.5
