"""One GPU: steps, a transformer in bf16, FSDP at one rank, the loader, saving, gathering.

Prints tables, and writes their numbers to gpu.json in the current folder. Parts may be named, so
that a run of limited length can continue where another ended.

python -m benchmarks.gpu [step] [transformer] [fsdp] [loader] [save]
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import by_hand, show

RESULTS = Path("gpu.json")


def timed(runs, *, rounds, each):
    """Median seconds a call; runs take turns, and each waits for the device at its end."""
    times = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(5):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(each):
                run()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) / each)
    return {name: statistics.median(taken) for name, taken in times.items()}


def report(part, title, times):
    """Print times against the first, and keep them."""
    first = next(iter(times.values()))
    rows = [[name, f"{1e6 * t:.0f}", f"{first / t:.3f}"] for name, t in times.items()]
    show(title, ["loop", "µs", "speed of the first"], rows)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[part] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **times}
    RESULTS.write_text(json.dumps(known, indent=1))


def adam(params):
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def small():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def step():
    """The overhead of a step: a network so small that the host is the limit."""
    x, y = torch.randn(32, 64).cuda(), torch.randint(0, 10, (32,)).cuda()
    net = small().cuda()
    runs = {"by hand": by_hand(net, adam(net.parameters()), x, y)}
    ctx, plan = fx.detect({}), fx.Plan(clip_norm=1.0)
    model = fx.wrap(small(), ctx, plan, optimizer=adam)
    batch = next(iter(fx.shard(DataLoader(TensorDataset(x, y), batch_size=32), ctx, plan)))
    fns = fx.StepFns(model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    runs["fxtrain"] = lambda: fx.step(ctx, batch, fns)
    runs |= _peers(x, y)
    report("step", "A small network, 32 rows", timed(runs, rounds=50, each=20))


def _peers(x, y):
    from accelerate import Accelerator
    from lightning_fabric import Fabric

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(net := small(), adam(net.parameters()))

    def accelerated():
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    runner = Fabric(accelerator="cuda", devices=1)
    engine, stepper = runner.setup(net := small(), adam(net.parameters()))

    def fabric():
        runner.backward(F.cross_entropy(engine(x), y))
        runner.clip_gradients(engine, stepper, max_norm=1.0)
        stepper.step()
        stepper.zero_grad()

    return {"Accelerate": accelerated, "Fabric": fabric}


ROWS, LENGTH = 16, 1024


def gpt():
    """A decoder of 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False))


def _by_hand(model, tokens):
    optimizer = adam(model.parameters())

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def _by_plan(ctx, plan, tokens):
    model = fx.wrap(gpt(), ctx, plan, optimizer=adam)
    batch = next(iter(fx.shard(DataLoader(tokens, batch_size=ROWS), ctx, plan)))
    fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data, labels=b.data).loss)
    return lambda: fx.step(ctx, batch, fns)


def transformer():
    """Throughput of a transformer in bf16, compiled and not."""
    tokens = torch.randint(0, 50257, (ROWS, LENGTH))
    bf16 = fx.Plan(precision=fx.Precision(compute="bf16"), clip_norm=1.0)
    compiled = fx.Plan(precision=bf16.precision, clip_norm=1.0, compile=True)
    ctx = fx.detect({})
    runs = {
        "by hand": _by_hand(gpt().cuda(), tokens.cuda()),
        "fxtrain": _by_plan(ctx, bf16, tokens),
        "by hand, compiled": _by_hand(torch.compile(gpt().cuda()), tokens.cuda()),
        "fxtrain, compiled": _by_plan(ctx, compiled, tokens),
    }
    times = timed(runs, rounds=8, each=3)
    report("transformer", f"GPT-2 124M in bf16, {ROWS} rows of {LENGTH} tokens", times)
    per_token = 6 * sum(p.numel() for p in gpt().parameters())
    rows = [
        [name, f"{ROWS * LENGTH / t:,.0f}", f"{per_token * ROWS * LENGTH / t / 1e12:.0f}"]
        for name, t in times.items()
    ]
    show("Throughput", ["loop", "tokens/s", "TFLOP/s (6 N per token)"], rows)


def fsdp():
    """FSDP at one rank over NCCL against fully_shard by hand."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    ctx = fx.detect({})
    tokens = torch.randint(0, 50257, (ROWS, LENGTH))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = gpt().cuda()
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    plan = fx.Plan(strategy=fx.FSDP(), precision=fx.Precision(compute="bf16"), clip_norm=1.0)
    runs = {
        "by hand": _by_hand(model, tokens.cuda()),
        "fxtrain": _by_plan(ctx, plan, tokens),
    }
    report("fsdp", "FSDP at one rank, GPT-2 124M", timed(runs, rounds=8, each=3))
    dist.destroy_process_group()


def loader():
    """An epoch of pinned batches on the device, against torch's loader and a copy by hand."""
    data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    base = DataLoader(data, batch_size=64, pin_memory=True)
    sharded = fx.shard(base, fx.detect({}), fx.Plan())

    def plain():
        for x, y in base:
            x.cuda(non_blocking=True), y.cuda(non_blocking=True)

    def ours():
        for _ in sharded:
            pass

    report(
        "loader",
        "128 batches of 64 rows",
        timed({"torch": plain, "fxtrain": ours}, rounds=10, each=1),
    )


def save():
    """How long saving 1.5 GB keeps the loop waiting."""
    ctx, folder = fx.detect({}), tempfile.mkdtemp()
    plan = fx.Plan(precision=fx.Precision(compute="bf16"))
    run = _by_plan(ctx, plan, torch.randint(0, 50257, (ROWS, LENGTH)))
    model = fx.wrap(gpt(), ctx, plan, optimizer=adam)
    (optimizer,) = model.optimizers
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    run()
    times = {}
    for name, background in (("save", False), ("background", True), ("background again", True)):
        torch.cuda.synchronize()
        started = time.perf_counter()
        saving = fx.save(folder, ctx, model, background=background)
        times[name] = time.perf_counter() - started
        if background:
            saving.result()
    report("save", "GPT-2 124M with AdamW: seconds until save returns", times)
    shutil.rmtree(folder)


PARTS = {"step": step, "transformer": transformer, "fsdp": fsdp, "loader": loader, "save": save}


def main(names=()):
    """Run the named parts, or all of them."""
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; torch sees none.")
        return
    for name in names or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
