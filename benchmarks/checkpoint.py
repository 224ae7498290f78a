"""Two ranks, a state of 1 GB: saving and loading beside Accelerate, bytes read, peak memory.

Only fxtrain waits until the bytes are on the disk. On a machine that is busy with other things
the time on a processor says more.

How long a save in the background blocks training is measured beside copying what a rank writes to
host memory once. By how much the next step is slower, since the thread that writes shares the
processors with it, is told apart.

python -m benchmarks.checkpoint [folder]
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings

import torch
from torch import nn

import fxtrain as fx
from benchmarks._common import show

LAYERS, WIDTH = 20, 2048  # 84 million parameters; with AdamW's two states 1.0 GB
ROUNDS = 5
ROWS = 48  # of a batch: a short step, of about as many seconds as the save takes to copy
MB = 1e6


def _net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _adam(params):
    return torch.optim.AdamW(params, lr=1e-3)


def _with_states(model):
    """Give the optimizer its states, and drop the gradients."""
    (optimizer,) = model.optimizers
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model


def _size(model):
    state = model.strategy.state(model)
    return sum(one.numel() * one.element_size() for one in state.tensors.values())


def _both(ctx, net, folder):
    """What takes turns, on the same parameters and the same optimizer."""
    from accelerate import Accelerator

    model = _with_states(fx.wrap(net, ctx, optimizer=_adam))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net, model.optimizers[0])
    ours, theirs, pending = os.path.join(folder, "ours"), os.path.join(folder, "theirs"), []
    runs = {
        "Accelerate, save_state": lambda: accelerator.save_state(theirs),
        "fxtrain, save": lambda: fx.save(ours, ctx, model),
        "fxtrain, save in the background": lambda: pending.append(
            fx.save(ours, ctx, model, background=True)
        ),
        "Accelerate, load_state": lambda: accelerator.load_state(theirs),
        "fxtrain, restore": lambda: fx.restore(ours, ctx, model),
    }

    def settle(name):
        for saving in pending:
            saving.result()
        pending.clear()
        fx.ops.barrier(ctx)
        if ctx.is_main:
            if "save" in name:  # a new folder each time, for both
                shutil.rmtree(theirs if name.startswith("Acc") else ours, ignore_errors=True)
            os.sync()  # nobody pays for what another wrote
        fx.ops.barrier(ctx)

    return model, runs, settle


def _times(ctx, runs, settle):
    """(seconds, seconds on a processor) per round: of the slowest rank, of the caller's thread."""
    times = {name: [] for name in runs}
    for round_number in range(ROUNDS + 1):
        for name, run in runs.items():
            settle(name)
            started, worked = time.perf_counter(), time.thread_time()
            run()
            mine = time.perf_counter() - started, time.thread_time() - worked
            taken = tuple(map(max, zip(*fx.ops.gather_objects(mine, ctx), strict=True)))
            if round_number:  # the first warms up
                times[name].append(taken)
    settle("")
    return times


def _step(model, batch):
    """Seconds of a training step."""
    started = time.monotonic()
    with fx.ops.sync(model):
        fx.ops.backward(model(batch).square().mean(), model)
    fx.ops.apply(model)
    return time.monotonic() - started


def _copy(copies, tensors):
    """Seconds of copying tensors once, into memory that is there already."""
    started = time.monotonic()
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return time.monotonic() - started


def _blocked(ctx, net, folder):
    """Per round, of the slowest rank: the call, one copy, and the next step's slowdown."""
    model = _with_states(fx.wrap(net, ctx, optimizer=_adam))
    state = model.strategy.state(model).tensors.values()
    tensors = [one for one in state if isinstance(one, torch.Tensor)][ctx.rank :: ctx.world_size]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    batch = torch.randn(ROWS, WIDTH)
    rounds = []
    for round_number in range(ROUNDS + 1):
        alone, copied = _step(model, batch), _copy(copies, tensors)
        fx.ops.barrier(ctx)
        started = time.monotonic()
        saving = fx.save(folder, ctx, model, position=fx.Position(), background=True)
        called = time.monotonic() - started
        together = _step(model, batch)
        saving.result()
        mine = called, copied, together - alone, alone
        taken = tuple(map(max, zip(*fx.ops.gather_objects(mine, ctx), strict=True)))
        if ctx.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        fx.ops.barrier(ctx)
        if round_number:
            rounds.append(taken)
    return rounds


def _peak(run):
    """Bytes by which the most memory ever resident exceeds what is there before."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def _read():
    with open("/proc/self/io") as file:
        return int(next(line.split()[1] for line in file if line.startswith("rchar")))


def _half(ctx, folder):
    """(state, bytes that this rank reads of it) where FSDP2 spreads the model over the ranks."""
    model = _with_states(fx.wrap(_net(), ctx, fx.Plan(strategy=fx.FSDP()), optimizer=_adam))
    fx.save(folder, ctx, model)
    before = _read()
    fx.restore(folder, ctx, model)
    return _size(model), _read() - before


def measure(folder):
    """Times per round and figures, on every rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fx.detect(device="cpu", timeout_s=300) as ctx:
        model, runs, settle = _both(ctx, _net(), folder)
        apart = os.path.join(folder, "apart")
        peaks = {
            "fxtrain, save": _peak(lambda: fx.save(apart, ctx, model)),
            "fxtrain, save in the background": _peak(
                lambda: fx.save(apart, ctx, model, background=True).result()
            ),
            "fxtrain, restore": _peak(lambda: fx.restore(apart, ctx, model)),
        }
        shutil.rmtree(apart, ignore_errors=True)
        times = _times(ctx, runs, settle)
        size = _size(model)
        blocked = _blocked(ctx, _net(), os.path.join(folder, "blocked"))
        return times, peaks, size, _half(ctx, os.path.join(folder, "half")), blocked


def _cells(taken, peer):
    """Seconds, seconds on a processor, and the medians of the ratios to another's."""
    for which in (0, 1):
        pairs = [(one[which], other[which]) for one, other in zip(taken, peer, strict=True)]
        yield f"{statistics.median(one for one, _ in pairs):.3f}"
        yield f"{statistics.median(one / other for one, other in pairs):.3f}"


def main():
    where = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        found = fx.launch(measure, (folder,), ranks=2)
    times, _, size, _, blocked = found[0]
    rows = []
    for name, taken in times.items():
        loading = "load" in name or "restore" in name
        peer = "Accelerate, load_state" if loading else "Accelerate, save_state"
        rows.append([name, *_cells(taken, times[peer])])
    title = f"A state of {size / MB:.0f} MB, two ranks, median of {ROUNDS}"
    of = "of Accelerate's"
    show(title, ["how, until it returns", "s", of, "s on a processor", of], rows)
    peer = statistics.median(seconds for seconds, _ in times["Accelerate, save_state"])
    call, copy, slower, step = (statistics.median(one) for one in zip(*blocked, strict=True))
    rows = [
        [what, f"{seconds:.3f}", f"{seconds / copy:.2f}", f"{seconds / peer:.3f}"]
        for what, seconds in [
            ("the call of save: how long training is blocked", call),
            ("copying what the rank writes once", copy),
            ("by how much the next step takes longer", slower),
            ("a step, for comparison", step),
        ]
    ]
    titles = ["", "s", "of a copy", "of Accelerate's save_state"]
    show("A save in the background beside training", titles, rows)
    rows = [
        [name, *(f"{peaks[name] / MB:.0f}" for _, peaks, *_ in found), f"{size / 2 / MB:.0f}"]
        for name in found[0][1]
    ]
    show("Memory beyond the state", ["how", "MB, rank 0", "MB, rank 1", "one shard, MB"], rows)
    rows = [
        [f"rank {rank}", f"{whole / MB:.1f}", f"{read / MB:.1f}", f"{read / whole:.4f}"]
        for rank, (_, _, _, (whole, read), _) in enumerate(found)
    ]
    show("Bytes that a rank reads for its half (FSDP2)", ["", "state, MB", "MB", "part"], rows)


if __name__ == "__main__":
    main()
