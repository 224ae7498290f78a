"""An actor that a critic trains: the actor's backward goes through the critic.

    fxtrain launch --ranks 2 examples/actor_critic.py

The critic learns rewards from actions that were tried; the actor learns to choose the action that
the critic rates highest. Ends with one JSON line: the mean reward of the actor, and how far the
parameters are from those of a raw loop on torch alone.
"""

import json
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

Model = nn.Module | fx.Wrapped
EPOCHS, ROWS, BATCH = 30, 512, 64  # of all ranks together


class Critic(nn.Module):
    """The reward to expect from an action in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        return self.layers(torch.cat([state, action], dim=1))


def networks() -> tuple[nn.Module, nn.Module]:
    """An actor and a critic, the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1), nn.Sigmoid())
        return actor.double(), Critic().double()


def reward(state: Tensor, action: Tensor) -> Tensor:
    return -(action - state.mean(1, keepdim=True)).square()


def data() -> TensorDataset:
    """States, actions that were tried in them, and what they earned."""
    draw = torch.Generator().manual_seed(1)
    state = torch.rand(ROWS, 2, generator=draw, dtype=torch.float64)
    action = torch.rand(ROWS, 1, generator=draw, dtype=torch.float64)
    return TensorDataset(state, action, reward(state, action))


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=1e-2)


def critic_loss(critic: Model, state: Tensor, action: Tensor, earned: Tensor) -> Tensor:
    return F.mse_loss(critic(state, action), earned)


def actor_loss(actor: Model, critic: Model, state: Tensor) -> Tensor:
    return -critic(state, actor(state)).mean()


def raw() -> list[Tensor]:
    """The loop on torch alone, over the batches of all ranks."""
    actor, critic = networks()
    of_actor, of_critic = adam(actor.parameters()), adam(critic.parameters())
    for _ in range(EPOCHS):
        for state, action, earned in DataLoader(data(), batch_size=BATCH):
            of_critic.zero_grad()
            critic_loss(critic, state, action, earned).backward()
            of_critic.step()
            of_actor.zero_grad()
            actor_loss(actor, critic, state).backward()
            of_actor.step()
    return [*actor.parameters(), *critic.parameters()]


def main() -> None:
    with fx.detect() as ctx:
        plan = fx.Plan(batch="global")
        actor, critic = (fx.wrap(net, ctx, plan, optimizer=adam) for net in networks())
        of_critic = fx.StepFns(model=critic, loss=lambda c, batch: critic_loss(c, *batch))
        of_actor = fx.StepFns(model=actor, loss=lambda a, batch: actor_loss(a, critic, batch[0]))
        for epoch in fx.shard(DataLoader(data(), batch_size=BATCH), ctx, plan).epochs(EPOCHS):
            for batch in epoch:
                fx.step(ctx, batch, of_critic)
                fx.step(ctx, batch, of_actor)
        ours = [*actor.parameters(), *critic.parameters()]
        pairs = zip(ours, raw(), strict=True)
        with torch.no_grad():
            apart = max((a - b).abs().max().item() for a, b in pairs)
            states = data().tensors[0].to(ctx.device)
            earned = reward(states, actor(states)).mean().item()
        told = {"ranks": ctx.world_size, "reward": earned, "apart": apart}
        ops.say(json.dumps(told), ctx)


if __name__ == "__main__":
    main()
