"""The pictures of the site, drawn when it is built from what fxtrain computes.

Ranks of a mesh, rows of a loader, chunks of a checkpoint, the order of a pipeline and bytes of a
dry run are asked for here, so a picture changes with the code.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from site_drawing import Drawing, arrow, bar, box, label
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing import fake_world

__all__ = ["PICTURES", "rows_of_ranks", "train_blocks"]


def _batch() -> Drawing:
    """The way of a batch through a step."""
    top = ["DataLoader", "fx.shard", "Batch"]
    shapes = [box(20 + 150 * n, 20, 120, 40, text, 1) for n, text in enumerate(top)]
    shapes += [arrow((140 + 150 * n, 40), (170 + 150 * n, 40)) for n in range(2)]
    shapes.append(label(445, 44, "rows of this rank, and a cursor", small=True))
    shapes.append('<rect x="10" y="90" width="640" height="150" rx="6" class="frame"/>')
    shapes.append(label(24, 110, "fx.step(ctx, batch, fns)"))
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
    shapes.append(label(306, 284, "position, losses, norms", "end", small=True))
    return Drawing(title="A batch through a step", shapes=tuple(shapes), width=660, height=310)


def _mesh() -> Drawing:
    """Ranks of three axes, as a context has them."""
    mesh, shapes = fx.Mesh(replicate=2, shard=2, tensor=2), []
    for rank in range(8):
        with fake_world(8, rank=rank, mesh=mesh) as ctx:
            at = {name: ctx.axis(name).rank for name in ("replicate", "shard", "tensor")}
        x = 70 + 300 * at["replicate"] + 110 * at["tensor"]
        shapes.append(box(x, 60 + 80 * at["shard"], 80, 44, f"rank {rank}", 1 + at["shard"]))
        if at["tensor"] == 0:
            shapes.append(arrow((x + 80, 82 + 80 * at["shard"]), (x + 110, 82 + 80 * at["shard"])))
        if at["shard"] == 0:
            shapes.append(arrow((x + 40, 104), (x + 40, 140)))
    for number in range(2):
        shapes.append(label(165 + 300 * number, 40, f"replica {number}", "middle"))
    shapes.append(arrow((260, 122), (368, 122)))
    shapes.append(label(314, 114, "replicate", "middle", small=True))
    shapes.append(label(165, 76, "tensor", "middle", small=True))
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
            kept = [str(int(row)) for row, real in zip(batch.data, batch.valid, strict=True) if real]
            window = sum(one.position.micro == 0 for one in batches[:number])
            shapes.append(
                box(start + 130 * number, 42 + 60 * rank, 116, 44, " ".join(kept) or "-", 1 + window)
            )
    first = 0
    for number, batch in enumerate(ranks[0]):
        if batch.position.micro == 0:
            rows = sum(int(one.valid.sum()) for own in ranks for one in own[first : number + 1])
            left, right = start + 130 * first, start + 130 * number + 116
            shapes.append(f'<path d="M{left} 160v8H{right}v-8" class="line"/>')
            shapes.append(
                label((left + right) / 2, 186, f"one update: the mean of {rows} rows", "middle")
            )
            first = number + 1
    shapes += [
        label(start + 130 * number + 58, 30, f"micro-batch {number}", "middle", small=True)
        for number in range(count)
    ]
    width = int(start + 130 * count)
    return Drawing(
        title="Accumulation windows over two ranks", shapes=tuple(shapes), width=width, height=200
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
        title="A checkpoint of four ranks, read by three", shapes=tuple(shapes), width=640, height=210
    )


_SCHEDULES = (("GPipe", "GPipe", 1), ("Interleaved1F1B", "1F1B", 1))


def _pipeline() -> Drawing:
    """What each of four stages does in a step, by torch's schedules."""
    shapes, y = [], 20
    for schedule, name, per_rank in _SCHEDULES:
        ranks = _timed(get_schedule_ops(schedule, 4, 8, per_rank))
        shapes.append(label(10, y + 12, name))
        y += 22
        for rank, actions in enumerate(ranks):
            shapes.append(label(10, y + 15, f"stage {rank}", small=True))
            for at, (text, kind, length) in actions.items():
                shapes.append(box(64 + 20 * at, y, 20 * length - 2, 20, text, kind))
            y += 24
        y += 18
    return Drawing(
        title="Two pipeline schedules", shapes=tuple(shapes), width=64 + 20 * 34, height=y
    )


def _timed(ranks: list[list[object]]) -> list[dict[int, tuple[str, int, int]]]:
    """When each forward and backward starts, if a backward takes twice as long as a forward."""
    queues = [[one for one in actions if one and str(one)[1] in "FB"] for actions in ranks]
    found: list[dict[int, tuple[str, int, int]]] = [{} for _ in ranks]
    done: dict[tuple[int, str, str], int] = {}
    free = [0] * len(ranks)
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, number = str(queue[0])[1], str(queue[0])[2:]
                before = (rank - 1, "F", number) if kind == "F" else (rank + 1, "B", number)
                last = len(ranks) - 1
                if not (0 <= before[0] <= last):
                    before = (rank, "F", number)
                first = kind == "F" and rank == 0
                if not first and before not in done:
                    break
                start = max(free[rank], 0 if first else done[before])
                length = 1 if kind == "F" else 2
                free[rank] = done[rank, kind, number] = start + length
                found[rank][start] = (number, 1 if kind == "F" else 2, length)
                queue.pop(0)
    return found


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


# Each picture by the name that pages use.
PICTURES: Mapping[str, Callable[[], Drawing]] = MappingProxyType(
    {
        "batch": _batch,
        "memory": _memory,
        "mesh": _mesh,
        "pipeline": _pipeline,
        "reshard": _reshard,
        "window": _window,
    }
)
