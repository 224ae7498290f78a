"""Saved under one strategy, mesh and number of ranks, restored under another."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import fxtrain as fx
from fxtrain.checkpoint import reading
from fxtrain.checkpoint.storage import LocalStorage
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after

SPLIT = fx.TP(
    styles=(
        fx.Style(modules="blocks.*.attention.[qkv]", style="colwise"),
        fx.Style(modules="blocks.*.attention.o", style="rowwise"),
        fx.Style(modules="blocks.*.up", style="colwise"),
        fx.Style(modules="blocks.*.down", style="rowwise"),
    )
)
PLACES = {
    "ddp": (fx.DDP(), None),
    "zero1": (fx.DDP(shard_optimizer=True), None),
    "fsdp": (fx.FSDP(wrap=("Block",)), None),
    "zero2": (fx.FSDP(wrap=("Block",), mode="grads_and_optimizer"), None),
    "hybrid": (fx.FSDP(wrap=("Block",), shard=2), None),
    "tensor": (fx.FSDP(tensor=SPLIT), fx.Mesh(tensor=2)),
    "context": (fx.FSDP(wrap=("Block",)), fx.Mesh(shard=2, context=2)),
    "replicas": (fx.DDP(), fx.Mesh(context=2)),
    "both": (fx.FSDP(wrap=("Block",), tensor=SPLIT), fx.Mesh(shard=2, tensor=2)),
}


def _model(ctx, name):
    strategy, _ = PLACES[name]
    context = fx.CP() if ctx.mesh.context > 1 else None
    torch.manual_seed(1)
    return fx.wrap(
        Transformer(),
        ctx,
        fx.Plan(strategy=strategy, clip_norm=1.0, context=context),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    )


def _whole(model):
    state = model.strategy.state(model)
    return {
        str(key): (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for key, t in state.tensors.items()
    }


def _train(ctx, model, steps):
    generator = torch.Generator().manual_seed(ctx.axis("data").rank)
    for _ in range(steps):
        tokens = torch.randint(0, 8, (2, 6), generator=generator)
        with fx.ops.sync(model):
            fx.ops.backward(model(tokens).square().mean(), model)
        fx.ops.apply(model)


def _save(ctx, folder, name):
    with on_mesh(ctx, PLACES[name][1]) as placed:
        model = _model(placed, name)
        _train(placed, model, 2)
        fx.save(folder, placed, model, position=fx.Position(updates=2))
        return _whole(model)


def _restore(ctx, folder, name):
    with on_mesh(ctx, PLACES[name][1]) as placed:
        model = _model(placed, name)
        _train(placed, model, 1)
        fx.restore(folder, placed, model)
        found = _whole(model)
        _train(placed, model, 1)  # and it trains on
        return found


# One pair for each kind of layout: property_tests/test_open_windows.py draws pairs of them all.
@pytest.mark.parametrize(
    ("first", "then"),
    slow_after(
        1,
        [
            ((2, "ddp"), (2, "fsdp")),
            ((2, "fsdp"), (2, "ddp")),
            ((4, "hybrid"), (2, "zero2")),
            ((2, "tensor"), (1, "ddp")),
            ((2, "ddp"), (4, "both")),
            ((4, "context"), (2, "replicas")),
            ((2, "zero1"), (4, "zero1")),
            ((2, "zero1"), (2, "ddp")),
            ((2, "fsdp"), (2, "zero1")),
        ],
    ),
)
def test_another_strategy_and_number_of_ranks(clusters, first, then, tmp_path):
    saved = clusters[first[0]].run(_save, str(tmp_path), first[1])
    wanted = {name: tensor for found in saved for name, tensor in found.items()}
    assert any(name.endswith("exp_avg") for name in wanted)
    answers = clusters[then[0]].run(_restore, str(tmp_path), then[1])
    assert {name for found in answers for name in found} == wanted.keys()
    for found in answers:
        assert then[1] == "zero1" or found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(wanted[name], tensor), name


def _restore_one_file_at_a_time(ctx, folder, name):
    """The weights, and the most data files that were open at the same time."""
    open_now, most = 0, 0
    original = LocalStorage.open

    @contextmanager
    def counted(self, file):
        nonlocal open_now, most
        open_now, most = open_now + 1, max(most, open_now + 1)
        with original(self, file) as read:
            yield read
        open_now -= 1

    with (
        mock.patch.object(reading, "_MAX_OPEN", 1),
        mock.patch.object(LocalStorage, "open", counted),
    ):
        return _restore(ctx, folder, name), most, open_now


@pytest.mark.slow
def test_a_checkpoint_may_have_more_files_than_a_process_may_open(pair, clusters, tmp_path):
    saved = pair.run(_save, str(tmp_path), "fsdp")
    ((found, most, left),) = clusters[1].run(_restore_one_file_at_a_time, str(tmp_path), "ddp")
    assert all(torch.equal(saved[0][name], tensor) for name, tensor in found.items())
    assert most == 1 and left == 0


class Unusual(torch.optim.Optimizer):
    """Keeps states in lists, under a key that is no parameter, and in an attribute."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        total = self.state.setdefault("total", {"steps": 0, "scale": torch.ones(1)})
        total["steps"] += 1
        total["scale"] *= 0.5
        for group in self.param_groups:
            for parameter in group["params"]:
                history = self.state[parameter].setdefault("history", [])
                history.append(parameter.grad.clone())
                rate = group["lr"] / self.steps + float(total["scale"]) / total["steps"]
                parameter.sub_(sum(history) * rate)

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "steps"})
        self.steps = state_dict["steps"]


def _continued(ctx, folder, places):
    """The state after three updates, and after the last of them again in another model."""
    models = []
    for name in places:
        torch.manual_seed(1)
        plan = fx.Plan(strategy=PLACES[name][0])
        models.append(fx.wrap(Transformer(), ctx, plan, optimizer=Unusual))
    _train(ctx, models[0], 2)
    fx.save(folder, ctx, models[0], position=fx.Position(updates=2))
    _train(ctx, models[1], 1)  # its states are replaced
    fx.restore(folder, ctx, models[1])
    for model in models:
        _train(ctx, model, 1)
    return [(_whole(model), model.optimizer.steps) for model in models]


@pytest.mark.parametrize(
    "places", slow_after(1, map(pytest.param, [("ddp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp")]))
)
def test_whatever_an_optimizer_keeps_is_restored(pair, places, tmp_path):
    for (wanted, _), (found, steps) in pair.run(_continued, str(tmp_path), places):
        assert steps == 3
        for name, tensor in wanted.items():
            close = torch.equal if len({*places}) == 1 else torch.allclose
            assert close(tensor, found[name]), name


def _refused(ctx, folder):
    model = fx.wrap(Transformer(), ctx, fx.Plan(strategy=PLACES["zero1"][0]), optimizer=Unusual)
    _train(ctx, model, 1)
    with raises_code("FX600", "optimizer.0.", ".history: ", "Tensor"):
        fx.save(folder, ctx, model, position=fx.Position(updates=1))


def test_states_in_lists_are_refused_where_ranks_have_states_of_their_own(pair, tmp_path):
    pair.run(_refused, str(tmp_path))
