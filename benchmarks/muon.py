"""Two ranks: an update of Muon, beside torch's in one process on the same matrices.

Both ranks run one process's whole update at the same time, each on a core of its own, so memory
bandwidth and caches are shared in both measurements. An ideal division takes half of it. A divided
update takes as long as its slower rank.

The matrices are those of layers of width 512. Multiplications grow with the cube of the width, and
passes over elements and traffic with its square, so wider layers come closer to the ideal. CPUs
with AMX multiply bf16 about ten times as fast as others and are further from it.

OMP_NUM_THREADS=1 python -m benchmarks.muon
"""

import functools
import statistics

import torch
from torch import nn

import fxtrain as fx
from benchmarks._common import interleaved, show
from fxtrain.testing import Cluster, count_collectives

SHAPES = [(512, 512)] * 4 + [(2048, 512), (512, 2048)] * 2
PLANS = {
    "DDP()": fx.Plan(strategy=fx.DDP()),
    "FSDP()": fx.Plan(strategy=fx.FSDP(min_params=1)),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in SHAPES)

    def forward(self, x):
        return sum(layer(x[: layer.in_features]).sum() for layer in self.layers)


def _muon(params):
    return torch.optim.Muon(params, lr=1e-3)


def _compare(ctx):
    """Seconds of torch's update in this rank alone and of updates on all ranks; collectives."""
    torch.set_num_threads(1)
    alone = Net()
    alone(torch.rand(2048)).backward()
    runs, collectives = {"torch": _muon(alone.parameters()).step}, {}
    for name, plan in PLANS.items():
        model = fx.wrap(Net(), ctx, plan, optimizer=_muon)
        with fx.ops.sync(model):
            fx.ops.backward(model(torch.rand(2048)), model)
        with count_collectives() as traffic:
            model.optimizer.step()
        runs[name], collectives[name] = model.optimizer.step, traffic.counts
    # Without a barrier, a run also pays for the rank that was late in the run before.
    before = functools.partial(fx.ops.barrier, ctx)
    return interleaved(runs, rounds=15, each=1, before=before), collectives


def main():
    pair = Cluster(2, call_s=300)
    answers = pair.run(_compare)
    pair.close()
    collectives = answers[0][1]
    times = {name: max(taken[name] for taken, _ in answers) for name in PLANS}
    times["torch"] = statistics.mean(taken["torch"] for taken, _ in answers)
    rows = [["torch.optim.Muon, one process", f"{1e3 * times['torch']:.0f} ms", "", ""]]
    rows += [
        [
            f"{name}, two ranks",
            f"{1e3 * times[name]:.0f} ms",
            f"{2 * times[name] / times['torch']:.2f}",
            ", ".join(f"{count} {kind}" for kind, count in collectives[name].items()),
        ]
        for name in PLANS
    ]
    show("Muon", ["an update of", "takes", "over half of one process's", "collectives"], rows)


if __name__ == "__main__":
    main()
