"""What cannot be saved or restored, and which ranks raise."""

import errno
import os
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.checkpoint import saving
from tests._errors import raises_code
from tests.checkpoint import _runs


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"a": [1, object()]}, r"extra\.a\.1 is a builtins\.object"),
        ({"fn": len}, r"extra\.fn is a builtins\.builtin_function_or_method"),
        (torch.eye(2).to_sparse(), "extra is a torch.sparse_coo tensor"),
        (np.array(["text"]), "extra is a NumPy value of dtype"),
        (np.ones(2, np.longdouble), "extra is a NumPy value of dtype"),
        (torch.empty(2, device="meta"), "extra is on the meta device"),
        (nn.Linear, "extra is a builtins.type"),
        ({"files": ["a\udcff.txt"]}, r"extra\.files\.0 is 'a\\udcff\.txt', which UTF-8 cannot"),
        ({"a\udcff": 1}, r"extra, a key is 'a\\udcff'"),
    ],
)
def test_what_cannot_be_saved_is_named(extra, message, tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(2, 2), ctx)
        with pytest.raises(fx.CheckpointError, match=message):
            fx.save(tmp_path, ctx, model, extra=extra)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_named(tmp_path):
    extra = {"n": [torch.nested.nested_tensor([torch.ones(2)])]}
    test_what_cannot_be_saved_is_named(extra, r"extra\.n\.0 is a nested tensor", tmp_path)


def test_a_manifest_that_could_not_be_read_is_not_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LARGEST", 10_000)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(2, 2), ctx)
        fx.save(tmp_path, ctx, model)
        with raises_code("FX600", "extra"):
            fx.save(tmp_path, ctx, model, extra=b"x" * 10_000)
    assert os.listdir(tmp_path) == ["update-0000000000"]


def _saved_without_a_position(ctx, folder, accumulate):
    plan = fx.Plan(accumulate=accumulate)
    model = fx.wrap(nn.Linear(2, 1), ctx, plan, optimizer=torch.optim.SGD)
    fx.save(folder, ctx, model)  # nothing to continue
    batch = next(iter(fx.shard(DataLoader(torch.ones(8, 2), batch_size=2), ctx)))
    fx.step(ctx, batch, fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean()))
    with pytest.raises(fx.CheckpointError) as caught:
        fx.save(folder, ctx, model)
    fx.save(folder, ctx, model, position=batch.position)
    return str(caught.value)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trained_model_is_saved_with_a_position(pair, accumulate, tmp_path):
    told = pair.run(_saved_without_a_position, str(tmp_path), accumulate)
    assert told[0] == told[1]
    assert "save(position=...) is missing" in told[0] and "Pass position=report.position" in told[0]
    assert len(os.listdir(tmp_path)) >= 2


def test_a_value_that_holds_itself(tmp_path):
    loop = []
    loop.append(loop)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(2, 2), ctx)
        with raises_code("FX600", "nested"):
            fx.save(tmp_path, ctx, model, extra=loop)


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_every": 2.0}, r"keep_every=2\.0"),
        ({"keep_best": 1}, "pass metric="),
        ({"metric": float("nan"), "keep_best": 1}, "finite number"),
        ({"best": "most"}, "'min' or 'max'"),
        ({"busy": "maybe"}, "'wait' or 'skip'"),
        ({"position": 3}, "takes a Position"),
        ({"position": fx.Position(updates=-1)}, "has updates=-1: its counts are integers"),
        ({"position": fx.Position(updates=10**18)}, "has updates=1000"),
        ({"position": fx.Position(index=np.int64(3), epoch=1.5)}, r"epoch=1\.5, index=.*int64"),
    ],
)
def test_wrong_arguments(keywords, message, tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(2, 2), ctx)
        with pytest.raises(fx.CheckpointError, match=message):
            fx.save(tmp_path, ctx, model, **keywords)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), {}, {"a/b": None}, None])
def test_wrong_models(model, tmp_path):
    with fx.detect(env={}, device="cpu") as ctx, pytest.raises(fx.CheckpointError):
        fx.save(tmp_path, ctx, model)


def _one_rank_fails(ctx, folder, where):
    model = fx.wrap(nn.Linear(2, 2), ctx)
    fx.save(folder, ctx, model, position=fx.Position(updates=1))
    extra = object() if where == "values" and ctx.rank == 1 else None
    full = OSError(errno.ENOSPC, "No space left on device")
    fails = where == "file" and ctx.rank == 1
    position = fx.Position(updates=2 + ctx.rank) if where == "position" else fx.Position(updates=2)
    try:
        patch = mock.patch.object(saving, "write_chunks", side_effect=full)
        with patch if fails else nullcontext():
            metric = 0.5 if where != "metric" or ctx.rank else None
            fx.save(folder, ctx, model, position=position, extra=extra, metric=metric)
    except fx.CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "where, word",
    [
        ("values", "rank 1: CheckpointError: extra is"),
        ("file", "rank 1: OSError: [Errno 28]"),
        ("position", "different values of position"),
        ("metric", "different values of metric"),
    ],
)
def test_a_rank_that_fails_is_heard_on_all(pair, where, word, tmp_path):
    told = pair.run(_one_rank_fails, str(tmp_path), where)
    assert all(text and word in text for text in told)
    assert fx.latest(tmp_path) == str(tmp_path / "update-0000000001")
    fx.checkpoint.verify(tmp_path)
    left = [name for name in os.listdir(tmp_path) if name not in ("blocked", "update-0000000001")]
    assert left == []


def _wrong_model(ctx, folder, change):
    model = _runs.start(ctx, "plain", fx.Plan())[0]
    fx.save(folder, ctx, model)
    net = _runs.net()
    if change == "shape":
        net[4] = nn.Linear(8, 3)
    if change == "names":
        net.append(nn.Linear(2, 2))
    if change == "dtype":
        net.double()
    if change == "frozen":
        net[0].weight.requires_grad_(False)

    def optimizer(params):
        given = {"order": params[::-1], "groups": [{"params": params[:1]}, {"params": params[1:]}]}
        kind = torch.optim.SGD if change == "kind" else torch.optim.AdamW
        return kind(given.get(change, params), lr=0.1)

    other = fx.wrap(net, ctx, optimizer=optimizer)
    try:
        fx.restore(folder, ctx, other)
    except fx.CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "change, message",
    [
        ("shape", "4.weight is torch.float32 [2, 8] in the checkpoint, but torch.float32 [3, 8]"),
        ("names", "5.weight is not in the checkpoint"),
        ("dtype", "torch.float64"),
        ("kind", "is SGD here, and was saved as AdamW"),
        (
            "order",
            "AdamW with other parameters:\n  The groups have the same parameters, in another",
        ),
        ("frozen", "AdamW with other parameters:\n  0.weight is only in the saved one\nBuild"),
        ("groups", "with other parameters:\n  0.bias is in group 1, and was in group 0\n"),
    ],
)
def test_another_model_is_told_apart(pair, change, message, tmp_path):
    told = pair.run(_wrong_model, str(tmp_path), change)
    assert told[0] == told[1]
    assert message in told[0]


def _saved_with(ctx, folder, by_rank):
    """What `save` says where each rank passes arguments of its own, and what is there then."""
    model = fx.wrap(nn.Linear(2, 2), ctx)
    mine = dict(by_rank[ctx.rank])
    path = os.path.join(folder, mine.pop("path", "run"))
    try:
        fx.save(path, ctx, model, **mine).result()
    except fx.CheckpointError as error:
        found = str(error)
    else:
        found = "no error"
    fx.ops.barrier(ctx)
    return found, os.listdir(folder)


@pytest.mark.parametrize(
    "first, second, words",
    [
        ({"path": "a"}, {"path": "b"}, ["rank 0: path='", "/a'", "rank 1: path='", "/b'", "share"]),
        ({}, {"background": True}, ["rank 0: background=False", "rank 1: background=True"]),
        ({"keep_last": 1}, {"keep_last": 2}, ["rank 0: keep_last=1", "rank 1: keep_last=2"]),
        ({}, {"keep_last": 0}, ["rank 1: CheckpointError: save(keep_last=0)"]),
        ({"keep_last": 0}, {"keep_last": 0}, ["ranks 0-1: CheckpointError: save(keep_last=0)"]),
        ({"position": 3}, {}, ["rank 0: CheckpointError: save(position=...)"]),
        ({}, {"busy": "maybe"}, ["rank 1: CheckpointError: save(busy='maybe')"]),
        ({}, {"path": "nul\0"}, ["rank 1: CheckpointError", "NUL character"]),
    ],
)
def test_arguments_that_differ_between_ranks(pair, first, second, words, tmp_path):
    told = pair.run(_saved_with, str(tmp_path), [first, second])
    for text, there in told:
        assert [word for word in words if word not in text] == []
        assert not any(fx.latest(tmp_path / name) for name in there)
    assert told[0] == told[1]
