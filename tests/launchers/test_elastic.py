"""What the native launcher looks at before it starts ranks."""

import subprocess
import sys

import pytest
import torch

from fxtrain.errors import LaunchError
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.built_in.native.elastic import check_devices


@pytest.mark.parametrize(
    ("there", "fields", "says"),
    [
        (2, {"ranks": 3}, "3 ranks were requested, but this machine has 2 cuda devices"),
        (1, {"gpus": ("0", "7")}, "The GPUs 0,7 were chosen, but only 1 of them are usable"),
    ],
)
def test_ranks_that_do_not_match_the_gpus_of_a_machine(there, fields, says, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: "cuda")
    with pytest.raises(LaunchError, match=says):
        check_devices(LaunchSpec(target="train.py", **fields))
    check_devices(LaunchSpec(target="train.py", ranks=3, cpu=True))
    check_devices(LaunchSpec(target="train.py", ranks=there))


def test_the_launcher_is_imported_without_torch():
    """It makes torch's C++ code quiet, and checks ports and file names, before torch is loaded."""
    words = "import sys, fxtrain.launchers.built_in.native.elastic; print('torch' in sys.modules)"
    done = subprocess.run(
        (sys.executable, "-c", words), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
