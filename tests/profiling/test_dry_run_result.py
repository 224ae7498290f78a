"""The result of a dry run: traffic by axis, as a value, as a picture; sizes as text."""

import io
import xml.etree.ElementTree as ET

import attrs
import pytest
import torch
from rich.console import Console
from torch import distributed as dist
from torch import nn

import fxtrain as fx
from fxtrain.profiling import plot, read_bytes, show_bytes, table
from fxtrain.state import Memory
from fxtrain.state.dry_runs import PARTS
from tests._errors import raises_code
from tests.profiling._dry_runs import DRY_DDP, dry_linear
from tests.profiling._loops import by_steps

pytestmark = DRY_DDP


def test_traffic_is_told_by_axis():
    mesh = fx.Mesh(replicate=4, shard=2, tensor=2)

    def loop(ctx):
        weight = nn.Parameter(torch.ones(25))
        optimizer = torch.optim.SGD([weight])
        while True:
            weight.sum().backward()
            for axis in ("tensor", "shard", "data"):
                dist.all_reduce(weight.grad, group=ctx.axis(axis).comm.group)
            dist.all_reduce(weight.grad)
            optimizer.step()

    run = fx.dry_run(loop, world=16, rank=5, mesh=mesh)
    found = {row.axis: (row.ranks, row.count, row.bytes) for row in run.step}
    assert found == {
        "tensor": (2, 1, 100),
        "shard": (2, 1, 100),
        "data": (8, 1, 100),
        "world": (16, 1, 100),
    }


def test_another_mesh_than_asked_is_told():
    def loop(ctx):
        with fx.detect(mesh=fx.Mesh(shard=2)) as own:
            by_steps(own, fx.Plan())

    run = fx.dry_run(loop, world=4, mesh=fx.Mesh(tensor=2))
    assert run.mesh == fx.Mesh(replicate=2, shard=2)
    (problem,) = run.problems
    assert problem.kind == "mesh" and "shard=2" in problem.text and "tensor=2" in problem.text


def test_a_run_is_a_value():
    run = dry_linear(device_memory="1GB")
    text = fx.state.dumps(run)
    assert fx.state.loads(text, fx.state.DryRun) == run
    assert hash(run) == hash(fx.state.loads(text, fx.state.DryRun))
    with raises_code("FX200", "'gradient'"):
        fx.state.loads(text.replace('"gradients"', '"gradient"', 1), fx.state.DryRun)
    with raises_code("FX200", "world", "8.0"):
        fx.state.loads(text.replace('"world": 8', '"world": 8.0'), fx.state.DryRun)


def test_two_plans_side_by_side():
    one, two = dry_linear(), dry_linear(plan=fx.Plan(accumulate=4), world=64, device_memory="24GiB")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(one, two))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["parameters", "40.0", "kB", "40.0", "kB"] in lines
    assert ["accumulate", "1", "4"] in lines
    assert ["device", "not", "set", "25.8", "GB"] in lines
    assert [line[-8:] for line in lines if line[:1] == ["all_reduce"]] == [
        ["1", "x", "40.0", "kB", "1", "x", "40.0", "kB"]
    ]


def test_a_picture_shows_every_part_and_the_device(tmp_path):
    run = dry_linear(device_memory=200_000)
    (axes,) = plot(run).axes
    held = [part for part in PARTS if any(getattr(m, part) for m in run.timeline)]
    assert axes.get_legend_handles_labels()[1] == [*held, "device, 200 kB"]
    assert show_bytes(run.peak) in axes.get_title(loc="left")
    heights = [path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths()]
    assert max(heights) == run.peak
    far = plot(attrs.evolve(run, device_memory=10**12))  # would leave nothing to see
    assert far.axes[0].get_legend_handles_labels()[1] == held
    for odd in (
        attrs.evolve(run, timeline=(Memory(),), name="<&>$x"),
        attrs.evolve(run, timeline=()),
    ):
        plot(odd).savefig(tmp_path / "odd.svg")
        assert ET.parse(tmp_path / "odd.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("1.5kb", 1500), (7, 7), ("2e3", 2000)],
)
def test_sizes_are_read(size, bytes_):
    assert read_bytes(size) == bytes_


@pytest.mark.parametrize(
    "size", ["", "GB", "1.2.3GB", "80 XB", 0, -4, True, "-4GB", "inf", "1e999"]
)
def test_what_is_no_size_is_refused(size):
    with raises_code("FX200", "device_memory="):
        read_bytes(size)
