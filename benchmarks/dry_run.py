"""A dry run of a Llama of 7 billion parameters on 1024 ranks: seconds and memory of this process.

python -m benchmarks.dry_run
"""

import functools
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxtrain as fx
from benchmarks._common import show
from fxtrain.profile import show_bytes

WIDTH, HIDDEN, DEPTH, HEADS, WORDS, LENGTH = 4096, 11008, 32, 32, 32000, 2048


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor, turn_TK: Tensor) -> Tensor:
        batch, time_, _ = x_BTD.shape
        q, k, v = (
            part(x_BTD).view(batch, time_, HEADS, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            _turned(q, turn_TK), _turned(k, turn_TK), v, is_causal=True
        )
        return self.o(mixed.transpose(1, 2).reshape(batch, time_, WIDTH))


def _turned(x_BHTK: Tensor, turn_TK: Tensor) -> Tensor:
    left, right = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * turn_TK.cos() + torch.cat([-right, left], dim=-1) * turn_TK.sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor, turn_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), turn_TK)
        y_BTD = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        half = WIDTH // HEADS // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        turn_TK = (torch.arange(x_BT.shape[1])[:, None] * rates).repeat(1, 2)
        x_BTD = self.embed(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, turn_TK)
        return self.head(self.norm(x_BTD))


def token_loss(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def rows() -> DataLoader[Any]:
    return DataLoader(torch.zeros(16, LENGTH + 1, dtype=torch.int64), batch_size=1)


def loop(ctx: fx.DistContext, strategy: Any) -> None:
    """fxtrain's own, in bf16, one sequence a rank."""
    plan = fx.Plan(strategy=strategy, precision="bf16", data=fx.Data(source="sharded"))
    model = fx.wrap(Llama(), ctx, plan, optimizer=lambda params: torch.optim.AdamW(params))
    fns = fx.StepFns(model=model, loss=lambda model, batch: token_loss(model, batch.data))
    for batch in fx.shard(rows(), ctx, plan):
        fx.step(ctx, batch, fns)


def measure(name: str, strategy: Any, mesh: fx.Mesh) -> list[str]:
    started, worked = time.perf_counter(), time.process_time()
    fn = functools.partial(loop, strategy=strategy)
    run = fx.dry_run(fn, world=1024, mesh=mesh, device_memory="80GB")
    taken, worked = time.perf_counter() - started, time.process_time() - worked
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [
        name,
        f"{taken:.1f} s",
        f"{worked:.1f} s",
        show_bytes(resident),
        show_bytes(run.memory.parameters),
        show_bytes(run.peak),
        str(sum(row.count for row in run.step)),
        show_bytes(sum(row.bytes for row in run.step)),
    ]


def main() -> None:
    cases = {
        "DDP": (fx.DDP(), fx.Mesh()),
        "FSDP of 8": (fx.FSDP(wrap=("Block",)), fx.Mesh(replicate=-1, shard=8)),
    }
    columns = [
        "plan",
        "time",
        "of it CPU",
        "this process",
        "parameters",
        "peak",
        "collectives",
        "traffic",
    ]
    table = [measure(name, strategy, mesh) for name, (strategy, mesh) in cases.items()]
    show("Dry run, 7B parameters, 1024 ranks (budget: 60 s and 2 GB)", columns, table)


if __name__ == "__main__":
    main()
