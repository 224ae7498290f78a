"""Pretrain a small GPT on text, over three axes: pipeline, tensor and data.

    fxtrain launch --ranks 4 examples/features/gpt_3d.py     # 2 stages, layers split over 2
    fxtrain launch --ranks 8 examples/features/gpt_3d.py     # the same, with the states sharded
    python examples/features/gpt_3d.py                       # no axis, for comparison

The model is written for one device; the mesh and the plan split it. The text is Python's manual,
read as bytes. Ends with one JSON line: the axes, and the loss per byte at the start and the end,
which is the same for any number of ranks.
"""

import json
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

LENGTH, WIDTH, HEAD, DEPTH, ROWS, UPDATES = 64, 64, 16, 4, 16, 12


class Block(nn.Module):
    """Causal attention and a two-layer network. The heads are as many as this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.norm1(x_BTD)
        q, k, v = (
            layer(y_BTD).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class GPT(nn.Module):
    """(rows, time) bytes → (rows, time, 256) logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT) + self.place
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


SPLIT = fx.TP(
    styles=(
        *(fx.Style(modules=f"blocks.*.{name}", style="colwise") for name in ("q", "k", "v", "up")),
        *(fx.Style(modules=f"blocks.*.{name}", style="rowwise") for name in ("o", "down")),
    )
)
SHARDED = fx.FSDP(mode="grads_and_optimizer", tensor=SPLIT)


def axes(ranks: int) -> tuple[fx.Mesh, fx.PP | fx.DDP]:
    """Pipeline and tensor by two, and the other ranks for data; below four ranks only data."""
    if ranks < 4:
        return fx.Mesh(), fx.DDP()
    mesh = fx.Mesh(pipeline=2, tensor=2, shard=ranks // 4)
    return mesh, fx.PP(microbatches=2, stages=SHARDED)


def windows() -> TensorDataset:
    """(windows, LENGTH + 1) bytes of the manual, without overlap."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    whole = len(text) // (LENGTH + 1) * (LENGTH + 1)
    return TensorDataset(text[:whole].view(-1, LENGTH + 1))


def loss(model: fx.Wrapped, batch: fx.Batch[Any]) -> Tensor:
    logits = model(batch[0][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


def main(ctx: fx.DistContext) -> dict[str, Any]:
    mesh, strategy = axes(ctx.world_size)
    plan = fx.Plan(strategy=strategy, batch="global", clip_norm=1.0, seed=4)
    losses: list[float] = []
    with fx.detect(mesh=mesh, device=ctx.device) as placed:
        torch.manual_seed(0)
        model = fx.wrap(
            GPT(), placed, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3)
        )
        fns = fx.StepFns(model=model, loss=loss)
        loader = fx.shard(DataLoader(windows(), batch_size=ROWS, shuffle=True), placed, plan)
        for batch in loader.updates(UPDATES):
            report = fx.step(placed, batch, fns)
            losses.append(float(ops.reduce(report.loss, placed)))
    used = {"pipeline": mesh.pipeline, "tensor": mesh.tensor, "shard": mesh.shard}
    return {"axes": used, "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
