"""A program whose dry runs are arithmetic, so that a search takes milliseconds."""

import attrs
import torch
from torch import nn

import fxtrain as fx
from fxtrain.choosing.candidates import Question, least_memory
from fxtrain.choosing.searching import search
from fxtrain.state import DryRun, Memory, Operator, Traffic
from fxtrain.state.mesh import resolve_mesh

STATES = Memory(parameters=4_000_000, gradients=4_000_000, optimizer=8_000_000)
ROW_BYTES = 1_000_000  # of activations
DEVICE = attrs.evolve(fx.state.read_device("H100"), memory=100_000_000)


class Block(nn.Linear):
    """A repeated block."""


class Net(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def arithmetic(attempt, world, rank, look):
    """A dry run with figures that follow from the plan."""
    plan, size = attempt
    mesh = resolve_mesh(plan.mesh or fx.Mesh(), world)
    data = mesh.replicate * mesh.shard
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(Net(), ctx, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        model.window.sizes = (size,) * data
        look(model)
    share = least_memory(attrs.evolve(plan, mesh=mesh), STATES) / (16_000_000)
    memory = Memory(
        **{
            name: int(share * getattr(STATES, name))
            for name in ("parameters", "gradients", "optimizer")
        }
    )
    kept = ROW_BYTES // (4 if plan.recompute else 1)
    work = size * plan.accumulate * (4 if plan.recompute else 3) / 3
    step = ()
    if data > 1:
        sent = Traffic(kind="all_reduce", axis="data", ranks=data, count=1, bytes=4_000_000)
        step = (sent,)
    product = Operator(
        name="mm", phase="forward", dtype="bf16", flops=10**12, bytes=10**6, count=int(3 * work)
    )
    return DryRun(
        name="train", world=world, rank=rank, mesh=mesh, plan=plan, updates=3, memory=memory,
        peak=memory.total + size * kept, operators=(product,), step=step,
    )  # fmt: skip


def question(world=8, rows=64, plan=None, fixed=()):
    return Question(plan=plan or fx.Plan(), fixed=frozenset(fixed), world=world, node=8, rows=rows)


def searched(asked=None, device=DEVICE, program=arithmetic, **how):
    how.setdefault("processes", 1)
    how.setdefault("probe", (fx.Plan(), 2))
    return search(program, asked or question(), device, **how)
