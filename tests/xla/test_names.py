"""The names of a module on a model that XLA trains on four devices."""

import pytest
import torch

import fxtrain as fx
from tests.cluster._names import names

pytestmark = [pytest.mark.xla, pytest.mark.timeout(400)]


def test_names_on_four_devices(spmd):
    (found,) = spmd.run(names, {"strategy": fx.XLA()}, None, torch.float32)
    assert found["parameters"] and found["modules"] and found["config"] and found["device"]
    assert found["state_dict"] is True, found["state_dict"]
    assert found["generate"] is True, found["generate"]
    assert found["deepcopy"].startswith("CopyError")
