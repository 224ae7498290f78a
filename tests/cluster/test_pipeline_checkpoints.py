"""Pipelines: saved at one mesh, and restored at another."""

import pytest
import torch

import fxtrain as fx
from fxtrain.testing import (
    Transformer,
)
from fxtrain.testing.training import backward_once
from tests.cluster._models import DOWN, PIPELINES, UP
from tests.cluster._pipelines import FOUR, SHARDS, SPLITS, held

pytestmark = [PIPELINES, pytest.mark.slow]

PLACES = {
    "ddp": (fx.DDP(), None),
    "fsdp": (fx.FSDP(), None),
    "pp": (fx.PP(), fx.Mesh(pipeline=2)),
    "loop": (
        fx.PP(schedule="interleaved_1f1b", microbatches=2, split=FOUR),
        fx.Mesh(pipeline=2),
    ),
    "four": (fx.PP(schedule="gpipe", split=FOUR), fx.Mesh(pipeline=4)),
    "shards": (held(), SHARDS),
    "parts": (held(tensor=fx.TP(styles=(UP, DOWN))), SPLITS),
}


def _saved(ctx, folder, name, first):
    """Train, save or restore, train on; every tensor that the next update depends on."""
    config, mesh = PLACES[name]
    placed = ctx if mesh is None else fx.detect({}, device="cpu", mesh=mesh, timeout_s=20)
    model = fx.wrap(Transformer(), placed, fx.Plan(strategy=config), optimizer=torch.optim.AdamW)
    backward_once(placed, model)
    fx.ops.apply(model)
    if first:
        fx.save(folder, placed, model, position=fx.Position(updates=1))
    else:
        backward_once(placed, model)
        fx.ops.apply(model)
        fx.restore(folder, placed, model)
    state = model.strategy.state(model)
    found = {
        str(key): (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for key, one in state.tensors.items()
    }
    if not first:
        backward_once(placed, model)
        fx.ops.apply(model)
    return found, state.values["optimizers"]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, "pp"), (1, "ddp")),
        ((1, "ddp"), (2, "loop")),
        ((2, "loop"), (4, "four")),
        ((4, "four"), (2, "fsdp")),
        ((2, "fsdp"), (4, "shards")),
        ((4, "shards"), (4, "parts")),
        ((4, "parts"), (1, "ddp")),
    ],
)
def test_saved_at_one_mesh_and_restored_at_another(clusters, first, then, tmp_path):
    saved = clusters[first[0]].run(_saved, str(tmp_path), first[1], True)
    wanted = {key: one for found, _ in saved for key, one in found.items()}
    assert "module.blocks.1.up.bias" in wanted and "optimizer.0.embed.weight.exp_avg" in wanted
    restored = clusters[then[0]].run(_saved, str(tmp_path), then[1], False)
    together = {key: one for found, _ in restored for key, one in found.items()}
    assert together.keys() == wanted.keys()
    for found, values in restored:
        assert values == saved[0][1]
        for key, one in found.items():
            assert torch.equal(one, wanted[key]), key
