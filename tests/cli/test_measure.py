"""`fxtrain env --measure`: what it measures, and the file that it writes."""

import json
from itertools import chain

import attrs
import pytest

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.diagnosis.measuring import measure_device
from fxtrain.state import Device, read_device
from fxtrain.testing.training import on_mesh
from tests.launched._run import FXTRAIN, run_fork


def _measured(ctx, mesh):
    done = []
    with on_mesh(ctx, mesh) as placed:
        device = measure_device(placed, lambda *progress: done.append(progress), each_s=0.01)
    return device, done


def _figures(device):
    rates = {field.name: getattr(device, field.name) for field in attrs.fields(Device)}
    tables = ("flops", "attention_flops", "convolution_flops", "collective_efficiency")
    names = (
        "memory",
        "memory_bandwidth",
        "launch_s",
        "link_bandwidth",
        "link_latency_s",
    )
    by_name = [rates[table].values() for table in tables]
    return [*chain(*by_name), *(rates[name] for name in names)]


def test_ranks_agree_on_figures_that_are_all_measured(pair):
    (device, done), (other, _) = pair.run(_measured, None)
    assert device == other and device.type == "cpu" and device.ranks_per_node == 2
    assert set(device.flops) == {"fp32", "bf16", "fp16"}
    assert set(device.attention_flops) == set(device.convolution_flops) == {"fp32", "bf16"}
    assert set(device.collective_efficiency) == {"all_gather", "reduce_scatter", "all_to_all"}
    assert all(figure > 0 for figure in _figures(device)) and 0 <= device.overlap <= 1
    assert device.hook_s >= 0
    assert (device.node_bandwidth, device.node_latency_s) == (
        device.link_bandwidth,
        device.link_latency_s,
    )
    assert "2 ranks" in device.source
    names = [name for name, _, _ in done]
    assert names == [
        "fp32", "bf16", "fp16", "attention", "convolutions", "memory", "launches", "replicate",
        "collectives", "hooks", "overlap", "",
    ]  # fmt: skip
    assert [number for _, number, _ in done] == [*range(12)]
    assert {count for _, _, count in done} == {11}


def test_each_axis_of_a_mesh_is_measured(clusters):
    device, done = clusters[4].run(_measured, fx.Mesh(replicate=2, tensor=2))[3]
    assert [name for name, _, _ in done][7:9] == ["replicate", "tensor"]
    assert device.ranks_per_node == 4


def test_one_rank_has_no_links_to_measure(clusters):
    device, done = clusters[1].run(_measured, None)[0]
    assert [name for name, _, _ in done][3:] == [
        "attention", "convolutions", "memory", "launches", "",
    ]  # fmt: skip
    assert device.overlap == device.hook_s == 0 and device.link_bandwidth > 0
    assert not device.collective_efficiency


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--measure", "here.txt"], Exit.WRONG, "choose a name that ends in .json, .toml"),
        (["--ranks", "2"], Exit.WRONG, "--ranks needs --measure FILE"),
    ],
)
def test_wrong_arguments(words, code, says, capsys):
    assert main(["env", *words]) == code
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_writes_what_it_prints(tmp_path):
    path = tmp_path / "here.toml"
    words = ("env", "--measure", str(path), "--ranks", "2", "--json")
    ended = run_fork(*FXTRAIN, *words, timeout_s=280.0, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    assert fx.state.structure(json.loads(ended.out), Device) == read_device(path)
