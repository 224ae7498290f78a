"""Averaging fragments during training equals a simulation in one process."""

import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.backends.local_sgd.rounds import BLOCK, dequantize, quantize
from property_tests.test_local import _inner, _loss, _net, _rows

EPOCHS = 2


def _train(ctx, n, size, plan):
    """Parameters after every update."""
    model = fx.wrap(_net(), ctx, plan, optimizer=_inner)
    loader = fx.shard(DataLoader(TensorDataset(*_rows(n)), batch_size=size), ctx, plan)

    def loss(model, batch):
        total, weight = _loss(model, *batch, weighted=False)
        return total / weight

    fns = fx.StepFns(model=model, loss=loss)
    seen = []
    for epoch in loader.epochs(EPOCHS):
        for batch in epoch:
            fx.step(ctx, batch, fns)
            seen.append([p.detach().clone() for p in model.parameters()])
    return seen


class _ByHand:
    """One net per rank, and what each has sent, in one process."""

    def __init__(self, ranks, local):
        self.local = local
        self.nets = [_net() for _ in range(ranks)]
        self.inner = [_inner(net.parameters()) for net in self.nets]
        self.anchor = [p.detach().clone() for p in self.nets[0].parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.anchor]
        self.residual = [[torch.zeros_like(p) for p in self.anchor] for _ in range(ranks)]
        # The first matrix has 12 of 21 numbers, so its middle lies in the first half.
        sizes = [p.numel() for p in self.anchor]
        middles = [sum(sizes[:place]) + size / 2 for place, size in enumerate(sizes)]
        self.places = [
            [place for place, m in enumerate(middles) if int(local.fragments * m / sum(sizes)) == f]
            for f in range(local.fragments)
        ]
        self.weights = [[0.0] * ranks for _ in self.places]
        self.under_way = {}  # by fragment: (update at which it is due, means by place)

    def update(self, rows):
        for rank, (net, optimizer) in enumerate(zip(self.nets, self.inner, strict=True)):
            if len(rows[rank][0]):
                total, weight = _loss(net, *rows[rank], weighted=False)
                (total / weight).backward()
                optimizer.step()
                optimizer.zero_grad()
                for weights in self.weights:
                    weights[rank] += float(weight)

    @torch.no_grad()
    def send(self, fragment, due):
        places, weights = self.places[fragment], self.weights[fragment]
        total = torch.zeros(sum(self.anchor[place].numel() for place in places)).double()
        for rank, net in enumerate(self.nets):
            held = list(net.parameters())
            moved = [held[p] - self.anchor[p] + self.residual[rank][p] for p in places]
            flat = torch.cat([m.flatten() for m in moved]) if moved else total
            if self.local.compress == "int8" and len(flat):
                scale = (flat.abs().max() / 127).float().double()
                sent = (flat / scale).round() * scale if scale else flat
                lost = (flat - sent).split([self.anchor[p].numel() for p in places])
                for place, part in zip(places, lost, strict=True):
                    self.residual[rank][place] = part.view_as(self.anchor[place])
                flat = sent
            total += flat * (weights[rank] / sum(weights) if sum(weights) else 1 / len(self.nets))
        means = total.split([self.anchor[place].numel() for place in places])
        self.under_way[fragment] = due, dict(zip(places, means, strict=True))
        self.weights[fragment] = [0.0] * len(self.nets)

    @torch.no_grad()
    def take(self, fragment):
        local = self.local
        _, means = self.under_way.pop(fragment)
        for place, mean in means.items():
            moved = mean.view_as(self.anchor[place])
            self.momentum[place] = self.momentum[place] * local.outer_momentum + moved
            step = moved + local.outer_momentum * self.momentum[place]
            self.anchor[place] += local.outer_lr * (
                step if local.nesterov else self.momentum[place]
            )
            for net in self.nets:
                list(net.parameters())[place].copy_(self.anchor[place])

    def exchange(self, updates, *, last):
        due = [f for f, (when, _) in self.under_way.items() if last or when <= updates]
        for fragment in due:
            self.take(fragment)
        every, count = self.local.every, self.local.fragments
        if last:
            begin = [f for f in range(count) if f not in due]
        else:
            begin = [f for f in range(count) if updates % every == (f + 1) * every // count % every]
        for fragment in begin:
            self.send(fragment, updates + self.local.delay)
            if last or not self.local.delay:
                self.take(fragment)
        return due if self.local.delay and not last else begin + due


def _by_hand(ranks, n, size, local):
    """Parameters of every rank after every update, and the places that are equal on all ranks."""
    run, table, seen, updates = _ByHand(ranks, local), _rows(n), [], 0
    for _ in range(EPOCHS):
        lows = range(0, n, ranks * size)
        for low in lows:
            run.update(
                [
                    [c[low + r * size : min(low + (r + 1) * size, n)] for c in table]
                    for r in range(ranks)
                ]
            )
            updates += 1
            taken = run.exchange(updates, last=low == lows[-1])
            equal = [place for fragment in taken for place in run.places[fragment]]
            values = [[p.detach().clone() for p in net.parameters()] for net in run.nets]
            seen.append((values, equal))
    return seen


LOCALS = st.integers(1, 5).flatmap(
    lambda every: st.builds(
        fx.DiLoCo,
        every=st.just(every),
        fragments=st.integers(1, min(every, 3)),
        delay=st.integers(0, every - 1),
        compress=st.sampled_from(["none", "int8"]),
        outer_lr=st.sampled_from([0.7, 1.0]),
        outer_momentum=st.sampled_from([0.0, 0.9]),
        nesterov=st.booleans(),
    )
)


@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(n=st.integers(8, 60), size=st.integers(1, 3), local=LOCALS)
@example(n=48, size=2, local=fx.DiLoCo(every=4, fragments=2, delay=3, compress="int8"))
@example(n=33, size=2, local=fx.DiLoCo(every=3, fragments=3, delay=1))
@example(n=40, size=2, local=fx.DiLoCo(every=2, fragments=1, delay=1, compress="int8"))
def test_fragments_are_averaged_as_by_hand(pair, n, size, local):
    """Equal on all ranks after each fragment that is applied, and as one process computes it."""
    wanted = _by_hand(pair.n, n, size, local)
    answers = pair.run(_train, n, size, fx.Plan(local=local, even="uneven"))
    assert all(len(seen) == len(wanted) for seen in answers)
    for number, (values, equal) in enumerate(wanted):
        for rank, seen in enumerate(answers):
            for place, theirs in enumerate(values[rank]):
                torch.testing.assert_close(seen[number][place], theirs, rtol=1e-7, atol=1e-9)
        for place in equal:
            assert torch.equal(answers[0][number][place], answers[1][number][place])


@given(
    count=st.integers(1, 3 * BLOCK),
    sends=st.integers(1, 6),
    scale=st.sampled_from([1e-8, 1.0, 1e6]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_what_was_sent_and_the_residual_are_the_sum(count, sends, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(sends, count, generator=generator, dtype=torch.float64) * scale
    residual, sent = torch.zeros(count, dtype=torch.float64), torch.zeros(count).double()
    for values in exact:
        due = values + residual
        arrived = dequantize(quantize(due), count, torch.float64)
        residual = due - arrived
        sent += arrived
        # Half a step of the block's scale is the most that one send loses.
        assert residual.abs().max() <= due.abs().max() / 127 * 0.5000001
    torch.testing.assert_close(sent + residual, exact.sum(0), rtol=1e-12, atol=1e-12 * scale)
