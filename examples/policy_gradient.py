"""Policy gradients: rollouts that the model plays itself, and several updates on each.

    fxtrain launch --ranks 2 examples/policy_gradient.py

A walker learns to stop at 0, from wherever it starts. Every rollout is played by the policy as it
is then, each rank its share of the episodes; `fx.batch` turns what a rank has played into a batch.
Ends with one JSON line: how far from 0 the walkers ended in the first and in the last rollout.
"""

import json

import torch
from torch import Tensor, nn

import fxtrain as fx
from fxtrain import ops

ROLLOUTS, EPISODES, STEPS, INNER = 30, 64, 6, 4


def draws(rollout: int, ctx: fx.DistContext) -> Tensor:
    """Random numbers of this rank's episodes: the same episodes at any number of ranks."""
    numbers = torch.Generator().manual_seed(rollout)
    table = torch.rand(EPISODES, STEPS + 1, generator=numbers, dtype=torch.float64)
    low, high = (EPISODES * rank // ctx.world_size for rank in (ctx.rank, ctx.rank + 1))
    return table[low:high].to(ctx.device)


@torch.no_grad()
def play(policy: fx.Wrapped, numbers: Tensor) -> dict[str, Tensor]:
    """One row for each step of each episode."""
    place = 4 * numbers[:, 0] - 2
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(STEPS):
        state = torch.stack([place, torch.full_like(place, step / STEPS)], dim=1)
        chances = policy(state).softmax(dim=1)
        action = (numbers[:, step + 1] > chances[:, 0]).long()
        rows.append((state, action, chances.gather(1, action[:, None]).log()[:, 0]))
        place = place + torch.where(action == 1, 0.5, -0.5)
    states, actions, before = (torch.cat(column) for column in zip(*rows, strict=True))
    return {"state": states, "action": actions, "before": before, "earned": -place.abs()}


def loss(policy: fx.Wrapped, batch: fx.Batch[dict[str, Tensor]]) -> Tensor:
    """The clipped objective of PPO."""
    chances: Tensor = policy(batch["state"]).log_softmax(dim=1)
    ratio = (chances.gather(1, batch["action"][:, None])[:, 0] - batch["before"]).exp()
    advantage = batch["advantage"]
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def main() -> None:
    with fx.detect() as ctx:
        ops.seed(0, ctx)
        plan = fx.Plan(clip_norm=1.0)
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()
        policy = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
        fns = fx.StepFns(model=policy, loss=loss)
        position, apart = fx.Position(), list[float]()
        for rollout in range(ROLLOUTS):
            rows = play(policy, draws(rollout, ctx))
            earned = rows.pop("earned")
            mean = ops.reduce(earned.sum(), ctx, op="sum") / EPISODES
            rows["advantage"] = (earned - mean).repeat(STEPS)
            apart.append(-float(mean))
            for inner in range(INNER):  # a rollout is an epoch of the run
                last = inner == INNER - 1
                batch = fx.batch(rows, ctx, plan, after=position, last=last)
                position = fx.step(ctx, batch, fns).position
        told = {"ranks": ctx.world_size, "first": apart[0], "last": apart[-1]}
        ops.say(json.dumps({**told, "rows": position.samples, "updates": position.updates}), ctx)


if __name__ == "__main__":
    main()
