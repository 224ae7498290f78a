"""What measures a device: memory, the share of its peak, profiles, and slow ranks."""

import pytest
import torch

import fxtrain as fx
from fxtrain.meters import memory, peak_flops
from fxtrain.ops.transport.pace import _SAMPLED, KEPT, Pace
from fxtrain.trackers import read_run
from tests._clock import measure_anew
from tests.devices._device import expect_warnings, is_gpu, keep_busy, synchronize
from tests.devices._training import adam, loss_of, net, parts

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20


def _memory(ctx):
    """Growth of what is allocated and of its peak by 64 MiB that are kept, and the total."""
    synchronize(ctx)
    before = memory(ctx)
    block = torch.ones(64 * MIB, dtype=torch.uint8, device=ctx.device)
    after = memory(ctx)
    return after.now - before.now, after.peak - block.nbytes, after.total, is_gpu(ctx)


def test_memory_of_the_device_is_measured(gpu):
    ((grown, peak, total, on_gpu),) = gpu.run(_memory)
    assert peak >= 0
    if on_gpu:
        assert 64 * MIB <= grown < 68 * MIB
        assert total > 1 << 30


def _entries(ctx, folder):
    """What `fit` logs of a network whose products keep a device busy."""
    plan = fx.Plan(precision=fx.Precision(compute="bf16"))
    loader, fns = parts(ctx, plan, module=net(2048 if is_gpu(ctx) else 64))
    list(fx.fit(ctx, fns, loader, folder, epochs=2, log_every=4, show=False))
    return read_run(folder).entries[-1]["values"], peak_flops(ctx, "bf16")


def test_fit_logs_the_share_of_the_peak(gpu, tmp_path):
    ((values, peak),) = gpu.run(_entries, str(tmp_path))
    assert 0 < values["memory_gib"] <= values["memory_peak_gib"]
    assert ("mfu" in values) == (peak is not None)
    if peak is not None:
        assert 0 < values["mfu"] < 1


def _profiled(ctx, folder):
    """The recorded steps, whether the parts add up, and the files; kernels last 20 ms a step."""
    expect_warnings()
    plan = fx.Plan(strategy=fx.DDP())
    loader, fns = parts(ctx, plan)

    def loss(model, batch):
        keep_busy(ctx, 0.02)
        return loss_of(model, batch)

    fns = fx.StepFns(model=fns.model, loss=loss)
    spec = fx.Profile(folder=folder, wait=1, warmup=1, active=3, memory=True, flops=True)
    with fx.profile(ctx, spec) as trace:
        for batch in loader:
            fx.step(ctx, batch, fns)
            trace.step()
    (rank,) = trace.summary.ranks
    steps = [
        (one.step_ns, one.forward_ns, one.backward_ns, one.optimizer_ns, one.idle_ns)
        for one in rank.steps
    ]
    return steps, rank.flops, [file.name for file in trace.files]


def test_a_profile_tells_what_the_device_did(nccl, tmp_path):
    ((steps, flops, files),) = nccl.run(_profiled, str(tmp_path))
    assert len(steps) == 3 and flops > 0 and files == ["rank-00000.json.gz"]
    for step, forward, backward, optimizer, idle in steps:
        assert min(forward, backward, optimizer) > 0
        assert forward + backward + optimizer + idle <= step
    snapshot = tmp_path / "cycle-000" / "rank-00000.pickle"
    if torch.cuda.is_available():
        assert snapshot.stat().st_size > 0
        assert sum(forward for _, forward, *_ in steps) > 0.8 * sum(step for step, *_ in steps)


def _slow(ctx):
    """The ranks that are named after updates in which kernels of rank 1 last 5 ms longer."""
    measure_anew(ctx)
    _, fns = parts(ctx, fx.Plan(strategy=fx.DDP()), optimizer=adam)

    def loss(model, batch):
        keep_busy(ctx, 0.005 * ctx.rank)
        return loss_of(model, batch)

    fns = fx.StepFns(model=fns.model, loss=loss)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    rows = torch.utils.data.TensorDataset(x, y)
    loader = fx.shard(torch.utils.data.DataLoader(rows, batch_size=8), ctx, fns.model.plan)
    updates = 3 * _SAMPLED * KEPT if is_gpu(ctx) else 32
    for update, batch in enumerate(loader.updates(updates)):
        report = fx.step(ctx, batch, fns)
        if update % 16 == 15:
            fx.ops.reduce(report.loss, ctx)
    pace = ctx.comm.slot(Pace)
    return sorted(pace.slow), pace.micros, is_gpu(ctx)


def test_a_rank_with_slow_kernels_is_named(two):
    found = two.run(_slow)
    on_gpu = found[0][2]
    assert found[0][0] == ([1] if on_gpu else [])  # rank 0 names it, for all
    if on_gpu:
        assert found[1][1] > 5000 > found[0][1] > 0
