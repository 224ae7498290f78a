"""Quantised weights that FSDP splits over ranks: they compute and train as replicas do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxtrain as fx
from fxtrain.precision import stored_tensors
from fxtrain.testing import Transformer
from tests.precision._records import RECORDS, marked

SPLIT = marked(["bnb8", "nf4", "fp4"])
TOKENS = torch.arange(32).view(4, 8) % 24


def _net(seed=0, **options):
    net = Transformer(seed=seed, dtype=torch.float32, width=32, **options).requires_grad_(False)
    net.position.requires_grad_(True)
    return net


def _plan(strategy, name):
    return fx.Plan(strategy=strategy, quantize=RECORDS[name])


def _wrapped(ctx, plan, seed=0, net=None):
    net = _net(seed) if net is None else net
    return fx.wrap(net, ctx, plan, optimizer=lambda some: torch.optim.SGD(some, lr=0.5))


def _train(ctx, model, count=3):
    def loss(model, batch):
        return F.cross_entropy(model(batch.data).flatten(0, 1), batch.data.flatten())

    fns = fx.StepFns(model=model, loss=loss)
    rows = TOKENS.repeat(count, 1)
    some = fx.shard(torch.utils.data.DataLoader(rows, batch_size=2), ctx, model.plan)
    return [fx.step(ctx, batch, fns).loss.item() for batch in some]


def _bytes(tensors):
    return {name: one.detach().clone().reshape(-1).view(torch.uint8) for name, one in tensors}


def _run(ctx, strategy, name, folder):
    """What a model with other values on each rank computes, holds, saves and gives back."""
    plan = _plan(strategy, name)
    model = _wrapped(ctx, plan, seed=ctx.rank)
    held = sum(
        one.to_local().nbytes if hasattr(one, "to_local") else one.nbytes
        for one in (part.weight for _, part in model.module.named_modules() if _packs(part))
    )
    with torch.no_grad():
        before = model(TOKENS)
    losses = _train(ctx, model)
    fx.save(f"{folder}/run", ctx, model)
    other = _wrapped(ctx, plan, seed=5)
    fx.restore(f"{folder}/run", ctx, other)
    same = _train(ctx, other) == _train(ctx, model)
    fx.export(model, f"{folder}/export")
    after = _bytes(fx.weights(model))
    with torch.no_grad():
        wanted = model(TOKENS)
        module = fx.unwrap(model)
        equal = torch.equal(module(TOKENS), wanted)
    kinds = sorted({type(part.weight).__name__ for part in module.modules() if _packs(part)})
    return before, losses, after, same and equal, held, kinds, _bytes(stored_tensors(module).items())


def _packs(part):
    return isinstance(part, nn.Linear) and not part.weight.is_floating_point()


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("mode", ["full", "grads_and_optimizer"])
def test_shards_compute_and_train_as_replicas_do(pair, name, mode, tmp_path):
    wanted = pair.run(_run, fx.DDP(), name, str(tmp_path / "ddp"))
    found = pair.run(_run, fx.FSDP(mode=mode), name, str(tmp_path / "fsdp"))
    for mine, reference in zip(found, wanted, strict=True):
        before, losses, after, same, held, kinds, module = mine
        assert torch.equal(before, reference[0])
        assert losses == pytest.approx(reference[1], rel=1e-5) and losses[-1] < losses[0]
        assert same and kinds == reference[5]
        assert held == reference[4] / 2
        for key, value in reference[2].items():
            assert key == "position" or torch.equal(after[key], value), key
        assert all(torch.equal(value, after[key]) for key, value in module.items())
    fresh = _net(7)
    fx.load_model(tmp_path / "fsdp" / "export", fresh)
    read = _bytes(stored_tensors(fresh).items())
    assert all(torch.equal(read[key], value) for key, value in found[0][6].items())
    with fx.detect(env={}, device="cpu") as ctx:  # one rank, from the checkpoint of two
        alone = _wrapped(ctx, _plan(fx.Single(), name), seed=3)
        fx.restore(tmp_path / "fsdp" / "run", ctx, alone)
