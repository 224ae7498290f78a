"""What `fxtrain env --measure` runs on every rank: the figures of a device, measured."""

import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxtrain as fx
from fxtrain import ops
from fxtrain._display import counted
from fxtrain._host_memory import available_memory
from fxtrain.choosing.devices import Device
from fxtrain.meters import memory
from fxtrain.ops.collectives import gather_into, reduce_scatter
from fxtrain.ops.devices import synchronize
from fxtrain.profiling.operators import operator_call
from fxtrain.state import DistContext, loads, write_record
from fxtrain.state.mesh import AXES

_EACH_S = 1.5  # of one figure
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCT_S = 0.02  # a product that is long enough to be typical
_LARGEST_SIDE = 8192
_SMALL, _LARGE = 8, 16 << 20  # bytes of an all-reduce
_NO_LINKS = 10e9, 20e-6  # bandwidth and latency at a single rank, which uses no links


def median_s(call: Callable[[], object], ctx: DistContext, each_s: float = _EACH_S) -> float:
    """Median seconds of a call, in which all ranks take part at the same time; of the slowest one.

    Effects:
        About `each_s` seconds of calls, and two exchanges.
    """
    call()  # allocates and opens connections
    took = _once(call, ctx)
    count = ops.broadcast_object(max(3, min(200, int(each_s / max(took, 1e-6)))), ctx)
    times = [_once(call, ctx) for _ in range(count)]
    return max(ops.gather_objects(statistics.median(times), ctx))


def mean_s(call: Callable[[], object], ctx: DistContext, each_s: float = _EACH_S) -> float:
    """Mean seconds of a call that every rank repeats for as long; of the slowest rank.

    A mean, since ranks may have fewer cores than there are ranks, and then compute in turns.

    Effects:
        About `each_s` seconds of calls, and two exchanges.
    """
    call()  # allocates
    ops.barrier(ctx)
    count, took, started = 0, 0.0, time.perf_counter()
    while took < each_s:
        _once(call, ctx)
        count += 1
        took = time.perf_counter() - started
    return max(ops.gather_objects(took / count, ctx))


def _once(call: Callable[[], object], ctx: DistContext) -> float:
    synchronize(ctx)
    started = time.perf_counter()
    call()
    synchronize(ctx)
    return time.perf_counter() - started


def product_rate(ctx: DistContext, dtype: torch.dtype, each_s: float = _EACH_S) -> float:
    """FLOP/s of matrix products as in forward and backward, where one matrix is transposed."""

    def matrices() -> list[torch.Tensor]:
        return [torch.ones(side, side, dtype=dtype, device=ctx.device) for _ in range(2)]

    side = 256
    while side < _LARGEST_SIDE:
        a, b = matrices()
        torch.mm(a, b)
        if _once(partial(torch.mm, a, b), ctx) > _PRODUCT_S:
            break
        side *= 2
    side = ops.broadcast_object(side, ctx)
    a, b = matrices()

    def products() -> None:
        torch.mm(a, b)
        torch.mm(a, b.t())
        torch.mm(a.t(), b)

    return 3 * 2 * side**3 / mean_s(products, ctx, each_s)


def gradient_rate(
    ctx: DistContext,
    fn: Callable[..., torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    flops: int,
    dtype: torch.dtype,
    each_s: float = _EACH_S,
) -> float:
    """FLOP/s of the forward and backward of a function of tensors with these shapes."""
    tensors = [
        torch.ones(shape, dtype=dtype, device=ctx.device, requires_grad=True) for shape in shapes
    ]
    return flops / mean_s(lambda: torch.autograd.grad(fn(*tensors).sum(), tensors), ctx, each_s)


def attention_rate(ctx: DistContext, dtype: torch.dtype, each_s: float = _EACH_S) -> float:
    """FLOP/s of causal attention, forward and backward."""
    on_cpu = ctx.device.type == "cpu"
    shape_BHTK = batch, heads, length, width = (2, 4, 512, 32) if on_cpu else (4, 16, 4096, 128)
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    # Two products of which causal attention computes half, and five of them in backward.
    flops = 7 * batch * heads * length**2 * width
    return gradient_rate(ctx, attend, [shape_BHTK] * 3, flops, dtype, each_s)


def convolution_rate(ctx: DistContext, dtype: torch.dtype, each_s: float = _EACH_S) -> float:
    """FLOP/s of a convolution, forward and backward."""
    rows, channels, side = (16, 32, 32) if ctx.device.type == "cpu" else (64, 128, 56)
    shapes = [(rows, channels, side, side), (channels, channels, 3, 3)]
    flops = 3 * 2 * rows * side**2 * channels**2 * 9
    return gradient_rate(ctx, partial(F.conv2d, padding=1), shapes, flops, dtype, each_s)


def memory_rate(ctx: DistContext, each_s: float = _EACH_S) -> float:
    """Bytes per second of elementwise operators, normalizations, softmax and those of optimizers.

    On a CPU, tensors have 4 MiB, of which caches hold a part, as in training of small models.
    """
    rows = 1024 if ctx.device.type == "cpu" else 1 << 16
    x, y = (torch.ones(rows, 1024, device=ctx.device) for _ in range(2))

    def operators() -> None:
        torch.add(x, y)
        torch.mul(x, y)
        torch.sqrt(x)
        F.gelu(x)
        F.layer_norm(x, (1024,))
        torch.softmax(x, -1)
        x.mul_(1.0)
        x.addcmul_(y, y, value=0.0)

    moved = 2 * 3 + 4 * 2 + 2 + 3  # tensors that these read and write
    return moved * x.numel() * x.element_size() / mean_s(operators, ctx, each_s)


class _Counter(TorchDispatchMode):
    """Counts operators that launch kernels."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += operator_call(func, args, kwargs or {}, out) is not None
        return out


def launch_s(ctx: DistContext, each_s: float = _EACH_S) -> float:
    """Seconds per operator of a training step that is too small to compute anything."""
    blocks = [[nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()] for _ in range(8)]
    net = nn.Sequential(*(layer for block in blocks for layer in block)).to(ctx.device)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.ones(2, 8, device=ctx.device)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with _Counter() as counter:
        step()
    return mean_s(step, ctx, each_s) / counter.count


def all_reduce_figures(ctx: DistContext, axis: str, each_s: float = _EACH_S) -> tuple[float, float]:
    """Bytes per second and seconds per hop of an all-reduce over an axis, by all of its groups."""
    group, n = ctx.axis(axis).comm.group, ctx.axis(axis).world_size
    small, large = (torch.zeros(size // 4, device=ctx.device) for size in (_SMALL, _LARGE))
    least_s = median_s(lambda: dist.all_reduce(small, group=group), ctx, each_s / 2)
    most_s = median_s(lambda: dist.all_reduce(large, group=group), ctx, each_s)
    # The formulas of fxtrain.choosing.costs, solved for the two.
    hops = 2 * min(math.ceil(math.log2(n)), n - 1)
    return 2 * _LARGE * (n - 1) / n / max(most_s - least_s, 1e-9), least_s / hops


def collective_shares(ctx: DistContext, each_s: float = _EACH_S) -> dict[str, float]:
    """Bandwidths of collectives over all ranks, as shares of that of an all-reduce."""
    group, n = ctx.comm.group, ctx.world_size
    rates: dict[str, float] = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        took: list[float] = []
        for size in (_SMALL, _LARGE):
            part = torch.zeros(size // 4 // n + 1, device=ctx.device)
            full = part.repeat(n)
            received = torch.empty_like(full)
            call = {
                "all_reduce": partial(dist.all_reduce, full),
                "all_gather": partial(gather_into, full, part),
                "reduce_scatter": partial(reduce_scatter, part, full),
                "all_to_all": partial(dist.all_to_all_single, received, full),
            }[kind]
            took.append(median_s(partial(call, group=group), ctx, each_s / 4))
        # An all-reduce sends as much twice.
        rates[kind] = (1 + (kind == "all_reduce")) / max(took[1] - took[0], 1e-9)
    all_reduce = rates.pop("all_reduce")
    return {kind: rate / all_reduce for kind, rate in rates.items()}


def hook_s(ctx: DistContext, each_s: float = _EACH_S) -> float:
    """Seconds of the host for a collective of FSDP, between operators of a millisecond.

    It is what a training step takes longer in eight units than in one, by the collectives that
    these have more: a unit gathers its parameters twice, and the root once.
    """
    group: Any = ctx.comm.group
    mesh = DeviceMesh.from_group(group, ctx.device.type)
    x = torch.ones(4096, 128, device=ctx.device)
    took: list[float] = []
    for units in (1, 8):
        net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))).to(ctx.device)
        for layer in net if units > 1 else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)

        def step(net: nn.Module = net) -> None:
            net(x).square().mean().backward()
            net.zero_grad()

        took.append(median_s(step, ctx, each_s / 2))
    return max(0.0, took[1] - took[0]) / (8 * 3 - 2)


def overlap(ctx: DistContext, each_s: float = _EACH_S) -> float:
    """Share of the time of operators during which an all-reduce makes progress as well."""
    tensor = torch.zeros(_LARGE // 4, device=ctx.device)
    a, b = (torch.ones(512, 512, device=ctx.device) for _ in range(2))

    def send() -> Any:
        return dist.all_reduce(tensor, group=ctx.comm.group, async_op=True)

    sent_s = median_s(lambda: send().wait(), ctx, each_s / 3)
    once_s = median_s(lambda: torch.mm(a, b), ctx, each_s / 6)
    count = max(1, round(sent_s / once_s))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, b)

    def both() -> None:
        sending = send()
        compute()
        sending.wait()

    computed_s = median_s(compute, ctx, each_s / 3)
    both_s = median_s(both, ctx, each_s / 3)
    return min(1.0, max(0.0, (sent_s + computed_s - both_s) / min(sent_s, computed_s)))


def measure_device(
    ctx: DistContext,
    done: Callable[[str, int, int], None] = lambda *_: None,
    *,
    each_s: float = _EACH_S,
) -> Device:
    """Measure what the device of a rank can do while all ranks compute.

    All-reduce is measured over each axis of the mesh, and over the ranks of a node where there are
    several nodes. Of several axes, the slowest counts.

    Args:
        ctx: All ranks call this.
        done: (figure, number, of how many): called before each figure, and at the end.
        each_s: Seconds for a figure, of which there are about ten.

    Returns:
        The figures of the slowest rank; the same on every rank.

    Effects:
        Computes and communicates for about `12 * each_s` seconds.

    Raises:
        CollectiveError: a rank failed; on every rank.
    """
    on_cpu = ctx.device.type == "cpu"
    axes = [axis for axis in AXES if ctx.world_size > 1 and ctx.axis(axis).world_size > 1]
    axes += ["node"] if ctx.num_nodes > 1 and ctx.local_world_size > 1 else []
    between = {
        "collectives": partial(collective_shares, ctx, each_s),
        "hooks": partial(hook_s, ctx, each_s),
        "overlap": partial(overlap, ctx, each_s),
    }
    figures: dict[str, Callable[[], Any]] = {
        **{name: partial(product_rate, ctx, dtype, each_s) for name, dtype in _DTYPES.items()},
        "attention": partial(_by_dtype, attention_rate, ctx, each_s),
        "convolutions": partial(_by_dtype, convolution_rate, ctx, each_s),
        "memory": partial(memory_rate, ctx, each_s),
        "launches": partial(launch_s, ctx, each_s),
        **{axis: partial(all_reduce_figures, ctx, axis, each_s) for axis in axes},
        **(between if axes else {}),
    }
    found: dict[str, Any] = {}
    for number, (name, figure) in enumerate(figures.items()):
        done(name, number, len(figures))
        found[name] = figure()
    done("", len(figures), len(figures))
    total = available_memory()[1] // ctx.local_world_size if on_cpu else memory(ctx).total
    module: Any = torch.get_device_module(ctx.device)
    return Device(
        name=platform.machine() if on_cpu else module.get_device_name(ctx.device),
        source=f"fxtrain env --measure on {platform.node()}, {counted(ctx.world_size, 'rank')}, "
        f"{counted(torch.get_num_threads(), 'thread')} each, torch {torch.__version__}",
        type="cpu" if on_cpu else "gpu",
        memory=total or 1,
        flops={name: found[name] for name in _DTYPES},
        attention_flops=found["attention"],
        convolution_flops=found["convolutions"],
        memory_bandwidth=found["memory"],
        launch_s=found["launches"],
        hook_s=found.get("hooks", 0.0),
        collective_efficiency=found.get("collectives", {}),
        overlap=found.get("overlap", 0.0 if on_cpu else 1.0),
        ranks_per_node=ctx.local_world_size,
        **_links(ctx, {axis: found[axis] for axis in axes}),
    )


def _by_dtype(
    rate: Callable[[DistContext, torch.dtype, float], float], ctx: DistContext, each_s: float
) -> dict[str, float]:
    """A rate in fp32 and bf16."""
    return {name: rate(ctx, _DTYPES[name], each_s / 2) for name in ("fp32", "bf16")}


def _links(ctx: DistContext, figures: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Bandwidths and latencies of links, from those of all-reduce over each axis."""
    inside: list[tuple[float, float]] = []
    across: list[tuple[float, float]] = []
    for axis, (bandwidth, latency_s) in figures.items():
        ranks = ctx.axis(axis).comm.ranks
        nodes = len({rank // ctx.local_world_size for rank in ranks})
        if nodes == 1:
            inside.append((bandwidth, latency_s))
        else:  # all ranks of the axis on a node send at once
            across.append((bandwidth * nodes / len(ranks), latency_s))
    inside, across = inside or across or [_NO_LINKS], across or inside or [_NO_LINKS]
    return {
        "link_bandwidth": min(bandwidth for bandwidth, _ in inside),
        "link_latency_s": max(latency_s for _, latency_s in inside),
        "node_bandwidth": min(bandwidth for bandwidth, _ in across),
        "node_latency_s": max(latency_s for _, latency_s in across),
    }


def _main() -> None:
    path, plan = sys.argv[1:]
    with fx.detect(mesh=loads(plan).mesh) as ctx:
        console = Console(stderr=True)
        hidden = not (ctx.is_main and console.is_terminal)
        columns = BarColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
            task = bar.add_task("")
            device = measure_device(
                ctx,
                lambda name, number, of: bar.update(
                    task, description=name, completed=number, total=of
                ),
            )
        if ctx.is_main:
            write_record(device, path)


if __name__ == "__main__":
    _main()
