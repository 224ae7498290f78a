"""Optimizers, compilation, precision and recomputation on the device train as the plain loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxtrain as fx
from tests.devices._device import STAND_IN, expect_warnings, is_gpu
from tests.devices._training import adam, loss_of, net, parts

pytestmark = pytest.mark.timeout(300)

FP16 = fx.Plan(precision=fx.Precision(compute="fp16", scale=fx.LossScale(initial=2.0**10)))


def _losses(ctx, plan, settings):
    expect_warnings()
    loader, fns = parts(ctx, plan, optimizer=lambda p: adam(p, **settings))
    return [float(fx.step(ctx, batch, fns).loss) for batch in loader]


VARIANTS = {
    "fused": (fx.Plan(), {"fused": True}),
    "foreach": (fx.Plan(), {"foreach": True}),
    "one by one": (fx.Plan(), {"foreach": False}),
    "fp16": (FP16, {}),
    "fp16, fused": (FP16, {"fused": True}),
    "clipped, fused": (fx.Plan(clip_norm=100.0), {"fused": True}),
    "compiled": (fx.Plan(compile=fx.Compile()), {}),
    "graphs": (fx.Plan(compile=fx.Compile(mode="reduce-overhead")), {}),
    "compiled blocks": (fx.Plan(compile=fx.Compile(blocks=("Linear",))), {}),
    "graphs of blocks": (
        fx.Plan(compile=fx.Compile(blocks=("Linear",), mode="reduce-overhead")),
        {},
    ),
    "compiled, accumulated": (fx.Plan(compile=fx.Compile(), accumulate=2), {}),
    "recomputed": (fx.Plan(recompute=("Linear",)), {}),
    "capturable": (fx.Plan(), {"capturable": True}),
}
# fp16 rounds.
TOLERANCES = {"fp16": 1e-2, "fp16, fused": 1e-2}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_as_the_plain_loop(gpu, name):
    plan, settings = VARIANTS[name]
    if settings.get("capturable") and STAND_IN:
        pytest.skip("torch has capturable optimizers for GPUs only")
    plain = fx.Plan(accumulate=plan.accumulate)
    (wanted,), (found,) = gpu.run(_losses, plain, {}), gpu.run(_losses, plan, settings)
    assert found == pytest.approx(wanted, rel=TOLERANCES.get(name, 1e-3))


def _tf32(ctx, precision):
    """Whether a step computes as the loop by hand does, and leaves torch's setting as it was."""
    expect_warnings()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        loader, fns = parts(ctx, fx.Plan(), module=net(1024))
        by_hand = net(1024).to(ctx.device)
        optimizer = adam(by_hand.parameters())
        found, wanted = [], []
        for batch in loader:
            found.append(float(fx.step(ctx, batch, fns).loss))
            loss = loss_of(by_hand, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(float(loss.detach()))
        kept = torch.get_float32_matmul_precision() == precision
        x = torch.randn(1024, 1024, device=ctx.device)
        exact = (x.double() @ x.double()).float()
        return found, wanted, kept, float((x @ x - exact).abs().max())
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_setting_of_tf32_is_the_users(gpu, precision):
    ((found, wanted, kept, off),) = gpu.run(_tf32, precision)
    assert found == wanted and kept
    if not STAND_IN:
        assert (off > 1e-2) == (precision == "high")  # products in TF32 have 10 bits


class Odd(nn.Module):
    """Buffers, a sum over all rows, and a parameter that is used twice."""

    def __init__(self):
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, x_BF):
        return self.last(self.first(self.first(self.norm(x_BF))).relu())


def _memory(ctx, recompute):
    plan = fx.Plan(recompute=("Sequential",) if recompute else ())
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(32)))
    module = nn.Sequential(nn.Linear(64, 64), deep, nn.Linear(64, 10))
    loader, fns = parts(ctx, plan, module=module)
    peaks = []
    for batch in loader:
        if is_gpu(ctx):
            torch.cuda.reset_peak_memory_stats()
        fx.step(ctx, batch, fns)
        peaks.append(torch.cuda.max_memory_allocated() if is_gpu(ctx) else 2 - recompute)
    return peaks[-1]


def test_recomputation_saves_memory(gpu):
    (less,), (more,) = gpu.run(_memory, True), gpu.run(_memory, False)
    assert less < more


def _with_buffers(ctx, plan):
    expect_warnings()
    torch.manual_seed(5)
    loader, fns = parts(ctx, plan, module=Odd())
    losses = [float(fx.step(ctx, batch, fns).loss) for batch in loader]
    return losses, fns.model.module.norm.running_mean.cpu().tolist()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_modules_update_their_buffers(gpu, mode):
    (plain,) = gpu.run(_with_buffers, fx.Plan())
    (found,) = gpu.run(_with_buffers, fx.Plan(compile=fx.Compile(mode=mode)))
    assert found[0] == pytest.approx(plain[0], rel=1e-3)
    assert found[1] == pytest.approx(plain[1], rel=1e-3, abs=1e-5)


class _WithLoss(nn.Module):
    """A module whose output, which a graph writes, is its loss."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, rows, labels):
        return F.cross_entropy(self.inner(rows), labels)


def _reports(ctx, plan):
    """Losses when they are reported, and what the reports say at the end."""
    expect_warnings()
    loader, fns = parts(ctx, plan, module=_WithLoss())
    fns = fx.StepFns(model=fns.model, loss=lambda model, batch: model(*batch.data))
    reports = [fx.step(ctx, batch, fns) for batch in loader]
    kept = [report.loss for report in reports]
    again = [float(fx.step(ctx, batch, fns).loss) for batch in loader]
    return len({float(loss) for loss in kept}), len(kept), max(again) < float(kept[0])


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_reports_under_graphs_keep_their_losses(gpu, mode):
    ((different, losses, falls),) = gpu.run(_reports, fx.Plan(compile=fx.Compile(mode=mode)))
    assert different == losses and falls


def _evaluated(ctx, plan):
    """Losses of evaluations before training, and of three after it; no batch is trained between."""
    expect_warnings()
    loader, fns = parts(ctx, plan)
    means = [fx.evaluate(ctx, fns.model, loader, fns.loss)]
    for batch in loader:
        fx.step(ctx, batch, fns)
    return means + [fx.evaluate(ctx, fns.model, loader, fns.loss) for _ in range(3)]


def test_blocks_under_graphs_are_evaluated(gpu):
    blocks = fx.Compile(blocks=("Linear",), mode="max-autotune")
    (plain,) = gpu.run(_evaluated, fx.Plan())
    (found,) = gpu.run(_evaluated, fx.Plan(compile=blocks))
    assert found == pytest.approx(plain, rel=1e-3)
    assert found[1] == found[2] == found[3]


def _refusal(ctx):
    plan = fx.Plan(compile=fx.Compile(mode="reduce-overhead"), accumulate=2)
    try:
        fx.wrap(net(), ctx, plan, optimizer=adam)
    except fx.PlanError as error:
        return str(error)
    return ""


def test_gradients_that_a_graph_overwrites_are_refused(gpu):
    (text,) = gpu.run(_refusal)
    assert ("issue 169545" in text) == (not STAND_IN)
