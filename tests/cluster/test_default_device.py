"""`torch.set_default_device` moves the tensors of a script, not those of the library."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import fxtrain as fx
from fxtrain import ops
from tests._slow import slow_after
from tests.cluster._frozen import data, net


@contextmanager
def _default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)
        # In torch 2.9, get_default_device fails from then on, and transformers calls it.
        vars(torch._GLOBAL_DEVICE_CONTEXT).clear()


def _sgd(params):
    # torch 2.9's Adam counts its steps on the default device.
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _loss(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return fx.Weighted(losses.sum(), len(losses))


def _train_and_communicate(ctx, options, default):
    """Values of a run whose tensors of the library would be without values on "meta"."""
    plan = fx.Plan(accumulate=2, clip_norm=1.0, nonfinite="skip", **options)
    module, batches = net(), list(fx.shard(data(), ctx, plan))  # torch's loader uses the default
    found = {}
    with _default_device(default):
        model = fx.wrap(module, ctx, plan, optimizer=_sgd)
        fns = fx.StepFns(model, _loss)
        reports = [fx.step(ctx, batch, fns) for batch in batches]
        x = batches[0][0]
        found["losses"] = [float(report.loss) for report in reports]
        found["weights"] = [float(one.sum()) for _, one in fx.weights(model)]
        found["reduced"] = ops.reduce({"tensor": x.sum(), "number": 2.0, "array": [1, 2]}, ctx)
        found["gathered"] = ops.gather(x, ctx)
        found["valid"] = ops.gather_valid(x, batches[0], ctx)
        found["objects"] = ops.gather_objects({"rank": ctx.rank}, ctx)
        found["sent"] = ops.broadcast(x, ctx)
        found["padded"] = ops.pad(x[: 1 + ctx.rank], ctx).data
        found["any"] = ops.any_rank(ctx.is_main, ctx)
        found["mapped"] = ops.map(float, [1, 2, 3], ctx)
    return found


def _saved_and_restored(ctx, default, folder):
    plan = fx.Plan()
    batches, nets = list(fx.shard(data(), ctx, plan)), (net(), net())
    with _default_device(default):
        model, other = (fx.wrap(one, ctx, plan, optimizer=_sgd) for one in nets)
        fns = fx.StepFns(model, _loss)
        reports = [fx.step(ctx, batch, fns) for batch in batches]
        fx.save(folder, ctx, model, position=reports[-1].position)
        fx.restore(folder, ctx, other)
        fx.export(model, f"{folder}/weights.safetensors")
        fx.load_model(f"{folder}/weights.safetensors", other)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return [torch.equal(one, two) for one, two in pairs]


@pytest.mark.parametrize(
    "strategy",
    slow_after(2, [fx.DDP(), fx.DDP(shard_optimizer=True), fx.FSDP()]),
    ids=["ddp", "zero1", "fsdp"],
)
def test_training_and_collectives_ignore_it(pair, strategy):
    usual, moved = (
        pair.run(_train_and_communicate, {"strategy": strategy}, device)
        for device in ("cpu", "meta")
    )
    torch.testing.assert_close(moved, usual, rtol=0, atol=0)


def test_checkpoints_and_model_files_ignore_it(pair, tmp_path):
    for equal in pair.run(_saved_and_restored, "meta", str(tmp_path)):
        assert all(equal)
