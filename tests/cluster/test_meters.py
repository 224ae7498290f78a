"""Meters: sums over ranks equal the whole, and cost next to nothing."""

import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.meters import _peak_of


def _metered(ctx, rows):
    meter = fx.meters.Meter(started_s=time.perf_counter() - 10)
    loader = fx.shard(DataLoader(torch.arange(float(rows)), batch_size=2), ctx)
    for batch in loader:
        mine = batch.rows[ctx.rank]
        meter = meter.update(batch, tokens=mine * 5, flops=mine * 7.0, waited_s=1.0)
    return meter, meter.rates(ctx, peak=100.0), meter.rates(ctx), len(loader)


@pytest.mark.parametrize("rows", [1, 7])
def test_sums_over_ranks_are_the_whole(cluster, rows):
    found = cluster.run(_metered, rows)
    assert sum(meter.tokens for meter, *_ in found) == 5 * rows
    for meter, rates, without_peak, steps in found:
        assert meter.rows == rows
        assert rates == found[0][1]
        seconds = rows / rates["rows_per_s"]
        assert 10 <= seconds < 60
        assert rates["tokens_per_s"] * seconds == pytest.approx(5 * rows)
        assert rates["flops_per_s"] * seconds == pytest.approx(7 * rows)
        assert rates["mfu"] == pytest.approx(rates["flops_per_s"] / (100 * cluster.n))
        assert rates["waiting"] * seconds == pytest.approx(steps)
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


def test_time_in_the_body_is_not_waiting():
    def batches():
        for number in range(3):
            time.sleep(0.02)
            yield number

    waited = 0.0
    for _, seconds in fx.meters.timed(batches()):
        time.sleep(0.2)
        waited += seconds
    assert 0.06 <= waited < 0.2


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
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A10G": 125e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": None,
    "NVIDIA A1000": None,
    "Tesla T4": None,
}


@pytest.mark.parametrize("device", DEVICES)
def test_peaks_are_those_of_the_device(device):
    assert _peak_of(device, "bf16") == DEVICES[device]


def test_memory_is_what_the_process_uses():
    with fx.detect(env={}, device="cpu") as ctx:
        before = fx.meters.memory(ctx)
        held = torch.ones(64 << 20, dtype=torch.uint8)
        after = fx.meters.memory(ctx)
    assert after.now - before.now >= 48 << 20
    assert after.peak >= after.now > 0 and held[0]
