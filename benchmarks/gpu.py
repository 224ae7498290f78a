"""GPUs: steps, transformers in bf16, float8 and quantized, FSDP, DDP, loader, saving, gathering.

Prints tables, and writes their numbers to gpu.json in the current folder. Parts may be named, so
that a run of limited length can continue where another ended. With FXTRAIN_GPU_TESTS_ON=cpu, tiny
versions run on the CPU, to find mistakes before a GPU is at hand; nothing is written.

python -m benchmarks.gpu [step] [transformer] [fsdp] [loader] [save] [gather] [overlap]
                         [float8] [quantized]
"""

import functools
import importlib.util
import shutil
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import by_hand, show
from benchmarks._gpu import (
    DEVICE,
    LENGTH,
    ROWS,
    SMALL,
    adam,
    detect,
    loop_by_hand,
    loop_by_plan,
    report,
    synchronize,
    timed,
)
from benchmarks._gpu_low_precision import float8, quantized
from fxtrain import ops
from fxtrain.testing import Cluster


def small():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def step():
    """The overhead of a step: a network so small that the host is the limit."""
    x, y = torch.randn(32, 64, device=DEVICE), torch.randint(0, 10, (32,), device=DEVICE)
    net = small().to(DEVICE)
    runs = {"by hand": by_hand(net, adam(net.parameters()), x, y)}
    ctx, plan = detect(), fx.Plan(clip_norm=1.0)
    model = fx.wrap(small(), ctx, plan, optimizer=adam)
    batch = next(iter(fx.shard(DataLoader(TensorDataset(x, y), batch_size=32), ctx, plan)))
    fns = fx.StepFns(model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    runs["fxtrain"] = lambda: fx.step(ctx, batch, fns)
    runs |= _peers(small, lambda m: F.cross_entropy(m(x), y), half=False)
    report("step", "A small network, 32 rows", timed(runs, rounds=50, each=20))


def _peers(build, loss, *, half):
    """The same step with Accelerate and Fabric, those that are installed."""
    runs = {}
    if importlib.util.find_spec("accelerate"):
        runs["Accelerate"] = _accelerate(build(), loss, half=half)
    if importlib.util.find_spec("lightning_fabric"):
        runs["Fabric"] = _fabric(build(), loss, half=half)
    return runs


def _accelerate(net, loss, *, half):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # of the part before, which may have had another precision
    accelerator = Accelerator(mixed_precision="bf16" if half else "no", cpu=SMALL)
    model, optimizer = accelerator.prepare(net, adam(net.parameters()))

    def run():
        with accelerator.accumulate(model):
            accelerator.backward(loss(model))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def _fabric(net, loss, *, half):
    from lightning_fabric import Fabric

    precision = "bf16-mixed" if half else "32-true"
    runner = Fabric(accelerator=DEVICE, devices=1, precision=precision)
    model, optimizer = runner.setup(net, adam(net.parameters()))

    def run():
        runner.backward(loss(model))
        runner.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def gpt():
    """A decoder of 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tiny = {"n_layer": 2, "n_embd": 32, "n_head": 2} if SMALL else {}
    # Without dropout, whose kernels torch.compile fuses: throughput of the products.
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(attn_implementation="sdpa", use_cache=False, **still, **tiny)
    return GPT2LMHeadModel(config)


def transformer():
    """Throughput of a transformer in bf16, compiled and not."""
    tokens = torch.randint(0, 50257, (ROWS, LENGTH))
    there = tokens.to(DEVICE)
    bf16 = fx.Plan(precision=fx.Precision(compute="bf16"), clip_norm=1.0)
    compiled = fx.Plan(precision=bf16.precision, clip_norm=1.0, compile=True)
    ctx = detect()
    runs = {
        "by hand": loop_by_hand(gpt().to(DEVICE), there),
        "fxtrain": loop_by_plan(ctx, gpt(), bf16, tokens),
        **_peers(gpt, lambda m: m(there, labels=there).loss, half=True),
        "by hand, compiled": loop_by_hand(torch.compile(gpt().to(DEVICE)), there),
        "fxtrain, compiled": loop_by_plan(ctx, gpt(), compiled, tokens),
    }
    times = timed(runs, rounds=8, each=3)
    report("transformer", f"GPT-2 124M in bf16, {ROWS} rows of {LENGTH} tokens", times)
    show("Throughput", ["loop", "tokens/s", "TFLOP/s", "MFU"], _throughput(times, ctx, tokens))


def _throughput(times, ctx, tokens):
    """Products as torch counts them, and their share of what the device can do."""
    model = gpt().to(DEVICE)
    there = tokens[:1].to(DEVICE)
    flops = ROWS * fx.meters.count_flops(lambda: model(there, labels=there).loss.backward())
    peak = fx.meters.peak_flops(ctx, "bf16")
    return [
        [
            name,
            f"{tokens.numel() / t:,.0f}",
            f"{flops / t / 1e12:.0f}",
            "unknown" if peak is None else f"{flops / t / peak:.1%}",
        ]
        for name, t in times.items()
    ]


def fsdp():
    """FSDP at one rank over NCCL against fully_shard by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    library = "gloo" if SMALL else "cpu:gloo,cuda:nccl"
    dist.init_process_group(library, store=dist.HashStore(), rank=0, world_size=1)
    ctx = detect()
    tokens = torch.randint(0, 50257, (ROWS, LENGTH))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = gpt().to(DEVICE)
    mesh = init_device_mesh(DEVICE, (1,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    plan = fx.Plan(strategy=fx.FSDP(), precision=fx.Precision(compute="bf16"), clip_norm=1.0)
    runs = {
        "by hand": loop_by_hand(model, tokens.to(DEVICE)),
        "fxtrain": loop_by_plan(ctx, gpt(), plan, tokens),
    }
    report("fsdp", "FSDP at one rank, GPT-2 124M", timed(runs, rounds=8, each=3))
    dist.destroy_process_group()


def loader():
    """An epoch of pinned batches on the device, against torch's loader and a copy by hand."""
    data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    base = DataLoader(data, batch_size=64, pin_memory=not SMALL)
    sharded = fx.shard(base, detect(), fx.Plan())

    def plain():
        for x, y in base:
            x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)

    def ours():
        for _ in sharded:
            pass

    report(
        "loader",
        "128 batches of 64 rows",
        timed({"torch": plain, "fxtrain": ours}, rounds=10, each=1),
    )


def save():
    """How long saving 1.5 GB keeps the loop waiting, and a step that follows."""
    ctx, folder = detect(), tempfile.mkdtemp()
    plan = fx.Plan(precision=fx.Precision(compute="bf16"))
    model = fx.wrap(gpt(), ctx, plan, optimizer=adam)
    tokens = torch.randint(0, 50257, (ROWS, LENGTH))
    batch = next(iter(fx.shard(DataLoader(tokens, batch_size=ROWS), ctx, plan)))
    fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data, labels=b.data).loss)
    times = {}
    for name, background in (
        ("first save", False),
        ("save", False),
        ("first in the background", True),
        ("in the background", True),
    ):
        fx.step(ctx, batch, fns)
        synchronize()
        started = time.perf_counter()
        saving = fx.save(folder, ctx, model, position=batch.position, background=background)
        times[name] = time.perf_counter() - started
        started = time.perf_counter()
        fx.step(ctx, batch, fns)
        synchronize()
        times[f"{name}: the next step"] = time.perf_counter() - started
        if background:
            saving.result()
    report("save", "GPT-2 124M with AdamW: until save returns", times)
    shutil.rmtree(folder)


def gather():
    """A tree of 16 leaves at two ranks, over NCCL with two GPUs and over gloo with one."""
    alone = SMALL or torch.cuda.device_count() < 2
    ranks = Cluster(2, device=DEVICE, library="gloo" if alone else None, call_s=300)
    times = ranks.run(_gather_times)[0]
    ranks.close()
    report("gather", f"A tree of 16 leaves over {'gloo' if alone else 'NCCL'}, two ranks", times)


def _gather_times(ctx):
    tree = {f"leaf{i}": torch.randn(8, 4, device=ctx.device) for i in range(16)}

    def collect(x):
        dist.all_gather([torch.empty_like(x) for _ in range(2)], x)

    def each():
        for leaf in tree.values():
            collect(leaf)

    runs = {
        "leaf by leaf": each,
        "one collective": lambda: collect(torch.cat([x.view(-1) for x in tree.values()])),
        "fxtrain": lambda: ops.gather(tree, ctx),
    }
    return timed(runs, rounds=30, each=20)


def overlap():
    """How much of DDP's all-reduce hides behind backward, on all GPUs, and a check of `fx.fit`."""
    alone = SMALL or torch.cuda.device_count() < 2
    count = 2 if alone else torch.cuda.device_count()
    ranks = Cluster(count, device=DEVICE, library="gloo" if alone else None, call_s=300)
    times = ranks.run(_overlap_times)[0]
    ranks.close()
    report("overlap", f"DDP over {'gloo' if alone else 'NCCL'}, {count} ranks", times)


def _overlap_times(ctx):
    width, rows = (64, 8) if SMALL else (4096, 2048)
    x = torch.randn(rows, width, device=ctx.device)

    def build():
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(12))).to(ctx.device)

    def loss(model):
        return model(x).square().mean()

    runs = {}
    for unused in (False, True):
        name = "unused parameters" if unused else "DDP"
        net = nn.parallel.DistributedDataParallel(build(), find_unused_parameters=unused)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        runs[f"torch, {name}"] = functools.partial(_plain_step, net, optimizer, loss)
        plan = fx.Plan(strategy=fx.DDP(unused_parameters=unused))
        model = fx.wrap(
            build(), ctx, plan, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)
        )
        fns = fx.StepFns(model=model, loss=lambda model, batch: loss(model))
        runs[f"fxtrain, {name}"] = functools.partial(fx.step, ctx, fx.batch(x, ctx, plan), fns)
    runs["a check of fit"] = lambda: ops.any_rank(False, ctx)  # noqa: FBT003
    return timed(runs, rounds=10, each=5)


def _plain_step(net, optimizer, loss):
    loss(net).backward()
    optimizer.step()
    optimizer.zero_grad()


PARTS = {
    "step": step,
    "transformer": transformer,
    "loader": loader,
    "save": save,
    "gather": gather,
    "overlap": overlap,
    "fsdp": fsdp,
    "float8": float8,
    "quantized": quantized,
}


def main(names=()):
    """Run the named parts, or all of them."""
    if not SMALL and not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; torch sees none.")
        return
    for name in names or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
