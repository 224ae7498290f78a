"""The pictures of the site, drawn when it is built from what fxtrain computes.

Ranks of a mesh, rows of a loader, chunks of a tensor and bytes of dry runs are asked for here, so a
picture changes with the code.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from site_drawing import Drawing, arrow, bar, box, label
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.profiling import Failures, goodput
from fxtrain.testing import fake_world

__all__ = ["PICTURES", "rows_of_ranks", "stage_orders", "start_times", "train_blocks"]


def _batch() -> Drawing:
    """The way of a batch through a step."""
    top = ["DataLoader", "fx.shard", "Batch"]
    shapes = [box(20 + 150 * n, 20, 120, 40, text, 1) for n, text in enumerate(top)]
    shapes += [arrow((140 + 150 * n, 40), (170 + 150 * n, 40)) for n in range(2)]
    shapes.append(label(445, 44, "rows of this rank, and a cursor", small=True))
    shapes.append('<rect x="10" y="90" width="640" height="150" rx="6" class="frame"/>')
    shapes.append(label(636, 110, "fx.step(ctx, batch, fns)", "end"))
    forward = ["forward", "loss", "weight", "backward"]
    shapes += [box(24 + 156 * n, 122, 120, 36, text, 2) for n, text in enumerate(forward)]
    shapes += [arrow((144 + 156 * n, 140), (180 + 156 * n, 140)) for n in range(3)]
    update = ["reduce", "clip", "optimizer", "scheduler"]
    shapes += [box(24 + 156 * n, 190, 120, 36, text, 3) for n, text in enumerate(update)]
    shapes += [arrow((144 + 156 * n, 208), (180 + 156 * n, 208)) for n in range(3)]
    shapes.append(arrow((552, 158), (552, 174), (84, 174), (84, 190), dashed=True))
    shapes.append(label(318, 171, "where the window ends", "middle", small=True))
    shapes += [arrow((380, 60), (380, 76), (84, 76), (84, 122)), arrow((552, 226), (552, 262))]
    shapes.append(box(492, 262, 120, 36, "Report", 4))
    shapes += [box(320, 262, 130, 36, "fx.save", 4), arrow((492, 280), (450, 280))]
    shapes.append(label(620, 284, "losses, norms, position", small=True))
    return Drawing(title="A batch through a step", shapes=tuple(shapes), width=770, height=310)


def _mesh() -> Drawing:
    """Ranks of three axes, as a context has them."""
    mesh, shapes = fx.Mesh(replicate=2, shard=2, tensor=2), []
    for rank in range(8):
        with fake_world(8, rank=rank, mesh=mesh) as ctx:
            at = {name: ctx.axis(name).rank for name in ("replicate", "shard", "tensor")}
        x = 70 + 340 * at["replicate"] + 140 * at["tensor"]
        shapes.append(box(x, 60 + 80 * at["shard"], 80, 44, f"rank {rank}", 1 + at["shard"]))
        if at["tensor"] == 0:
            shapes.append(arrow((x + 80, 82 + 80 * at["shard"]), (x + 140, 82 + 80 * at["shard"])))
        if at["shard"] == 0:
            shapes.append(arrow((x + 40, 104), (x + 40, 140)))
    shapes += [label(180 + 340 * n, 40, f"replica {n}", "middle") for n in range(2)]
    shapes.append(arrow((290, 122), (408, 122)))
    shapes.append(label(350, 114, "replicate", "middle", small=True))
    shapes.append(label(180, 76, "tensor", "middle", small=True))
    shapes.append(label(104, 126, "shard", "end", small=True))
    return Drawing(title="Eight ranks on three axes", shapes=tuple(shapes), width=640, height=210)


def rows_of_ranks(rows: int, batch_size: int, world: int, plan: fx.Plan) -> list[list[fx.Batch]]:
    """The batches of each rank in an epoch of a loader, whose rows are their own numbers."""
    found = []
    for rank in range(world):
        with fake_world(world, rank=rank) as ctx:
            loader = DataLoader(torch.arange(rows), batch_size=batch_size)
            found.append(list(fx.shard(loader, ctx, plan)))
    return found


def _window() -> Drawing:
    """Which rows make an update, on two ranks."""
    plan = fx.Plan(accumulate=2, even="uneven")
    ranks = rows_of_ranks(rows=17, batch_size=3, world=2, plan=plan)
    shapes, start, count = [], 70.0, len(ranks[0])
    for rank, batches in enumerate(ranks):
        shapes.append(label(10, 68 + 60 * rank, f"rank {rank}"))
        for number, batch in enumerate(batches):
            kept = [
                str(int(row)) for row, real in zip(batch.data, batch.valid, strict=True) if real
            ]
            window = sum(one.position.micro == 0 for one in batches[:number])
            shapes.append(
                box(
                    start + 130 * number, 42 + 60 * rank, 116, 44, " ".join(kept) or "-", 1 + window
                )
            )
    first = 0
    for number, batch in enumerate(ranks[0]):
        if batch.position.micro == 0:
            rows = sum(int(one.valid.sum()) for own in ranks for one in own[first : number + 1])
            left, right = start + 130 * first, start + 130 * number + 116
            shapes.append(f'<path d="M{left} 160v8H{right}v-8" class="line"/>')
            middle = (left + right) / 2
            shapes.append(label(middle, 186, "one update:", "middle", small=True))
            shapes.append(label(middle, 202, f"mean of {rows} rows", "middle", small=True))
            first = number + 1
    shapes += [
        label(start + 130 * number + 58, 30, f"micro-batch {number}", "middle", small=True)
        for number in range(count)
    ]
    width = int(start + 130 * count)
    return Drawing(
        title="Accumulation windows over two ranks", shapes=tuple(shapes), width=width, height=210
    )


def _reshard() -> Drawing:
    """A parameter of ten rows saved by four ranks and read by three."""
    saved = [piece.tolist() for piece in torch.arange(10).chunk(4)]
    read = [piece.tolist() for piece in torch.arange(10).chunk(3)]
    shapes = [label(10, 49, "saved by 4 ranks"), label(10, 179, "read by 3 ranks")]
    for y, pieces in ((30, saved), (160, read)):
        for rank, piece in enumerate(pieces):
            x, width = 150 + 48 * piece[0], 48 * len(piece) - 6
            shapes.append(box(x, y, width, 30, f"rank {rank}", 1 + rank))
    for own in read:
        for other in saved:
            shared = sorted({*own} & {*other})
            if shared:
                x = 150 + 48 * (shared[0] + shared[-1] + 1) / 2 - 3
                text = f"{shared[0]}-{shared[-1]}" if len(shared) > 1 else str(shared[0])
                shapes += [arrow((x, 62), (x, 158)), label(x + 5, 115, text, small=True)]
    return Drawing(
        title="A checkpoint of four ranks, read by three",
        shapes=tuple(shapes),
        width=640,
        height=210,
    )


def stage_orders(schedule: str, stages: int, microbatches: int) -> list[list[tuple[str, int]]]:
    """Forwards ("F") and backwards ("B") of each stage in order, with their micro-batch.

    Source:
        ScheduleGPipe and Schedule1F1B of torch.distributed.pipelining.
    """
    forward = [("F", number) for number in range(microbatches)]
    backward = [("B", number) for number in range(microbatches)]
    if schedule == "gpipe":
        return [[*forward, *backward]] * stages
    orders = []
    for stage in range(stages):
        first = min(microbatches, stages - stage)
        turns = zip(backward, forward[first:], strict=False)
        steady = [one for turn in turns for one in turn]
        orders.append([*forward[:first], *steady, *backward[microbatches - first :]])
    return orders


def start_times(orders: list[list[tuple[str, int]]]) -> list[dict[int, tuple[str, int]]]:
    """What each stage starts at each time, if a backward takes twice as long as a forward."""
    queues, free = [list(order) for order in orders], [0] * len(orders)
    found: list[dict[int, tuple[str, int]]] = [{} for _ in orders]
    done: dict[tuple[int, str, int], int] = {(-1, "F", n): 0 for _, n in orders[0]}
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, number = queue[0]
                last = kind == "B" and stage == len(orders) - 1
                needs = stage if last else stage + (1 if kind == "B" else -1)
                ready = done.get((needs, "F" if last else kind, number))
                if ready is None:
                    break
                start = max(free[stage], ready)
                found[stage][start] = queue.pop(0)
                free[stage] = done[stage, kind, number] = start + (1 if kind == "F" else 2)
    return found


def _pipeline() -> Drawing:
    """What each of four stages does in a step, under two schedules."""
    shapes, y, end = [], 20, 0
    for schedule in ("gpipe", "1f1b"):
        shapes.append(label(10, y + 12, f'schedule="{schedule}"'))
        y += 22
        for stage, starts in enumerate(start_times(stage_orders(schedule, 4, 8))):
            shapes.append(label(10, y + 15, f"stage {stage}", small=True))
            for at, (kind, number) in starts.items():
                width, color = (20, 1) if kind == "F" else (40, 2)
                shapes.append(box(64 + 20 * at, y, width - 2, 20, str(number), color))
                end = max(end, 64 + 20 * at + width)
            y += 24
        y += 18
    shapes += [box(64, y, 14, 14, "", 1), label(84, y + 12, "forward", small=True)]
    shapes += [box(164, y, 14, 14, "", 2), label(184, y + 12, "backward", small=True)]
    title = "Two pipeline schedules"
    return Drawing(title=title, shapes=tuple(shapes), width=end + 10, height=y + 24)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(_Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train_blocks(ctx: fx.DistContext, plan: fx.Plan) -> None:
    """The loop whose dry runs are drawn: eight blocks of 8.4 million parameters."""
    model = fx.wrap(_Net(), ctx, plan, optimizer=torch.optim.AdamW)
    loader = fx.shard(DataLoader(torch.zeros(512, 1024), batch_size=16), ctx, plan)
    fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data).square().mean())
    for batch in loader:
        fx.step(ctx, batch, fns)


_STRATEGIES = (
    ("DDP()", fx.DDP()),
    ("DDP(shard_optimizer=True)", fx.DDP(shard_optimizer=True)),
    ('FSDP(mode="grads_and_optimizer")', fx.FSDP(mode="grads_and_optimizer")),
    ("FSDP()", fx.FSDP()),
)
_PARTS = ("parameters", "gradients", "optimizer", "activations")


def _memory() -> Drawing:
    """Memory of a rank by part, from dry runs on eight ranks."""
    runs = {
        name: fx.dry_run(lambda ctx, s=strategy: train_blocks(ctx, fx.Plan(strategy=s)), world=8)
        for name, strategy in _STRATEGIES
    }
    widest = max(sum(getattr(run.memory, part) for part in _PARTS) for run in runs.values())
    shapes, y = [], 16
    for name, run in runs.items():
        sizes = [(getattr(run.memory, part) * 420 / widest, 1 + n) for n, part in enumerate(_PARTS)]
        shapes.append(label(230, y + 18, name, "end", small=True))
        shapes.append(bar(240, y, sizes, 26))
        end = 240 + sum(width for width, _ in sizes)
        shapes.append(label(end + 8, y + 18, f"{run.peak / 2**20:.0f} MiB", small=True))
        y += 40
    for number, part in enumerate(_PARTS):
        shapes.append(box(240 + 110 * number, y + 4, 14, 14, "", 1 + number))
        shapes.append(label(260 + 110 * number, y + 16, part, small=True))
    return Drawing(
        title="Memory of one of eight ranks", shapes=tuple(shapes), width=740, height=y + 34
    )


def _goodput() -> Drawing:
    """Goodput under simulated failures, by interval of checkpoints and number of spares."""
    setup = Failures(ranks=1000, rank_mtbf_s=3.6e7, checkpoint_s=60, restart_s=300, repair_s=86_400)
    found = goodput(setup, work_s=30 * 86_400, spares=(0, 2, 8))
    shapes, y = [], 16
    for number, (spares, row) in enumerate(zip(found.spares, found.rows, strict=True)):
        shapes.append(label(150, y + 54, f"{spares} spares", "end", small=True))
        for interval, share in zip(found.intervals_s, row, strict=True):
            shapes.append(label(220, y + 12, f"{interval / 60:.0f} min", "end", small=True))
            shapes.append(bar(230, y, [(400 * share, 1 + number)], 14))
            shapes.append(label(238 + 400 * share, y + 12, f"{100 * share:.0f} %", small=True))
            y += 19
        y += 14
    return Drawing(
        title="Goodput of 1,000 ranks, a failure every 10 hours",
        shapes=tuple(shapes),
        width=700,
        height=y,
    )


# Each picture by the name that pages use.
PICTURES: Mapping[str, Callable[[], Drawing]] = MappingProxyType(
    {
        "batch": _batch,
        "goodput": _goodput,
        "memory": _memory,
        "mesh": _mesh,
        "pipeline": _pipeline,
        "reshard": _reshard,
        "window": _window,
    }
)
