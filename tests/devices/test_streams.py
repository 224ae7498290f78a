"""Copies on streams of their own: batches to the device, saves in the background from it."""

import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.devices._device import is_gpu, keep_busy, no_waits, synchronize
from tests.devices._training import adam, parts

pytestmark = pytest.mark.timeout(300)


def _copies(ctx, pin):
    """Read batches while kernels run: the longest wait for one, and whether all are right."""
    rows = torch.arange(64.0).view(16, 4)
    loader = fx.shard(DataLoader(rows, batch_size=4, pin_memory=pin and is_gpu(ctx)), ctx)
    tuple(loader)
    longest, right = 0.0, True
    batches = iter(loader)
    for number in range(4):
        keep_busy(ctx, 1.0)
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


def _many_batches(ctx):
    """Large batches whose kernels lag behind: memory of a copy is not reused before it is read."""
    rows = torch.arange(float(1 << 22)).view(64, -1)
    loader = fx.shard(DataLoader(rows, batch_size=2, pin_memory=is_gpu(ctx)), ctx)
    sums = []
    for batch in loader:
        keep_busy(ctx, 0.01)
        sums.append(batch.data.double().sum())
        del batch
    return torch.stack(sums).sum().item() == rows.double().sum().item()


def test_memory_of_a_batch_is_not_reused_before_its_kernels_end(nccl):
    assert nccl.run(_many_batches) == [True]


def _without_waits(ctx, workers):
    """Read batches from pinned memory with every wait an error."""
    loader = fx.shard(
        DataLoader(
            torch.arange(64.0).view(16, 4),
            batch_size=4,
            pin_memory=is_gpu(ctx),
            num_workers=workers,
        ),
        ctx,
    )
    tuple(loader)
    with no_waits(ctx):
        found = [batch.data for batch in loader]
    return torch.cat(found).sum().item()


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_pinned_batches_never_waits(nccl, workers):
    assert nccl.run(_without_waits, workers) == [2016.0]


WIDE = 1 << 18  # 78 MB of weights, and twice as much of moments: copying them takes a while


def _wide(ctx, seed=1):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, 10))
    return parts(ctx, fx.Plan(), module=net)


def _saved_while_training(ctx, folder):
    """Save behind running kernels, change everything at once, and restore what was saved."""
    loader, fns = _wide(ctx)
    batches = list(loader)
    fx.step(ctx, batches[0], fns)
    keep_busy(ctx, 0.5)
    with torch.no_grad():
        for parameter in fns.model.parameters():
            parameter.add_(1.0)  # still queued behind the busy kernel when save begins
    wanted = [parameter.detach().clone() for parameter in fns.model.parameters()]
    saving = fx.save(folder, ctx, fns.model, position=fx.Position(), background=True)
    for batch in batches[1:4]:
        fx.step(ctx, batch, fns)
    saving.result()
    _, again = _wide(ctx, seed=2)
    fx.restore(fx.latest(folder), ctx, again.model)
    pairs = zip(again.model.parameters(), wanted, strict=True)
    changed = zip(fns.model.parameters(), wanted, strict=True)
    return all(torch.equal(a, b) for a, b in pairs), any(not torch.equal(a, b) for a, b in changed)


def test_a_background_save_has_the_values_of_its_call(one, tmp_path):
    assert one.run(_saved_while_training, str(tmp_path)) == [(True, True)]


def _blocked(ctx, folder):
    """Seconds until the first and a second background save return, and one in the foreground."""
    loader, fns = _wide(ctx)
    batches = list(loader)
    fx.step(ctx, batches[0], fns)
    taken = []
    for background in (True, True, False):
        synchronize(ctx)
        begin = time.perf_counter()
        saving = fx.save(folder, ctx, fns.model, position=fx.Position(), background=background)
        taken.append(time.perf_counter() - begin)
        if background:
            saving.result()
    return taken


def test_a_background_save_returns_before_the_files_are_written(gpu, tmp_path):
    ((_, again, whole),) = gpu.run(_blocked, str(tmp_path))
    assert again < whole


class _Refusing:
    """CUDA's runtime, which refuses to lock memory: at address 0, so that the error is its own."""

    def __init__(self, runtime):
        self.runtime = runtime

    def cudaHostRegister(self, address, size, flags):
        return self.runtime.cudaHostRegister(0, size, flags)


def _unpinned(ctx, folder):
    """Save where memory cannot be locked, then go on training and restore."""
    if is_gpu(ctx):
        refusing = _Refusing(torch.cuda.cudart())
        torch.cuda.cudart = lambda: refusing
    try:
        return _saved_while_training(ctx, folder)
    finally:
        if is_gpu(ctx):
            torch.cuda.cudart = lambda: refusing.runtime


def test_a_refusal_to_pin_memory_fails_no_later_kernel(tmp_path, nccl):
    nccl.close()  # a buffer of an earlier save is pinned already
    assert nccl.run(_unpinned, str(tmp_path)) == [(True, True)]
    nccl.close()


def _resumed_by_other_optimizers(ctx, folder):
    """A fused optimizer keeps its step count on the device, others on the host."""
    found = []
    for count, settings in enumerate(({"fused": True}, {"foreach": True}, {"fused": True})):
        loader, fns = parts(ctx, fx.Plan(), optimizer=lambda p, s=settings: adam(p, **s))
        if count:
            fx.restore(fx.latest(folder), ctx, fns.model)
        for batch in loader:
            report = fx.step(ctx, batch, fns)
        fx.save(folder, ctx, fns.model, position=report.position)
        (optimizer,) = fns.model.optimizers
        found.append({float(state["step"]) for state in optimizer.state.values()})
    return found


def test_states_of_fused_optimizers_are_restored(gpu, tmp_path):
    assert gpu.run(_resumed_by_other_optimizers, str(tmp_path)) == [[{8.0}, {16.0}, {24.0}]]


def _unusual(ctx):
    """Batches of sparse and nested tensors, for which torch cannot record a stream."""
    for kind in ("PyTorch API of nested", "Sparse CSR tensor support"):
        warnings.filterwarnings("ignore", message=f".*{kind}")
    eye = torch.eye(4)
    kinds = [eye.to_sparse(), eye.to_sparse_csr(), torch.nested.nested_tensor([eye, eye[:2]])]
    out = []
    for kind in kinds:
        loader = fx.shard(DataLoader([kind] * 2, batch_size=None), ctx)
        for batch in loader:
            total = batch.data.to_dense() if not batch.data.is_nested else batch.data.unbind()[0]
            out.append((batch.data.device.type == ctx.device.type, float(total.sum())))
    return out


def test_batches_of_sparse_and_nested_tensors_are_moved(nccl):
    assert nccl.run(_unusual) == [[(True, 4.0)] * 6]
