"""Two ranks, models of 100 and 200 parameters of 1 MB: seconds of each operation, and the ratio.

What grows linearly takes twice as long for twice as many. The law in `fxtrain.testing` counts
calls and bytes; this table shows what C++ and the disk do too.

python -m benchmarks.growth
"""

import importlib.util
import tempfile
import time
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import show

WIDTH = 512  # 512 x 512 numbers of four bytes are a megabyte
SIZES = (100, 200)
PLANS = {
    "DDP": fx.Plan(),
    "DDP, shared optimizer": fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
    "FSDP": fx.Plan(strategy=fx.FSDP()),
}
ENGINES = {f"DeepSpeed, stage {n}": fx.Plan(strategy=fx.DeepSpeed(stage=n)) for n in (1, 2, 3)}


class _Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        drawn = (torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(count))
        self.weights = nn.ParameterList(map(nn.Parameter, drawn))

    def forward(self, x):
        return sum((x @ weight).square().mean() for weight in self.weights)


def _adam(params):
    return torch.optim.AdamW(params, lr=1e-3)


def _seconds(ctx, plan, count, folder):
    """Seconds of each operation by name, of the slowest rank."""
    taken = {}

    def timed(name, run):
        fx.ops.barrier(ctx)
        started = time.perf_counter()
        result = run()
        taken[name] = max(fx.ops.gather_objects(time.perf_counter() - started, ctx))
        return result

    model = timed("wrap", lambda: fx.wrap(_Net(count), ctx, plan, optimizer=_adam))
    rows = DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=1)
    batches = list(fx.shard(rows, ctx, plan))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]))
    fx.step(ctx, batches[0], fns)
    timed("step", lambda: fx.step(ctx, batches[1], fns))
    run, weights = f"{folder}/{count}", f"{folder}/{count}-weights"
    timed("save", lambda: fx.save(run, ctx, model, position=batches[1].position))
    timed("restore", lambda: fx.restore(run, ctx, model))
    timed("export", lambda: fx.export(model, weights))
    timed("load_model", lambda: fx.load_model(weights, model))
    return taken


def measure(plan, folder):
    """Seconds by operation for each size; the first is done twice, so that it is warm."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fx.detect(device="cpu", timeout_s=300) as ctx:
        sizes = (SIZES[0], *SIZES)
        return [_seconds(ctx, plan, n, f"{folder}/{i}") for i, n in enumerate(sizes)][1:]


def main():
    engines = ENGINES if importlib.util.find_spec("deepspeed") else {}
    rows = []
    for name, plan in {**PLANS, **engines}.items():
        with tempfile.TemporaryDirectory() as folder:
            small, large = fx.launch(measure, (plan, folder), ranks=2)[0]
        rows += [
            [
                name,
                what,
                f"{small[what]:.3f}",
                f"{large[what]:.3f}",
                f"{large[what] / small[what]:.2f}",
            ]
            for what in small
        ]
    columns = ["strategy", "operation", *(f"s, {n} of 1 MB" for n in SIZES), "ratio"]
    show("As a model grows, two ranks", columns, rows)


if __name__ == "__main__":
    main()
