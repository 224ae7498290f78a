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
from tests.devices._device import allocations, expect_warnings, is_gpu, kernels, no_waits, waits
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


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.randn(4, 64, 64) / 8)

    def forward(self, tokens, index, weights):
        products = lambda rows, product: product(rows, self.weight).relu()  # noqa: E731
        return fx.experts.mix(tokens, index, weights, self.num_experts, products)


class _Mixture(nn.Module):
    """Two experts for each row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts, self.head = nn.Linear(64, 4), _Experts(), nn.Linear(64, 10)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        weights, index = (self.gate(x).softmax(-1) + self.bias).topk(2)
        return self.head(self.experts(x, index, weights))


def _waits(ctx, plan, kind=net):
    """How often the host waits for the device in each of some steps, and the device."""
    loader, fns = parts(ctx, plan, module=kind())
    batches = list(loader)
    for batch in batches[:2]:
        fx.step(ctx, batch, fns)
    found = [waits(ctx, lambda batch=batch: fx.step(ctx, batch, fns)) for batch in batches[2:4]]
    return found, ctx.device.type


# The waits of a step, as docs/gpu.md has them.
NEEDED = {
    "skip": (1, fx.Plan(strategy=fx.DDP(), nonfinite="skip")),
    "fp16": (1, fx.Plan(strategy=fx.DDP(), precision=fx.Precision(compute="fp16"))),
    "replicas": (1, fx.Plan(strategy=fx.DDP(), verify_replicas=1)),
    "mixture": (1, fx.Plan(strategy=fx.DDP())),
    "experts": (2, fx.Plan(strategy=fx.FSDP(expert=2))),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_step_waits_for_the_device_as_often_as_the_page_says(two, name):
    count, plan = NEEDED[name]
    kind = _Mixture if name in ("mixture", "experts") else net
    for found, device in two.run(_waits, plan, kind):
        assert found == [count * (device != "cpu")] * 2


def _balanced(ctx):
    """Waits of a step of a mixture that counts its tokens, and of the update of its biases."""
    module = _Mixture()
    update = fx.experts.balance_bias(module, bias="bias", rate=0.1)
    loader, fns = parts(ctx, fx.Plan(), module=module)
    batches = list(loader)
    fx.step(ctx, batches[0], fns)
    update(fns.model)
    found = [waits(ctx, lambda: fx.step(ctx, batches[1], fns))]
    return [*found, waits(ctx, lambda: update(fns.model)), ctx.device.type]


def test_counting_the_tokens_of_experts_waits_for_nothing(one):
    ((step, update, device),) = one.run(_balanced)
    assert (step, update) == (int(device != "cpu"), 0)


def _damaged(ctx):
    """The error of a comparison after one rank has changed a bit, on the device."""
    loader, fns = parts(ctx, fx.Plan(strategy=fx.DDP(), verify_replicas=1))
    batches = list(loader)
    fx.step(ctx, batches[0], fns)
    if ctx.rank == 1:
        weight = fns.model.module[2].weight.detach()
        weight.view(-1).view(torch.int32)[7] ^= 1
    try:
        fx.step(ctx, batches[1], fns)
    except fx.errors.StepError as error:
        return str(error)
    return ""


def test_replicas_that_differ_on_the_device_are_named(two):
    first, second = two.run(_damaged)
    assert first == second
    assert "ranks 0-1: 1 tensor differs between them: 2.weight" in first


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
