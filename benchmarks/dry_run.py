"""Dry runs of a Llama of 7 billion parameters on 1024 ranks: seconds and memory, cold.

python -m benchmarks.dry_run [PLAN]
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import show
from fxtrain.profiling import show_bytes

WIDTH, HIDDEN, DEPTH, HEAD, WORDS, LENGTH = 4096, 11008, 32, 128, 32000, 2048
_BLOCKS = fx.FSDP(wrap=("Block",))
_SPLIT = fx.TP(
    styles=(
        fx.Style(modules="blocks.*.attention.[qkv]", style="colwise"),
        fx.Style(modules="blocks.*.attention.o", style="rowwise"),
        fx.Style(modules="blocks.*.gate", style="colwise"),
        fx.Style(modules="blocks.*.up", style="colwise"),
        fx.Style(modules="blocks.*.down", style="rowwise"),
    )
)
CASES: dict[str, tuple[fx.Mesh, dict[str, Any]]] = {
    "DDP": (fx.Mesh(), {}),
    "FSDP over 8, 128 copies": (fx.Mesh(replicate=128, shard=8), {"strategy": _BLOCKS}),
    "FSDP over 1024": (fx.Mesh(shard=1024), {"strategy": _BLOCKS}),
    "FSDP over 128, TP over 8": (
        fx.Mesh(shard=128, tensor=8),
        {"strategy": fx.FSDP(wrap=("Block",), tensor=_SPLIT)},
    ),
    "FSDP over 1024, 8 share a sequence": (
        fx.Mesh(shard=128, context=8),
        {"strategy": _BLOCKS, "context": fx.CP(tables=("turn",))},
    ),
    "PP over 8, FSDP over 128": (
        fx.Mesh(shard=128, pipeline=8),
        {"strategy": fx.PP(microbatches=8, stages=_BLOCKS)},
    ),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor, turn_TK: Tensor) -> Tensor:
        batch, time_, _ = x_BTD.shape
        # As many heads as the layers make: a part of them under tensor parallelism.
        q, k, v = (
            part(x_BTD).view(batch, time_, -1, HEAD).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            _turned(q, turn_TK), _turned(k, turn_TK), v, is_causal=True
        )
        return self.o(mixed.transpose(1, 2).reshape(batch, time_, -1))


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
        rates = 10000.0 ** (-torch.arange(HEAD // 2) / (HEAD // 2))
        self.register_buffer("turn", (torch.arange(LENGTH)[:, None] * rates).repeat(1, 2))

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.turn)
        return self.head(self.norm(x_BTD))


def token_loss(model: Any, batch: Any) -> Tensor:
    x_BT, y_BT = batch
    return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())


def rows(size: int) -> DataLoader[Any]:
    tokens = torch.zeros(16 * size, LENGTH, dtype=torch.int64)
    return DataLoader(TensorDataset(tokens, tokens), batch_size=size)


def measure(mesh: fx.Mesh, fields: dict[str, Any]) -> list[str]:
    """One dry run in this process, and what the process took with its imports."""
    plan = fx.Plan(precision="bf16", data=fx.Data(source="sharded"), **fields)

    def loop(ctx: fx.DistContext) -> None:
        model = fx.wrap(Llama(), ctx, plan, optimizer=torch.optim.AdamW)
        fns = fx.StepFns(model=model, loss=token_loss)
        size = getattr(plan.strategy, "microbatches", 1)  # a row for each of a pipeline's
        for batch in fx.shard(rows(size), ctx, plan):
            fx.step(ctx, batch, fns)

    run = fx.dry_run(loop, world=1024, mesh=mesh, device_memory="80GB")
    if not run.fits and not run.step:
        raise RuntimeError("\n".join(problem.text for problem in run.problems))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [
        f"{time.process_time():.1f} s",
        show_bytes(resident),
        show_bytes(run.memory.parameters),
        show_bytes(run.peak),
        str(sum(row.count for row in run.step)),
        show_bytes(sum(row.bytes for row in run.step)),
    ]


def main() -> None:
    table: list[list[str]] = []
    for name in sys.argv[1:] or CASES:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _ALONE, name], check=True, stdout=subprocess.PIPE, text=True
        )
        taken = time.perf_counter() - started
        table.append([name, f"{taken:.1f} s", *json.loads(done.stdout.splitlines()[-1])])
    columns = "plan", "time", "of it CPU", "process", "parameters", "peak", "calls", "traffic"
    title = "Dry run, 7B parameters, 1024 ranks, fresh processes (budget: 60 s and 2 GB)"
    show(title, list(columns), table)


_ALONE = (
    "import json, sys; from benchmarks.dry_run import CASES, measure; "
    "sys.stdout.write(json.dumps(measure(*CASES[sys.argv[1]])))"
)

if __name__ == "__main__":
    main()
