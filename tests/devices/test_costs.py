"""What a step costs beyond the loop by hand: waits of the host, kernels, allocations, memory."""

import importlib.util
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.trackers import read_run
from tests.devices._device import allocations, expect_warnings, is_gpu, kernels, no_waits
from tests.devices._training import adam, loss_of, net, parts, rows

pytestmark = pytest.mark.timeout(300)

PLANS = {
    "fp32": fx.Plan(),
    "clipped": fx.Plan(clip_norm=1.0),
    "accumulated": fx.Plan(accumulate=2),
    "bf16": fx.Plan(precision=fx.Precision(compute="bf16")),
    "weighted": fx.Plan(clip_norm=1.0, accumulate=2),
    "ddp": fx.Plan(strategy=fx.DDP(), clip_norm=1.0),
    "fsdp": fx.Plan(strategy=fx.FSDP(min_params=1), precision=fx.Precision(compute="bf16")),
    "recomputed": fx.Plan(recompute=("Linear",)),
    "compiled": fx.Plan(compile=fx.Compile(), clip_norm=1.0),
    "graphs": fx.Plan(compile=fx.Compile(mode="reduce-overhead")),
}
WAITS = {
    "skip": fx.Plan(nonfinite="skip"),
    "fp16": fx.Plan(precision=fx.Precision(compute="fp16")),
}


def _weighted(model, batch):
    return fx.Weighted(loss_of(model, batch) * 32, 32)


def _trained_without_waits(ctx, name, plan):
    expect_warnings()
    loader, fns = parts(ctx, plan)
    if name == "weighted":
        fns = fx.StepFns(model=fns.model, loss=_weighted)
    batches = list(loader)
    for batch in batches[:4]:
        fx.step(ctx, batch, fns)
    with no_waits(ctx):
        for batch in batches[4:]:
            report = fx.step(ctx, batch, fns)
    return float(report.loss)


@pytest.mark.parametrize("name", PLANS)
def test_a_step_never_waits_for_the_device(nccl, name):
    (loss,) = nccl.run(_trained_without_waits, name, PLANS[name])
    assert 0 < loss < 10


def _fitted_without_waits(ctx, folder):
    """Losses in the log of updates during which every wait is an error."""
    expect_warnings()
    loader, fns = parts(ctx, fx.Plan(clip_norm=1.0))
    to = [fx.JsonLines()]
    if importlib.util.find_spec("tensorboard"):
        to.append(fx.TensorBoard())
    how = {"epochs": 4, "save_epochs": False, "log_every": 1, "to": to}
    reports = fx.fit(ctx, fns, loader, folder, **how)
    seen = len([*itertools.islice(reports, 4)])
    with no_waits(ctx):
        seen += len([*itertools.islice(reports, 6)])
    reports.close()
    return [step for step, loss in read_run(folder).curve("loss") if 0 < loss < 10][:seen]


def test_trackers_and_progress_never_wait_for_the_device(nccl, tmp_path):
    assert nccl.run(_fitted_without_waits, str(tmp_path)) == [list(range(1, 11))]


def _waits(ctx, plan):
    """Whether torch's debug mode notices the wait of a plan that needs a value."""
    if not is_gpu(ctx):
        return True
    try:
        _trained_without_waits(ctx, "", plan)
    except RuntimeError as error:
        return "synchroniz" in str(error)
    return False


@pytest.mark.parametrize("name", WAITS)
def test_a_plan_that_needs_a_value_waits(gpu, name):
    assert gpu.run(_waits, WAITS[name]) == [True]


def _beside_the_loop(ctx):
    """Kernels and allocations of a step, and of the loop by hand."""
    expect_warnings()
    loader, fns = parts(ctx, fx.Plan(clip_norm=1.0))
    batch = next(iter(loader))
    model = net().to(ctx.device)
    optimizer = adam(model.parameters())
    features, labels = batch.data

    def by_hand():
        F.cross_entropy(model(features), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def ours():
        fx.step(ctx, batch, fns)

    return [(count(ctx, ours), count(ctx, by_hand)) for count in (kernels, allocations)]


def test_a_step_launches_the_kernels_of_the_loop_by_hand(one):
    ((launched, allocated),) = one.run(_beside_the_loop)
    assert launched[0] <= launched[1]
    assert allocated[0] <= allocated[1]


# Wide enough that the workspace of cuBLAS, which is not part of a dry run, is below 2 %.
WIDTH, ROWS = 1 << 18, 512


def _train_wide(ctx, plan):
    pin = ctx.device.type != "cpu"
    loader = fx.shard(DataLoader(rows(4 * ROWS), batch_size=ROWS, pin_memory=pin), ctx, plan)
    model = fx.wrap(net(WIDTH), ctx, plan, optimizer=adam)
    fns = fx.StepFns(model=model, loss=loss_of)
    for batch in loader:
        fx.step(ctx, batch, fns)


def _peaks(ctx):
    plan = fx.Plan(precision=fx.Precision(compute="bf16"))
    predicted = fx.dry_run(lambda ctx: _train_wide(ctx, plan), world=1).peak
    if not is_gpu(ctx):
        return predicted, predicted
    warm = torch.ones(64, 64, device=ctx.device)
    warm @ warm, warm.bfloat16() @ warm.bfloat16()  # allocates the workspaces of cuBLAS
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _train_wide(ctx, plan)
    return predicted, torch.cuda.max_memory_allocated() - before


def test_a_dry_run_predicts_the_peak(gpu):
    ((predicted, found),) = gpu.run(_peaks)
    assert predicted == pytest.approx(found, rel=0.05)
    assert found > 4 * 74 * WIDTH * 4  # weights, gradients and two moments
