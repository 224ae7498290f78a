"""What only a GPU shows: host synchronisations, kernels, memory, graphs, NCCL.

Skipped without a CUDA device.
"""

import time

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.ops import closing
from fxtrain.state import Topology
from tests.devices._training import adam, loss_of, net, parts, rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


PLANS = {
    "fp32": fx.Plan(),
    "clipped": fx.Plan(clip_norm=1.0),
    "accumulated": fx.Plan(accumulate=2),
    "bf16": fx.Plan(precision=fx.Precision(compute="bf16")),
    "weighted": fx.Plan(clip_norm=1.0, accumulate=2),
}


def _weighted(model, batch):
    return fx.Weighted(loss_of(model, batch) * 32, 32)


def _waits(ctx, name):
    """Train with every wait of the host for the device an error."""
    loader, fns = parts(ctx, PLANS[name])
    if name == "weighted":
        fns = fx.StepFns(model=fns.model, loss=_weighted)
    batches = list(loader)
    for batch in batches[:4]:
        fx.step(ctx, batch, fns)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[4:]:
            report = fx.step(ctx, batch, fns)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return float(report.loss)


@pytest.mark.parametrize("name", PLANS)
def test_a_step_never_waits_for_the_device(nccl, name):
    (loss,) = nccl.run(_waits, name)
    assert 0 < loss < 10


def _kernels(run):
    """How many kernels a call launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = [one for one in trace.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not one.name.startswith(("Memcpy", "Memset")) for one in events)


def _launched(ctx):
    plan = fx.Plan(clip_norm=1.0)
    loader, fns = parts(ctx, plan)
    batch = next(iter(loader))
    model = net().to(ctx.device)
    optimizer = adam(model.parameters())
    features, labels = batch.data

    def by_hand():
        F.cross_entropy(model(features), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _kernels(lambda: fx.step(ctx, batch, fns)), _kernels(by_hand)


def test_a_step_launches_the_kernels_of_the_loop_by_hand(one):
    ((ours, by_hand),) = one.run(_launched)
    assert ours <= by_hand


def _peaks(ctx):
    plan = fx.Plan(precision=fx.Precision(compute="bf16"))

    def train(ctx):
        loader = fx.shard(DataLoader(rows(2048), batch_size=512, pin_memory=True), ctx, plan)
        model = fx.wrap(net(8192), ctx, plan, optimizer=adam)
        fns = fx.StepFns(model=model, loss=loss_of)
        for batch in loader:
            fx.step(ctx, batch, fns)

    predicted = fx.dry_run(train, world=1).peak
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(ctx)
    return predicted, torch.cuda.max_memory_allocated() - before


def test_a_dry_run_predicts_the_peak(one):
    ((predicted, found),) = one.run(_peaks)
    assert predicted == pytest.approx(found, rel=0.05)


def _losses(ctx, plan, settings):
    loader, fns = parts(ctx, plan, optimizer=lambda p: adam(p, **settings))
    return [float(fx.step(ctx, batch, fns).loss) for batch in loader]


VARIANTS = {
    "fused": (fx.Plan(), {"fused": True}),
    "foreach": (fx.Plan(), {"foreach": True}),
    "compiled": (fx.Plan(compile=fx.Compile()), {}),
    "with graphs": (fx.Plan(compile=fx.Compile(mode="reduce-overhead")), {}),
    "compiled blocks": (fx.Plan(compile=fx.Compile(blocks=("Linear",))), {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_as_the_plain_loop(one, name):
    plan, settings = VARIANTS[name]
    (plain,), (found,) = one.run(_losses, fx.Plan(), {}), one.run(_losses, plan, settings)
    assert found == pytest.approx(plain, rel=1e-3)


def _exhausted(ctx):
    loader, fns = parts(ctx, fx.Plan())
    batches = iter(loader)
    greedy = fx.StepFns(
        model=fns.model,
        loss=lambda model, batch: loss_of(model, batch) + torch.empty(1 << 50, device="cuda").sum(),
    )
    try:
        fx.step(ctx, next(batches), greedy)
    except torch.OutOfMemoryError:
        return True
    return False


def _copies(ctx, pin):
    """Read batches while kernels run: the longest wait for one, and whether all are right."""
    rows = torch.arange(64.0).view(16, 4)
    loader = fx.shard(DataLoader(rows, batch_size=4, pin_memory=pin), ctx)
    tuple(loader)
    longest, right = 0.0, True
    batches = iter(loader)
    for number in range(4):
        torch.cuda._sleep(2_000_000_000)  # cycles, so about a second
        begin = time.perf_counter()
        batch = next(batches)
        longest = max(longest, time.perf_counter() - begin)
        right &= torch.equal((batch.data * 2).cpu(), rows[4 * number : 4 * number + 4] * 2)
    return longest, right


@pytest.mark.parametrize("pin", [False, True])
def test_batches_are_copied_while_kernels_run(nccl, pin):
    ((longest, right),) = nccl.run(_copies, pin)
    assert right
    assert longest < 0.5


def test_running_out_of_memory_is_torchs_error(one):
    assert one.run(_exhausted) == [True]


def _left(ctx):
    """Seconds until a rank that fails has left a group whose kernels are still running."""
    store = dist.HashStore()
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=ctx.device)
    close = closing.make_close(Topology(rank=0, world_size=1), dist.HashStore(), 5.0)
    torch.cuda._sleep(int(30e9 * 1.5))  # cycles: tens of seconds
    dist.all_reduce(torch.ones(1, device=ctx.device))
    started = time.monotonic()
    close(ValueError("bad"))
    return time.monotonic() - started


def test_a_rank_that_fails_leaves_at_once(nccl):
    try:
        assert nccl.run(_left)[0] < 7
    finally:
        nccl.close()
