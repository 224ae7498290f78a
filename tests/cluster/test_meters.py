"""Meters: sums over ranks equal the whole, and cost next to nothing."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import _host_memory
from fxtrain.meters import _peak_of
from tests._clock import Clock


def _metered(ctx, rows):
    clock = Clock()
    meter = fx.meters.Meter(started_s=clock.perf_counter())
    loader = fx.shard(DataLoader(torch.arange(float(rows)), batch_size=2), ctx)
    for batch in loader:
        mine = batch.rows[ctx.rank]
        meter = meter.update(batch, tokens=mine * 5, flops=mine * 7.0, waited_s=1.0)
    clock.sleep(10 - ctx.rank)  # rank 0 is the slowest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx.meters, "time", clock)
        return meter, meter.rates(ctx, peak=100.0), meter.rates(ctx), len(loader)


@pytest.mark.parametrize("rows", [1, 7])
def test_sums_over_ranks_are_the_whole(cluster, rows):
    found = cluster.run(_metered, rows)
    assert sum(meter.tokens for meter, *_ in found) == 5 * rows
    for meter, rates, without_peak, steps in found:
        assert meter.rows == rows
        assert rates == found[0][1]
        assert rates["rows_per_s"] == pytest.approx(rows / 10)
        assert rates["tokens_per_s"] == pytest.approx(5 * rows / 10)
        assert rates["flops_per_s"] == pytest.approx(7 * rows / 10)
        assert rates["mfu"] == pytest.approx(rates["flops_per_s"] / (100 * cluster.n))
        assert rates["waiting"] == pytest.approx(steps / 10)
        assert "mfu" not in without_peak


def _calls(ctx):
    batch = next(iter(fx.shard(DataLoader(torch.zeros(2)), ctx)))
    meter, count = fx.meters.Meter(), 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        for one, waited_s in fx.meters.timed([batch] * 100):
            meter = meter.update(one, tokens=3, waited_s=waited_s)
    finally:
        sys.setprofile(None)
    return count / 100


def test_a_step_with_meters_adds_at_most_10_python_calls(clusters):
    (calls,) = clusters[1].run(_calls)
    assert 0 < calls <= 10


def test_time_in_the_body_is_not_waiting(clock_of):
    clock = clock_of(fx.meters)

    def batches():
        for number in range(3):
            clock.sleep(0.25)
            yield number

    waited = 0.0
    for _, seconds in fx.meters.timed(batches()):
        clock.sleep(2.0)
        waited += seconds
    assert waited == 0.75


def test_flops_are_torchs_own():
    net = torch.nn.Linear(8, 4)
    assert fx.meters.count_flops(lambda: net(torch.ones(2, 8))) == 2 * 2 * 8 * 4
    assert fx.meters.count_flops(lambda: net(torch.ones(2, 8)).sum().backward()) == 2 * (
        2 * 2 * 8 * 4
    )


DEVICES = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 NVL": None,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "AMD Instinct MI300X": 1307.4e12,
    "NVIDIA A10G": 125e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": None,
    "NVIDIA A1000": None,
    "Tesla T4": None,
}


@pytest.mark.parametrize("device", DEVICES)
def test_peaks_are_those_of_the_device(device):
    assert _peak_of(device, "bf16") == DEVICES[device]


def test_memory_is_what_the_process_uses(ctx):
    memory = fx.meters.memory(ctx)
    assert memory.peak >= memory.now > 0


def test_memory_is_what_linux_says(ctx, monkeypatch, tmp_path):
    status = tmp_path / "status"
    monkeypatch.setattr(_host_memory, "_STATUS_OF_THIS", status)
    monkeypatch.setattr("sys.platform", "linux")
    status.write_text("Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    2000 kB\nThreads:\t1\n")
    memory = fx.meters.memory(ctx)
    assert (memory.now, memory.peak) == (2000 << 10, 3000 << 10)
    status.write_text("VmHWM:\t3000 kB\nVmRSS:\t3001 kB\n")  # which has grown between the two
    assert fx.meters.memory(ctx).peak == 3001 << 10
