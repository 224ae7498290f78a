"""Estimates of the throughput of published runs, whose models are built without values.

Every figure was compared with its source, in November 2026:

- torchtitan: github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at
  31a17bf: tables 1 to 6. H100 with 96 GB HBM2e of 2.4 TB/s and a power limit of 500 W. Tables 5 and
  6, and the second row of table 4, which is not used, are with asynchronous tensor parallelism,
  which fxtrain does not have. The tables do not name the micro-batches of pipelines; torchtitan's
  default, one per stage, is assumed.
- torchtitan-h200: benchmarks/llama3_8b_h200_2025-06_torchtitan.md at bcdeaa3.
- Megatron-LM: arXiv:2104.04473, table 1. Section 5.1: rows of 2048 tokens, recomputation, and
  schedules that send a part of each tensor between nodes and gather it inside one; fxtrain sends it
  whole. The rows of a micro-batch and the stages of a rank are in its authors' script:
  github.com/NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh at 79a3bb6.
"""

import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._choose_models import Gpt
from benchmarks._common import show, tell
from fxtrain.choosing import StepCost, step_cost
from fxtrain.choosing.candidates import Question
from fxtrain.choosing.report import name_row
from fxtrain.choosing.searching import search
from fxtrain.choosing.trials import run_function

_H100 = fx.state.read_device("H100")
# The data sheet is for 700 W. Power grows with the third power of the clock.
_CLOCK = (500 / 700) ** (1 / 3)
_TITAN = attrs.evolve(
    _H100,
    memory=96 * 10**9,
    memory_bandwidth=2.4e12,
    efficiency=_H100.efficiency * _CLOCK,
    attention_flops={dtype: _CLOCK * rate for dtype, rate in _H100.attention_flops.items()},
)
# fxtrain's pipelines take no fp8: their products have its rate here, and no casts.
_TITAN_STAGES = attrs.evolve(
    _TITAN,
    flops={**_TITAN.flops, "bf16": _TITAN.flops["fp8"]},
)
_DEVICES = {
    "torchtitan": _TITAN,
    "torchtitan-h200": fx.state.read_device("H200"),
    "Megatron-LM": fx.state.read_device("A100"),
}


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.width, inner = width // heads, 8 * width // heads  # eight heads of keys and values
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, turn_TK: Tensor) -> Tensor:
        y_BTD = self.norm1(x_BTD)
        q, k, v = (
            part(y_BTD).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        groups = q.shape[1] // k.shape[1]
        q, k = _turned(q, turn_TK), _turned(k, turn_TK)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(mixed.transpose(1, 2).flatten(2))
        y_BTD = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))


def _turned(x_BHTK: Tensor, turn_TK: Tensor) -> Tensor:
    left, right = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * turn_TK + torch.cat([-right, left], dim=-1) * turn_TK


class Llama(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(128256, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 128256, bias=False)
        self.register_buffer("turn", torch.ones(length, width // heads, dtype=torch.bfloat16))

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.turn)
        return self.head(self.norm(x_BTD))


def _stored_scores(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """Attention of Megatron-LM in 2021, which keeps the scores, in fp16."""
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2)
    with torch.autocast(q_BHTK.device.type, enabled=False):  # its softmax is one kernel in fp16
        scores_BHTT = F.dropout(scores_BHTT.softmax(-1), 0.1)
    return scores_BHTT @ v_BHTK


_LLAMA = {
    "8B": (4096, 32, 32, 14336),
    "70B": (8192, 80, 64, 28672),
    "405B": (16384, 126, 128, 53248),
}
_STYLES = (
    fx.Style(modules="embed", style="rowwise"),
    *(fx.Style(modules=f"blocks.*.{name}", style="colwise") for name in ("q", "k", "v")),
    fx.Style(modules="blocks.*.o", style="rowwise"),
    *(fx.Style(modules=f"blocks.*{name}", style="colwise") for name in ("gate", "up")),
    fx.Style(modules="blocks.*down", style="rowwise"),
    fx.Style(modules="head", style="colwise_gather"),
)


@attrs.frozen(kw_only=True)
class Row:
    """A published run: what it trains, how, and its throughput.

    Attributes:
        model: Arguments of `Llama` or `Gpt`.
        rows: Of a micro-batch on one rank.
        windows: Micro-batches of an update: of a pipeline, or accumulated.
        compiled: Whether it used torch.compile; dry runs see operators before they are fused.
        published: Tokens per second of a GPU; TFLOP/s of a GPU for Megatron-LM.
    """

    table: str
    name: str
    model: tuple[int, ...]
    world: int
    mesh: fx.Mesh
    plan: fx.Plan
    rows: int
    windows: int = 1
    length: int = 8192
    compiled: bool = False
    published: float

    @property
    def stages(self) -> int:
        """Ranks of a pipeline."""
        return self.mesh.pipeline


def _titan(
    name: str, size: str, published: float, *, shard: int, rows: int = 2, length: int = 8192,
    context: int = 1, tensor: int = 1, pipeline: int = 1, schedule: Any = "1f1b",
    fp8: bool = True, compiled: bool = True, full: bool = True, table: str = "torchtitan",
) -> Row:  # fmt: skip
    split = fx.TP(styles=_STYLES, sequence=True, loss=True) if tensor > 1 else None
    sharded: Any = fx.FSDP(wrap=("LlamaBlock",), tensor=split)
    if pipeline > 1:
        sharded = fx.PP(stages=sharded, schedule=schedule, microbatches=pipeline)
    plan = fx.Plan(
        strategy=sharded,
        precision="fp8" if fp8 and pipeline == 1 else "bf16",
        recompute="LlamaBlock",
        # torchtitan's selective recomputation keeps every second matrix product.
        recompute_every=1 if full else 2,
        context=fx.CP(tables=("turn",)) if context > 1 else None,
        data=fx.Data(source="sharded"),
    )
    mesh = fx.Mesh(replicate=1, shard=shard, context=context, tensor=tensor, pipeline=pipeline)
    return Row(
        table=table, name=name, model=(*_LLAMA[size], length), plan=plan, mesh=mesh,
        world=shard * context * tensor * pipeline, rows=rows, length=length, compiled=compiled,
        windows=pipeline, published=published,
    )  # fmt: skip


def _megatron(
    name: str, heads: int, width: int, depth: int, tensor: int, pipeline: int, gpus: int,
    batch: int, rows: int, chunks: int, published: float,
) -> Row:  # fmt: skip
    copies = gpus // (tensor * pipeline)
    styles = tuple(style for style in _STYLES if not style.modules.endswith("gate"))
    split = fx.TP(styles=styles, loss=True) if tensor > 1 else None
    strategy: Any = fx.FSDP(mode="none", tensor=split) if split else fx.DDP()
    windows = batch // copies // rows
    if pipeline > 1:
        strategy = fx.PP(
            stages=strategy,
            schedule="1f1b" if chunks == 1 else "interleaved_1f1b",
            stages_per_rank=chunks,
            microbatches=windows,
        )
    plan = fx.Plan(
        strategy=strategy,
        precision="fp16",
        recompute="GptBlock",
        data=fx.Data(source="sharded"),
    )
    mesh = fx.Mesh(replicate=copies, tensor=tensor, pipeline=pipeline)
    return Row(
        table="Megatron-LM", name=name, model=(width, depth, heads, 51200), world=gpus, mesh=mesh,
        plan=plan, rows=rows, windows=windows, length=2048, published=published,
    )  # fmt: skip


def table() -> list[Row]:
    """All published runs."""
    bf16: dict[str, Any] = {"fp8": False, "full": False}
    eager: dict[str, Any] = {**bf16, "compiled": False}
    return [
        _titan("1: 8B, 8 GPUs", "8B", 5762, shard=8, **eager),
        _titan("1: compiled", "8B", 6667, shard=8, **bf16),
        _titan("1: compiled, fp8", "8B", 8532, shard=8, full=False),
        _titan("3: 8B, 128 GPUs", "8B", 5605, shard=128, **eager),
        _titan("3: compiled", "8B", 6514, shard=128, **bf16),
        _titan("3: compiled, fp8", "8B", 8380, shard=128, full=False),
        _titan("2: 32k tokens", "8B", 3890, shard=8, rows=1, length=32768),
        _titan("2: 64k tokens, CP 2", "8B", 2540, shard=4, rows=1, length=65536, context=2),
        _titan("2: 128k tokens, CP 4", "8B", 1071, shard=2, rows=1, length=131072, context=4),
        _titan("2: 256k tokens, CP 8", "8B", 548, shard=1, rows=1, length=262144, context=8),
        _titan("4: 70B, 256 GPUs", "70B", 829, shard=32, tensor=8, rows=16),
        _titan("5: 405B, 512 GPUs", "405B", 100, shard=8, tensor=8, pipeline=8, rows=4),
        _titan("5: interleaved", "405B", 128, shard=8, tensor=8, pipeline=8, rows=4,
               schedule="interleaved_1f1b"),
        _titan("6: 32k tokens", "405B", 76, shard=8, tensor=8, pipeline=8, rows=1, length=32768),
        _titan("8B, 32 H200", "8B", 10938, shard=32, full=False, table="torchtitan-h200"),
        _titan("8B, 64 H200", "8B", 10753, shard=64, full=False, table="torchtitan-h200"),
        _megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
        _megatron("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
        _megatron("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
        _megatron("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
        _megatron("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
        _megatron("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
        _megatron("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
        _megatron("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
        _megatron("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
        _megatron("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
    ]  # fmt: skip


def _loss(model: Any, batch: Any) -> Tensor:
    x_BT, y_BT = batch
    return F.cross_entropy(model(x_BT).flatten(0, 1).float(), y_BT.flatten())


def _train(row: Row, ctx: fx.DistContext, size: int, plan: fx.Plan) -> None:
    gpt = row.table == "Megatron-LM"
    net: nn.Module = Gpt(*row.model, _stored_scores, 0.1) if gpt else Llama(*row.model)
    model = fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW)
    fns = fx.StepFns(model=model, loss=_loss)
    tokens = torch.zeros(1, row.length, dtype=torch.int64).expand(1 << 20, row.length)
    # A sharded source: each data rank has batches of its own, without a sampler over all rows.
    loader = DataLoader(TensorDataset(tokens, tokens), batch_size=size)
    for batch in fx.shard(loader, ctx, plan):
        fx.step(ctx, batch, fns)


def _dry_run(row: Row, plan: fx.Plan, rows: int) -> fx.state.DryRun:
    def train(ctx: fx.DistContext) -> None:
        _train(row, ctx, rows, plan)

    # The rank of the last stage, which has the head.
    run = fx.dry_run(train, world=row.world, rank=row.world - 1, mesh=row.mesh)
    if not run.fits:
        raise RuntimeError("\n".join(problem.text for problem in run.problems))
    return run


def estimate(row: Row) -> tuple[StepCost, int]:
    """The time of an update, and the peak of a step with few micro-batches."""
    device = _TITAN_STAGES if row.table == "torchtitan" and row.stages > 1 else _DEVICES[row.table]
    counts = sorted({min(row.windows, max(1, row.stages) * few) for few in (1, 2)})
    costs: list[StepCost] = []
    peak = 0
    for count in counts:
        plan = row.plan
        if row.stages > 1:
            strategy = attrs.evolve(plan.strategy, microbatches=count)
            plan, rows = attrs.evolve(plan, strategy=strategy), row.rows * count
        else:
            plan, rows = attrs.evolve(plan, accumulate=count), row.rows
        run = _dry_run(row, plan, rows)
        peak = peak or run.peak
        costs.append(step_cost(run, attrs.evolve(plan, compile=row.compiled), device))
    if len(counts) == 1:
        return costs[0], peak
    more = (row.windows - counts[0]) / (counts[1] - counts[0])
    first, second = map(attrs.astuple, costs)
    names = [field.name for field in attrs.fields(StepCost)]
    every = {name: a + more * (b - a) for name, a, b in zip(names, first, second, strict=True)}
    # A bubble lasts as long with many micro-batches as with few.
    return StepCost(**{**every, "bubble_s": costs[1].bubble_s}), peak


def throughput(row: Row, seconds: float) -> float:
    """In the unit of the table."""
    data = row.mesh.replicate * row.mesh.shard
    rows = row.rows * row.windows * data
    if row.table != "Megatron-LM":
        return rows * row.length / seconds / row.world
    width, depth, _, words = row.model
    # Section 5.1's count of FLOPs, with recomputation.
    flops = 96 * rows * row.length * depth * width**2
    flops *= 1 + row.length / (6 * width) + words / (16 * depth * width)
    return flops / seconds / row.world / 1e12


def _attempt(row: Row) -> tuple[StepCost, int] | str:
    try:
        return estimate(row)
    except Exception as error:  # shown in the table
        return f"{type(error).__name__}: {error}"


def published(names: list[str]) -> None:
    """Estimates beside published figures, for tables whose names are given, or all."""
    rows = [row for row in table() if not names or row.table in names or row.name in names]
    lines: list[list[str]] = []
    errors: dict[str, list[float]] = {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        for row, found in zip(rows, processes.map(_attempt, rows), strict=True):
            if isinstance(found, str):
                lines.append([row.table, row.name, f"{row.published:g}", "", "", found[:200]])
                tell(" | ".join([*lines[-1][:-1], found]))
                continue
            cost, peak = found
            got = throughput(row, cost.seconds)
            errors.setdefault(row.table, []).append(abs(got / row.published - 1))
            parts = " ".join(f"{part:.2f}" for part in attrs.astuple(cost))
            lines.append([
                row.table, row.name, f"{row.published:g}", f"{got:.0f}",
                f"{got / row.published - 1:+.0%}", f"{parts}; {peak / 2**30:.0f} GiB",
            ])  # fmt: skip
            tell(" | ".join(lines[-1]))
    show(
        "Tokens/s of a GPU (torchtitan), TFLOP/s of a GPU (Megatron-LM)",
        [
            "table",
            "run",
            "published",
            "estimated",
            "error",
            "compute memory launch links bubble, s",
        ],
        lines,
    )
    medians = [
        [name, str(len(each)), f"{statistics.median(each):.0%}"] for name, each in errors.items()
    ]
    every = [error for each in errors.values() for error in each]
    if every:
        medians.append(["all", str(len(every)), f"{statistics.median(every):.0%}"])
    show("Median errors", ["table", "rows", "error"], medians)


# One run of each kind: shards, shards of split layers, replicas of split layers.
_SEARCHED = ("1: 8B, 8 GPUs", "4: 70B, 256 GPUs", "7.5B")


def searched(names: list[str]) -> None:
    """Where published configurations are among the plans that a search finds, in five minutes."""
    lines: list[list[str]] = []
    for row in [row for row in table() if row.name in (names or _SEARCHED)]:
        question = Question(
            plan=attrs.evolve(row.plan, mesh=row.mesh, recompute=(), recompute_every=1),
            fixed=frozenset({"precision", "context", "data"}),
            world=row.world,
            node=8,
            rows=row.rows * row.windows * row.mesh.replicate * row.mesh.shard,
        )
        alone = attrs.evolve(question.plan, strategy=fx.DDP(), mesh=None, context=None)
        program = partial(run_function, partial(_train, row))
        device = _DEVICES[row.table]
        choice = search(program, question, device, probe=(alone, 1), minutes=5.0)
        own = [
            number
            for number, each in enumerate(choice.table, 1)
            if (each.plan.strategy, each.plan.mesh) == (row.plan.strategy, row.mesh)
        ]
        for number, each in enumerate(choice.table[:5], 1):
            speed = f"{throughput(row, each.cost.seconds):.0f}"
            lines.append([row.name, str(number), name_row(each), speed, each.cost.limit])
        place = f"number {own[0]}" if own else "not among the best ten"
        lines.append([row.name, "", f"published: {place}; {choice.tried} tried", "", ""])
        tell("\n".join(" | ".join(line) for line in lines if line[0] == row.name))
        tell(str(choice.dropped))
    show("What a search finds", ["run", "", "plan", "throughput", "limited by"], lines)
