"""Two ranks: a step with experts spread over them, beside the same exchanges written by hand.

python -m benchmarks.experts
"""

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import fxtrain as fx
from benchmarks._common import interleaved, show
from fxtrain.testing import Cluster, count_collectives

EXPERTS, WIDTH, TOKENS, CHOSEN = 8, 256, 1024, 2


class Experts(nn.Module):
    def __init__(self, count=EXPERTS):
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, WIDTH, 4 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(count, 4 * WIDTH, WIDTH) * 0.02)

    def forward(self, tokens, index, weights):
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, place = torch.where(index == expert)
            made = F.gelu(tokens[row] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, row, made * weights[row, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), experts

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(CHOSEN)
        return x + self.experts(x, index, weights)


class ByHand(Experts):
    """This rank's half of the experts, and the exchanges around them."""

    def __init__(self):
        super().__init__(EXPERTS // 2)

    def forward(self, tokens, index, weights):
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=EXPERTS)
        found = torch.empty_like(counts)
        dist.all_to_all_single(found, counts)
        sent, received = (c.view(2, -1).sum(1).tolist() for c in (counts, found))
        rows = all_to_all_single_autograd(tokens[order // CHOSEN], received, sent, dist.group.WORLD)
        local = torch.arange(self.num_experts).repeat(2).repeat_interleave(found)
        out = super().forward(rows, local[:, None], rows.new_ones(len(rows), 1))
        back = all_to_all_single_autograd(out, sent, received, dist.group.WORLD)
        each = torch.empty_like(back).index_copy(0, order, back).view(len(tokens), CHOSEN, -1)
        return (each * weights[..., None]).sum(1)


def _compare(ctx):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    hand = Mixture(ByHand())
    adam = torch.optim.AdamW(hand.parameters(), lr=1e-3)

    def by_hand():
        hand(x).square().mean().backward()
        for parameter in hand.gate.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= 2
        for parameter in hand.experts.parameters():
            parameter.grad /= 2
        adam.step()
        adam.zero_grad()

    plan = fx.Plan(strategy=fx.FSDP(expert=2))
    torch.manual_seed(0)
    model = fx.wrap(
        Mixture(Experts()), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)
    )
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    batch = fx.batch(x, ctx, plan)
    gathered = fx.wrap(
        Mixture(Experts()),
        ctx,
        fx.Plan(strategy=fx.FSDP()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
    )
    whole = fx.StepFns(gathered, lambda model, batch: model(batch.data).square().mean())
    runs = {
        "by hand": by_hand,
        "FSDP(expert=2)": lambda: fx.step(ctx, batch, fns),
        "FSDP()": lambda: fx.step(ctx, batch, whole),
    }
    sent = {}
    for name, run in runs.items():
        run()
        with count_collectives() as traffic:
            run()
        sent[name] = sum(traffic.bytes.values())
    return interleaved(runs, rounds=21, each=1, before=dist.barrier), sent


def main():
    pair = Cluster(2, call_s=300)
    times, sent = pair.run(_compare)[0]
    pair.close()
    rows = [
        [
            name,
            f"{1e3 * taken:.0f} ms",
            f"{times['by hand'] / taken:.2f}",
            f"{sent[name] / 2**20:.1f} MiB",
        ]
        for name, taken in times.items()
    ]
    show("A mixture of 8 experts, two ranks", ["a step", "takes", "speed", "sends"], rows)


if __name__ == "__main__":
    main()
