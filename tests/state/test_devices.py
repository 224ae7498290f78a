"""Devices: the table, and files."""

import pytest

import fxtrain as fx
from fxtrain.state import DEVICES, Device, read_device, write_record
from tests._errors import raises_code


def test_a_name_in_any_case_is_that_of_the_table():
    assert read_device("rtx4090") is read_device("RTX 4090") is DEVICES["RTX 4090"]
    assert read_device(DEVICES["H100"]) is DEVICES["H100"]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_published_device_names_its_source_and_what_is_assumed(device):
    assert "assumption" in device.source and device.type == "gpu"
    assert device.flops["fp32"] < device.flops["fp16"]
    assert device.flops.get("bf16", device.flops["fp16"]) == device.flops["fp16"]
    assert device.node_bandwidth <= 64e9 and hash(device) == hash(read_device(device.name))


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml"])
def test_a_file_is_read_as_it_was_written(suffix, tmp_path):
    path = tmp_path / f"mine{suffix}"
    write_record(DEVICES["L40S"], path)
    assert read_device(path) == read_device(str(path)) == DEVICES["L40S"]


@pytest.mark.parametrize("flops", [{}, {"bf16": 0}, {"bf16": "fast"}, 3.0])
def test_rates_that_are_none_are_refused(flops):
    values = {**fx.state.unstructure(DEVICES["H100"]), "flops": flops}
    with raises_code("FX200", "flops"):
        Device(**values)
    with raises_code("FX200", "flops"):
        fx.state.structure(values, Device)
