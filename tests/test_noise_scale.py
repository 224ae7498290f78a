"""The gradient noise scale against its value by definition."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
Y = X.sum(1, keepdim=True) + torch.tensor([[0.5], [-1], [2], [0], [1], [-2], [0.3]]).double()


def _gradients():
    """Of a linear model at zero, under half the squared error: -x·y for each row."""
    return -X * Y


def _analytic():
    rows = _gradients()
    mean = rows.mean(0)
    return ((rows - mean).square().sum(1).mean() / mean.square().sum()).item()


@pytest.mark.parametrize("sizes", [(1, 2), (1, 3), (2, 3)])
def test_expectations_of_a_linear_model_give_the_analytic_value(sizes):
    rows = _gradients()
    pairs = []
    for size in sizes:  # every batch that sampling with replacement may draw
        batches = torch.tensor(list(itertools.product(range(len(rows)), repeat=size)))
        squares = rows[batches].mean(1).square().sum(1)
        pairs.append((math.sqrt(squares.mean()), size))
    scale = fx.tuning.NoiseScale(decay=0.0).update(*pairs)
    assert scale.value == pytest.approx(_analytic(), rel=1e-9)
    for _ in range(3):  # moving averages of equal values change nothing
        scale = attrs_with_decay(scale, 0.9).update(*pairs)
    assert scale.value == pytest.approx(_analytic(), rel=1e-9)


def attrs_with_decay(scale, decay):
    return fx.tuning.NoiseScale(decay=decay, noise=scale.noise, signal=scale.signal)


def test_random_gradients_of_known_trace_and_mean_are_measured():
    """Means of b rows are drawn directly: their covariance is that of rows, divided by b."""
    generator = torch.Generator().manual_seed(4)
    mean, deviations = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0, 1.0, 2.0])
    scale = fx.tuning.NoiseScale(decay=0.999)
    for small, large in [(4, 64), (8, 128)] * 1500:

        def norm(rows):
            noise = torch.randn(3, generator=generator) * deviations / math.sqrt(rows)
            return (mean + noise).norm()

        scale = scale.update((norm(small), small), (norm(large), large))
    wanted = deviations.square().sum() / mean.square().sum()
    assert scale.value == pytest.approx(wanted.item(), rel=0.1)


def test_a_loop_measures_it():
    """Micro-batches of single rows at fixed parameters, as docs/meters.md does."""
    accumulate = 7
    with fx.detect(env={}, device="cpu") as ctx:
        net = nn.Linear(3, 1, bias=False).double()
        nn.init.zeros_(net.weight)
        plan = fx.Plan(accumulate=accumulate, clip_norm=1e12)
        model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        loader = fx.shard(DataLoader(TensorDataset(X, Y), shuffle=True), ctx, plan)
        fns = fx.StepFns(model=model, loss=lambda m, b: 0.5 * (m(b[0]) - b[1]).square().mean())
        scale, squares = fx.tuning.NoiseScale(decay=0.0), []
        large = None
        for epoch in loader.epochs(7 * 8):
            for batch in epoch:
                report = fx.step(ctx, batch, fns)
                if report.position.micro == 1:
                    grads = [one.grad for one in model.parameters() if one.grad is not None]
                    small = accumulate * nn.utils.get_total_norm(grads)
                    squares.append(small.item() ** 2)
                if report.applied:
                    large = report.grad_norm
                    scale = scale.update((small, 1), (large, accumulate))
        assert large == pytest.approx(_gradients().mean(0).norm().item())
        assert scale.updates == 56
    # The first rows of epochs are draws of single rows.
    singles = {round(one, 6) for one in _gradients().square().sum(1).tolist()}
    assert {round(one, 6) for one in squares} == singles


def test_values_without_an_estimate():
    scale = fx.tuning.NoiseScale()
    assert scale.value is None
    assert scale.update((float("inf"), 1), (1.0, 2)) == scale
    assert scale.update((1e200, 1), (1.0, 2)) == scale  # its square is no float
    assert fx.tuning.NoiseScale(decay=0.0).update((10.0, 1), (1.0, 2)).value is None
    assert fx.tuning.NoiseScale(decay=0.0).update((1.0, 1), (1.0, 4)).value == 0.0


@pytest.mark.parametrize("how", [((1.0, 2), (1.0, 2)), ((1.0, 0), (1.0, 2))])
def test_wrong_arguments_are_named(how):
    with pytest.raises(fx.PlanError, match="NoiseScale"):
        fx.tuning.NoiseScale().update(*how)
