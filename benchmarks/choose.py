"""Estimated steps beside measured ones, on this machine; and beside published ones.

python -m benchmarks.choose here [MODEL ...]
python -m benchmarks.choose published [TABLE | RUN ...]
python -m benchmarks.choose searched [RUN ...]
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from benchmarks._choose_models import MODELS, dataset, loss
from benchmarks._choose_published import published, searched
from benchmarks._common import show, tell
from fxtrain import ops
from fxtrain.choosing import step_cost
from fxtrain.diagnosis.measuring import measure_device
from fxtrain.profiling.rehearsal import axis_namer, figures
from fxtrain.profiling.watching import LoopRecorder, StepsConverged
from fxtrain.state.mesh import resolve_mesh
from fxtrain.testing import Cluster
from fxtrain.testing.training import on_mesh
from tests.profiling._real import recording_real

_WARM, _UPDATES, _MOST_S = 2, 9, 1.2
# So that ranks keep the memory that they free, as other allocators do: glibc's gives some of it
# back after a step, and the kernel clears it again, which takes up to a fifth of the next one.
_KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
# Goals: errors of the estimates, Kendall's tau, and how much slower the choice is than the best.
_TIME, _MEMORY, _TAU, _CHOICE = 0.25, 0.05, 0.8, 0.1
_APART = 0.05  # plans that are closer may change places in another run
_SPLIT = fx.TP(
    styles=(
        *(fx.Style(modules=f"blocks.*.{name}", style="colwise") for name in "qkv"),
        fx.Style(modules="blocks.*.o", style="rowwise"),
        fx.Style(modules="blocks.*up", style="colwise"),
        fx.Style(modules="blocks.*down", style="rowwise"),
    )
)
_MLP_SPLIT = fx.TP(styles=_SPLIT.styles[-2:])


@attrs.frozen(kw_only=True)
class Case:
    """One plan of a model, and the mesh that it needs."""

    model: str
    name: str
    plan: fx.Plan
    world: int
    mesh: fx.Mesh | None = None


def cases(model: str, world: int) -> Iterator[Case]:
    """The plans of a model, all with the same rows of an update."""
    block = MODELS[model][1]
    sharded = fx.FSDP(wrap=(block,))
    plans: dict[str, tuple[fx.Plan, fx.Mesh | None]] = {
        "DDP": (fx.Plan(), None),
        "DDP, 2 micro-batches": (fx.Plan(accumulate=2), None),
        "DDP, 4 micro-batches": (fx.Plan(accumulate=4), None),
        "DDP, recompute": (fx.Plan(recompute=block), None),
        "DDP, 1 MiB buckets": (fx.Plan(strategy=fx.DDP(bucket_mib=1.0)), None),
        "DDP, shard optimizer": (fx.Plan(strategy=fx.DDP(shard_optimizer=True)), None),
        "DDP, bf16": (fx.Plan(precision="bf16"), None),
        "FSDP": (fx.Plan(strategy=sharded), None),
        "FSDP, 2 micro-batches": (fx.Plan(strategy=sharded, accumulate=2), None),
        "FSDP, gathered once": (
            fx.Plan(strategy=attrs.evolve(sharded, mode="grads_and_optimizer")), None,
        ),
        "FSDP, recompute": (fx.Plan(strategy=sharded, recompute=block), None),
        "FSDP, bf16": (fx.Plan(strategy=sharded, precision="bf16"), None),
    }  # fmt: skip
    if world == 4:
        hybrid = attrs.evolve(sharded, shard=2)
        plans["FSDP over 2"] = (fx.Plan(strategy=hybrid), None)
    if model in ("MLP", "GPT"):
        split = fx.FSDP(mode="none", tensor=_MLP_SPLIT if model == "MLP" else _SPLIT)
        plans["TP over 2"] = (fx.Plan(strategy=split), fx.Mesh(tensor=2))
        stages = fx.PP(microbatches=4)
        plans["PP over 2"] = (fx.Plan(strategy=stages), fx.Mesh(pipeline=2))
    if model == "experts":
        spread = attrs.evolve(sharded, expert=2)
        plans["experts over 2"] = (fx.Plan(strategy=spread), None)
    for name, (plan, mesh) in plans.items():
        yield Case(model=model, name=name, plan=plan, world=world, mesh=mesh)


def train(ctx: fx.DistContext, case: Case) -> Iterator[None]:
    """Train, with a stop after each update."""
    net, _, rows, _ = MODELS[case.model]
    torch.manual_seed(0)
    model = fx.wrap(net(), ctx, case.plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    size = rows // ctx.axis("data").world_size // case.plan.accumulate
    loader = fx.shard(DataLoader(dataset(case.model), batch_size=size), ctx, case.plan)
    fns = fx.StepFns(model=model, loss=loss)
    for batch in loader:
        if fx.step(ctx, batch, fns).applied:
            yield


def _through(case: Case, ctx: fx.DistContext) -> None:
    for _ in train(ctx, case):
        pass


def predict(case: Case) -> fx.state.DryRun:
    """The dry run of a case."""
    return fx.dry_run(lambda ctx: _through(case, ctx), world=case.world, mesh=case.mesh)


def measure(ctx: fx.DistContext, case: Case) -> tuple[float, int]:
    """Median seconds of an update on the slowest rank, and the peak bytes of a step on rank 0."""
    torch.set_num_threads(1)
    with on_mesh(ctx, case.mesh) as placed:
        peak = _peak(placed, case)
        updates = train(placed, case)
        times: list[float] = []
        for _ in range(_WARM):
            next(updates)
        for _ in range(_UPDATES):
            ops.barrier(placed)
            started = time.perf_counter()
            next(updates)
            times.append(max(ops.gather_objects(time.perf_counter() - started, placed)))
            if sum(times) > _MOST_S:
                break
    return statistics.median(times), peak


def _peak(ctx: fx.DistContext, case: Case) -> int:
    """The peak bytes of a real step, by the storages that are alive."""
    watch = LoopRecorder(most=3)
    try:
        with recording_real(watch):
            _through(case, ctx)
    except StepsConverged:
        pass
    mesh = resolve_mesh(case.mesh or fx.Mesh(), ctx.world_size)
    return figures(watch, axis_namer(mesh, ctx.rank))["peak"]


def tau(pairs: list[tuple[float, float]], apart: float = 0.0) -> float:
    """Kendall's tau: pairs in the same order less pairs in the other, as a share of all.

    Only of pairs whose measured times differ by more than the share `apart`.
    """
    signs = [
        ((a[0] > b[0]) - (a[0] < b[0])) * ((a[1] > b[1]) - (a[1] < b[1]))
        for place, a in enumerate(pairs)
        for b in pairs[:place]
        if abs(a[1] - b[1]) >= apart * min(a[1], b[1])
    ]
    return sum(signs) / len(signs)


def _device(ctx: fx.DistContext) -> fx.state.Device:
    torch.set_num_threads(1)
    return measure_device(ctx, each_s=1.5)


def here(models: list[str]) -> None:
    """Each plan of each model on 2 and 4 ranks of this machine."""
    started = time.perf_counter()
    os.environ.update(_KEEP)  # of the processes that are started here
    every = [case for world in (2, 4) for model in models for case in cases(model, world)]
    tell(f"{len(every)} dry runs")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        runs = dict(zip([(c.world, c.model, c.name) for c in every], processes.map(predict, every),
                        strict=True))  # fmt: skip
    table: list[list[str]] = []
    sums: list[list[str]] = []
    for world in (2, 4):
        ranks = Cluster(
            world, timeout_s=60, call_s=300, warnings="ignore", env={"OMP_NUM_THREADS": "1"}
        )
        device = ranks.run(_device)[0]
        tell(f"{world} ranks: {fx.state.dumps(device)}")
        for model in models:
            rows: list[tuple[Case, float, float, int, int, str]] = []
            for case in cases(model, world):
                run = runs[world, model, case.name]
                cost = step_cost(run, case.plan, device)
                seconds, peak = ranks.run(measure, case)[0]
                rows.append((case, cost.seconds, seconds, run.peak, peak, cost.limit))
                parts = " ".join(f"{1e3 * part:.0f}" for part in attrs.astuple(cost))
                table.append([
                    f"{model} {world}", case.name, f"{1e3 * cost.seconds:.0f}",
                    f"{1e3 * seconds:.0f}", f"{cost.seconds / seconds - 1:+.0%}", parts,
                    f"{run.peak / peak - 1:+.1%}",
                ])  # fmt: skip
                tell(" | ".join(table[-1]))
            sums.append([f"{model}, {world} ranks", *_verdict(rows)])
        ranks.close()
    columns = ["model", "plan", "estimated, ms", "measured, ms", "error", "parts", "memory"]
    show("Steps on this machine", columns, table)
    columns = [
        "model",
        f"time, median (goal {_TIME:.0%})",
        "time, largest",
        f"memory, largest ({_MEMORY:.0%})",
        f"tau ({_TAU:g}); of pairs {_APART:.0%} apart",
        f"chosen over best ({_CHOICE:.0%})",
        "goals met",
    ]
    show(f"Verdict, after {time.perf_counter() - started:.0f} s", columns, sums)


def _verdict(rows: list[tuple[Case, float, float, int, int, str]]) -> list[str]:
    """The figures of a model on some ranks, and which of the goals they miss."""
    errors = [abs(predicted / measured - 1) for _, predicted, measured, *_ in rows]
    memory = [abs(predicted / measured - 1) for *_, predicted, measured, _ in rows]
    pairs = [(predicted, measured) for _, predicted, measured, *_ in rows]
    order = tau(pairs)
    chosen = min(pairs)[1] / min(measured for _, measured in pairs) - 1
    missed = [
        *["time"] * (statistics.median(errors) > _TIME),
        *["memory"] * (max(memory) > _MEMORY),
        *["tau"] * (order < _TAU),
        *["choice"] * (chosen > _CHOICE),
    ]
    return [
        f"{statistics.median(errors):.0%}",
        f"{max(errors):.0%}",
        f"{max(memory):.1%}",
        f"{order:.2f}; {tau(pairs, _APART):.2f}",
        f"{chosen:+.0%}",
        f"all but {', '.join(missed)}" if missed else "all",
    ]


def main() -> None:
    """Run what the command line names."""
    kind, *names = sys.argv[1:] or ["here"]
    ways: dict[str, Callable[[list[str]], Any]] = {
        "here": here,
        "published": published,
        "searched": searched,
    }
    if kind not in ways:
        sys.exit(f"python -m benchmarks.choose {' | '.join(ways)}")
    ways[kind](names or [*MODELS] if kind == "here" else names)


if __name__ == "__main__":
    main()
