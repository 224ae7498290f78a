"""Experts spread over ranks: any routes give the update of one process on the whole batch."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from tests.cluster._models import Experts

ON_RANKS = settings(
    max_examples=4, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
WIDTH = 4


class Block(nn.Module):
    def __init__(self, count, chosen, skew):
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(WIDTH, count)
        self.experts = Experts(torch.randn(count, WIDTH, WIDTH), torch.randn(count, WIDTH))
        with torch.no_grad():
            self.gate.bias.copy_(torch.linspace(0, skew, count))

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, index = self.gate(tokens).softmax(-1).topk(self.chosen)
        return x + self.experts(tokens, index, weights).view_as(x)


def _net(count, chosen, skew):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(count, chosen, skew) for _ in range(2))).double()


def _batches():
    return torch.randn(
        3, 8, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def _train(ctx, shape, plan):
    model = fx.wrap(_net(*shape), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    held = 8 // ctx.world_size
    for rows in _batches():
        mine = rows[ctx.rank * held : (ctx.rank + 1) * held]
        for part in mine.chunk(plan.accumulate):
            batch = fx.batch(part, ctx, plan)
            fx.update(ctx, batch, model, model(part).square().mean())
    here = {
        name: p.to_local().shape[0] for name, p in model.named_parameters() if "experts" in name
    }
    return {name: value.clone() for name, value in fx.weights(model)}, here


@ON_RANKS
@given(data=st.data())
def test_any_routes_equal_one_process(cluster, data):
    count = data.draw(st.sampled_from([4, 8]), label="experts")
    chosen = data.draw(st.integers(1, 3), label="experts of a token")
    skew = data.draw(st.sampled_from([0.0, 4.0, 1000.0]), label="how much the last ones attract")
    spread = data.draw(st.sampled_from([n for n in (2, 4) if n <= cluster.n] or [None]))
    accumulate = data.draw(st.sampled_from([1, 2]), label="accumulate")
    sync_each = data.draw(st.booleans(), label="sync_each")
    net = _net(count, chosen, skew)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in _batches():
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    plan = fx.Plan(
        strategy=fx.FSDP(expert=spread), accumulate=accumulate, clip_norm=0.5, sync_each=sync_each
    )
    if cluster.n == 1:
        return
    for weights, here in cluster.run(_train, (count, chosen, skew), plan):
        for name, wanted in net.named_parameters():
            torch.testing.assert_close(weights[name], wanted, rtol=1e-9, atol=1e-12)
        assert max(here.values()) <= count // spread
