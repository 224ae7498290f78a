"""Models that train on batches of one loader, each on some of them and with its own windows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

EPOCHS, COLUMNS = 2, 2
STRATEGIES = (fx.DDP(), fx.FSDP(), fx.DDP(shard_optimizer=True))


def _table(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 1


def _net():
    net = nn.Linear(COLUMNS, 1, bias=False).double()
    nn.init.ones_(net.weight)
    return net


def _squares(model, batch):
    return (model(batch[0]) - batch[1]).square()


def _mean(model, batch):
    return _squares(model, batch).mean()


def _weighted(model, batch):
    each = _squares(model, batch)
    return fx.Weighted(each.sum(), each.numel())


def _sgd(params):
    return torch.optim.SGD(params, lr=0.05)


def _train(ctx, strategy, rows, size, loader_plan, models):
    """Of each model its reports, the cursor's updates and the weights in the end."""
    loader = fx.shard(DataLoader(TensorDataset(*_table(rows)), batch_size=size), ctx, loader_plan)
    fns = []
    for accumulate, flush, weighted, _ in models:
        plan = fx.Plan(strategy=strategy, accumulate=accumulate, flush=flush)
        model = fx.wrap(_net(), ctx, plan, optimizer=_sgd)
        fns.append(fx.StepFns(model=model, loss=_weighted if weighted else _mean))
    reports = [[] for _ in models]
    seen = 0
    for epoch in loader.epochs(EPOCHS):
        for batch in epoch:
            for number, (*_, takes) in enumerate(models):
                if takes[seen % len(takes)]:
                    report = fx.step(ctx, batch, fns[number])
                    reports[number].append((report.updates, report.applied))
            seen += 1
    return reports, batch.position.updates, [fx.unwrap(f.model).weight.detach() for f in fns]


def _by_hand(rows, size, model):
    """The same on torch alone: the mean over all rows of each window."""
    accumulate, flush, _, takes = model
    x, y = _table(rows)
    net = _net()
    optimizer = _sgd(net.parameters())
    reports, window, seen, updates = [], [], 0, 0
    for _ in range(EPOCHS):
        for start in range(0, rows, size):
            taken, seen = takes[seen % len(takes)], seen + 1
            if not taken:
                continue
            window.append(slice(start, start + size))
            due = len(window) == accumulate or (flush and start + size >= rows)
            if due:
                of_window = torch.cat([x[part] for part in window])
                targets = torch.cat([y[part] for part in window])
                optimizer.zero_grad()
                (net(of_window) - targets).square().mean().backward()
                optimizer.step()
                window, updates = [], updates + 1
            reports.append((updates, due))
    return reports, net.weight.detach()


@st.composite
def _models(draw):
    takes = draw(st.lists(st.booleans(), min_size=1, max_size=4).filter(any))
    return draw(st.integers(1, 4)), draw(st.booleans()), draw(st.booleans()), takes


@settings(max_examples=15)
@given(
    ranks=st.sampled_from([1, 2]),
    strategy=st.sampled_from(STRATEGIES),
    rows=st.integers(1, 17),
    size=st.integers(1, 3),
    loader=st.tuples(st.integers(1, 3), st.booleans()),
    models=st.lists(_models(), min_size=1, max_size=3),
)
def test_each_model_trains_on_its_own_windows(
    clusters, ranks, strategy, rows, size, loader, models
):
    accumulate, flush = loader
    plan = fx.Plan(even="uneven", accumulate=accumulate, flush=flush, strategy=strategy)
    got = clusters[ranks].run(_train, strategy, rows, size, plan, models)
    batches = -(-rows // (size * ranks))
    windows = -(-batches // accumulate) * EPOCHS if flush else batches * EPOCHS // accumulate
    for reports, updates, weights in got:
        assert updates == windows  # of the loader, whatever the models do
        for number, model in enumerate(models):
            wanted, weight = _by_hand(rows, size * ranks, model)
            assert reports[number] == wanted
            torch.testing.assert_close(weights[number], weight, rtol=1e-9, atol=1e-11)
