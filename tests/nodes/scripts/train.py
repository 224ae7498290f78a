"""Train with fx.fit; each rank appends the rows of each update to rows-RANK.jsonl in its folder."""

import argparse
import json
import os
import time

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--folder", default="runs")
parser.add_argument("--rows", type=int, default=240)
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--timeout", type=float, default=10.0)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--rate", type=float, default=0.9, help="of the scheduler")
parser.add_argument("--mesh", default="{}")
options = parser.parse_args()
EPOCHS, BATCH = 2, 24


class Rows(Dataset):
    def __len__(self):
        return options.rows

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x.sum() > 0).long(), "index": index}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


STYLES = (fx.Style(modules="*.up", style="colwise"), fx.Style(modules="*.down", style="rowwise"))
PLANS = {
    "ddp": lambda: fx.Plan(strategy=fx.DDP()),
    "fsdp": lambda: fx.Plan(strategy=fx.FSDP()),
    "hsdp": lambda: fx.Plan(strategy=fx.FSDP()),
    "tp": lambda: fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=STYLES))),
    "pp": lambda: fx.Plan(strategy=fx.PP(microbatches=2)),
    "local": lambda: fx.Plan(local=fx.LocalSGD(every=4)),
    "diloco": lambda: fx.Plan(local=fx.DiLoCo(every=4)),
}


def main():
    plan = attrs.evolve(PLANS[options.strategy](), batch="global", seed=7)
    sizes = json.loads(options.mesh)
    mesh = fx.Mesh(**sizes) if sizes else None
    with fx.detect(device="cpu", timeout_s=options.timeout, mesh=mesh) as ctx:
        fx.ops.seed(plan.seed, ctx)
        net = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 2))
        model = fx.wrap(
            net,
            ctx,
            plan,
            optimizer=lambda params: torch.optim.SGD(params, lr=options.lr, momentum=0.9),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(
                optimizer, options.rate
            ),
        )
        loader = fx.shard(DataLoader(Rows(), batch_size=BATCH, shuffle=True), ctx, plan)
        seen = {}

        def loss(model, batch):
            real = int(batch.valid.sum())
            seen["rows"] = batch["index"].tolist()[:real]
            return F.cross_entropy(model(batch["x"]), batch["y"])

        fns = fx.StepFns(model=model, loss=loss)
        print(f"rank {ctx.rank} ready pid {os.getpid()}", flush=True)
        with open(f"rows-{ctx.rank}.jsonl", "a") as out:
            reports = fx.fit(
                *(ctx, fns, loader, options.folder),
                epochs=EPOCHS, save_every=options.every, keep_last=2, show=False,
            )  # fmt: skip
            for report in reports:
                update = report.position.updates
                line = {"update": update, "world": ctx.world_size, "rank": ctx.rank}
                line |= {"rows": seen.get("rows", []), "time": time.time()}
                print(json.dumps(line), file=out, flush=True)
                if ctx.is_main:
                    print(f"update {update}.", flush=True)
                time.sleep(options.sleep)
        with fx.gathered(model) as whole:
            if ctx.is_main:
                total = sum(float(p.detach().double().abs().sum()) for p in whole.parameters())
                print(f"done {total:.9f}", flush=True)


main()
