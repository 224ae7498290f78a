"""Averages of weights and the learning-rate finder on a device that is not the CPU."""

import pytest
import torch

import fxtrain as fx
from tests.devices._training import net, parts

pytestmark = pytest.mark.timeout(120)


def _averaged(ctx, folder, strategy):
    plan = fx.Plan(strategy=strategy)
    loader, fns = parts(ctx, plan)
    torch.manual_seed(0)
    before = {name: value.tolist() for name, value in fx.weights(fns.model, device="cpu")}
    curve = fx.tuning.find_lr(ctx, fns, loader, start=1e-5, stop=1.0, updates=5)
    after = {name: value.tolist() for name, value in fx.weights(fns.model, device="cpu")}
    average, wanted = fx.ema(fns.model, decay=0.5), None
    for batch in loader:
        average.update(fx.step(ctx, batch, fns))
        now = dict(fx.weights(fns.model, device="cpu"))
        wanted = now if wanted is None else {n: wanted[n].lerp(now[n], 0.5) for n in now}
    fx.save(folder, ctx, fns.model, position=fx.Position(), extra={"ema": average.state})
    _, again = parts(ctx, plan, module=net())
    restored = fx.ema(again.model)
    fx.restore(folder, ctx, again.model, extra={"ema": restored.state})
    with restored.applied() as model:
        for name, value in fx.weights(model, device="cpu"):
            torch.testing.assert_close(value, wanted[name])
    assert restored.updates == average.updates > 1
    return before == after, curve


@pytest.mark.parametrize("strategy", [fx.DDP(), fx.FSDP(min_params=1)])
def test_they_are_those_of_the_weights(two, tmp_path, strategy):
    found = two.run(_averaged, str(tmp_path), strategy)
    assert found[0] == found[1]
    same, curve = found[0]
    assert same and len(curve.losses) == 5
