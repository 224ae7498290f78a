"""What `fxtrain test` runs on every rank: facts, every collective, and a short training."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.diagnosis.environment import clock_problems, fact_problems, facts_here
from fxtrain.errors import FxError
from fxtrain.ops.devices import synchronize
from fxtrain.state import DistContext, Plan

_SMALL = 2  # float32 entries
_REPEAT = {"latency": 30, "bandwidth": 5}
_UPDATES = 20


def _pieces(x: torch.Tensor, ctx: DistContext) -> list[torch.Tensor] | None:
    return [x + rank for rank in range(ctx.world_size)] if ctx.is_main else None


# Of this rank's tensor, which is filled with the rank + 1, and the context.
Call = Callable[[torch.Tensor, DistContext], Any]
# Whether a result is right, of so many ranks.
Right = Callable[[Any, int, DistContext], bool]
# By the name of the function in `fx.ops`; those with a tensor have a bandwidth.
WITH_TENSORS: dict[str, tuple[Call, Right]] = {
    "reduce": (
        lambda x, ctx: ops.reduce(x, ctx, "sum"),
        lambda result, n, _: bool((result == n * (n + 1) // 2).all()),
    ),
    "gather": (ops.gather, lambda result, n, _: result.unique().tolist() == [*range(1, n + 1)]),
    "broadcast": (ops.broadcast, lambda result, *_: bool((result == 1).all())),
    "scatter": (
        lambda x, ctx: ops.scatter(_pieces(x, ctx), ctx),
        lambda result, _, ctx: bool((result == 1 + ctx.rank).all()),
    ),
}
WITH_OBJECTS: dict[str, tuple[Call, Right]] = {
    "gather_objects": (
        lambda _, ctx: ops.gather_objects(ctx.rank, ctx),
        lambda result, n, _: result == [*range(n)],
    ),
    "broadcast_object": (
        lambda _, ctx: ops.broadcast_object(ctx.rank, ctx),
        lambda result, *_: result == 0,
    ),
    "any_rank": (lambda _, ctx: ops.any_rank(ctx.is_last, ctx), lambda result, *_: result is True),
    "barrier": (lambda _, ctx: ops.barrier(ctx), lambda result, *_: result is None),
}


def measure(name: str, ctx: DistContext, *, mib: float) -> dict[str, Any]:
    """Whether a collective is right, the latency of a small call, and the bandwidth of a large one.

    For the slowest rank; the bandwidth is the size of one rank's tensor divided by the time.
    """
    call, right = (WITH_TENSORS | WITH_OBJECTS)[name]
    size = max(_SMALL, int(mib * 2**20 / 4))

    def tensor(size: int) -> torch.Tensor:
        return torch.full((size,), float(ctx.rank + 1), device=ctx.device)

    is_right = right(call(tensor(_SMALL), ctx), ctx.world_size, ctx)
    latency = _time(call, tensor(_SMALL), ctx, "latency")
    large = _time(call, tensor(size), ctx, "bandwidth") if name in WITH_TENSORS else 0.0
    ranks = ops.gather_objects((latency, large, is_right), ctx)
    latencies, larges, rights = zip(*ranks, strict=True)
    return {
        "name": name,
        "right": all(rights),
        "latency_us": 1e6 * max(latencies),
        "gib_per_s": size * 4 / 2**30 / max(larges) if name in WITH_TENSORS else None,
    }


def _time(call: Call, tensor: torch.Tensor, ctx: DistContext, kind: str) -> float:
    call(tensor, ctx)  # the first call of a kind opens connections
    synchronize(ctx)
    started = time.perf_counter()
    for _ in range(_REPEAT[kind]):
        call(tensor, ctx)
    synchronize(ctx)
    return (time.perf_counter() - started) / _REPEAT[kind]


def fit_line(ctx: DistContext, plan: Plan) -> dict[str, Any]:
    """Fit a line with a plan's strategy and precision; the loss must decrease on every rank."""
    torch.manual_seed(0)
    x = torch.randn(256, 8, device="cpu")
    data = TensorDataset(x, x @ torch.randn(8, 1, device="cpu"))
    loader = fx.shard(DataLoader(data, batch_size=8, shuffle=True), ctx, plan)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    fns = fx.StepFns(
        model=model,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]).float(), batch[1]),
    )
    losses: list[float] = []
    started = time.perf_counter()
    for epoch in loader.epochs(_UPDATES):
        losses += [float(fx.step(ctx, batch, fns).loss) for batch in epoch]
        if len(losses) >= _UPDATES * plan.accumulate:
            break
    taken = time.perf_counter() - started
    few = max(1, len(losses) // 4)
    means = torch.tensor([losses[:few], losses[-few:]], device=ctx.device).mean(1)
    first, last = ops.reduce(means, ctx).tolist()
    return {
        "first": first,
        "last": last,
        "steps": len(losses),
        "step_ms": 1e3 * taken / len(losses),
    }


def trial(ctx: DistContext, plan: Plan, *, mib: float) -> dict[str, Any]:
    """The results of all tests, equal on every rank, with a training of 161 parameters."""
    facts = ops.gather_objects(facts_here(os.environ, torch), ctx)
    ops.barrier(ctx)
    times = ops.gather_objects(time.time(), ctx)
    hosts = [fact["host"] for fact in facts]
    problems = [*fact_problems(facts, nodes=ctx.num_nodes), *clock_problems(times, hosts)]
    rows = [measure(name, ctx, mib=mib) for name in (*WITH_TENSORS, *WITH_OBJECTS)]
    problems += [f"{row['name']} returned a wrong result." for row in rows if not row["right"]]
    try:
        training = fit_line(ctx, plan)
    except FxError as error:
        training = None
        problems.append(f"The training failed: {type(error).__name__}: {error}")
    else:
        if not training["last"] < training["first"]:
            problems.append(
                f"The loss did not decrease: {training['first']} to {training['last']}."
            )
    return {
        "ranks": ctx.world_size,
        "nodes": ctx.num_nodes,
        "hosts": sorted(set(hosts)),
        "device": str(ctx.device.type),
        "launcher": ctx.launcher,
        "collectives": rows,
        "training": training,
        "problems": problems,
    }


def _main() -> None:
    out, plan, mib = sys.argv[1:]
    with fx.detect() as ctx:
        results = trial(ctx, fx.state.loads(plan), mib=float(mib))
        if ctx.is_main:
            Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    _main()
