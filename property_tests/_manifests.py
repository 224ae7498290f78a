"""A checkpoint of a small model, and changes of its manifest."""

import copy
import json
import tracemalloc

import torch
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint.manifest import digest_of, load_manifest

HUGE = [2**31, 2**40, 2**62, 2**63 - 1, 2**63, 10**30, -1, -(2**63), 0, 1, 3]
WRONG = [None, True, False, "", "x", 0.5, 1e308, [], {}, [[]], {"$": "tuple", "items": [1]}]
WRONG += ["../../etc/passwd", "/etc/passwd", "rank-00000.safetensors", "a\0b", "..", "é" * 50]
WRONG += [{"$": kind} for kind in ("tensor", "eval", "", "dict", "numpy")]
WRONG += [{"$": "dtype", "value": name} for name in ("onnx", "load", "float32", 3, "_dynamo")]
WRONG += [{"$": "device", "value": name} for name in ("cuda:99", "cpu", -1, "x" * 99)]
WRONG += [{"$": "tensor", "name": name} for name in ("model/module.0.weight", "nowhere", 3, [])]
WRONG += [{"$": "dict", "items": items} for items in ([[[], 1]], [1], {"a": 1}, [[1, 2, 3]])]
WRONG += [{"$": "numpy", "name": "extra.a", "scalar": True}, {"$": "bytes", "value": "?"}]


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def small_model(ctx):
    model = fx.wrap(
        small_net(),
        ctx,
        fx.Plan(precision=fx.Precision(compute="fp16", scale=fx.LossScale(initial=4.0))),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.optimizers[0].step()
    return model


def save_small(ctx, folder):
    extra = {"a": torch.ones(3), "b": (1, 2.5, float("inf"), b"x"), "c": {1: {2, 3}}, "d": ctx.rank}
    return fx.save(folder, ctx, small_model(ctx), extra={**extra, "d": 0}).path


def framed(body):
    """The bytes of a manifest with a digest that is right."""
    return b'{"digest":"' + digest_of(body).encode() + b'","manifest":' + body + b"}\n"


def file_bytes(data):
    return framed(json.dumps(data).encode())


def all_places(data, path=()):
    """The path of everything inside, the whole first."""
    yield path
    if isinstance(data, dict | list):
        for key, one in data.items() if isinstance(data, dict) else enumerate(data):
            yield from all_places(one, (*path, key))


def value_at(data, path):
    for key in path:
        data = data[key]
    return data


@st.composite
def mutated(draw, data, top=()):
    """The same with up to three changes to its structure, below `top`."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        paths = [one for one in all_places(value_at(data, top)) if one]
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        holder, key = value_at(value_at(data, top), path[:-1]), path[-1]
        how = draw(st.sampled_from(["wrong", "huge", "drop", "copy", "deep", "key", "near"]))
        if how == "drop":
            del holder[key]
        elif how == "copy":
            other = draw(st.sampled_from(list(all_places(data))[1:]))
            holder[key] = copy.deepcopy(value_at(data, other))
        elif how == "deep":
            for _ in range(draw(st.sampled_from([3, 70, 200]))):
                holder[key] = [holder[key]]
        elif how == "key" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["../x", "/etc/passwd", "$", "", "x", "a/b"]))] = (
                holder.pop(key)
            )
        elif how == "near" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(HUGE if how == "huge" else WRONG)))
    return data


def check_refused(raw):
    """Read a manifest; whether it was refused. Any other exception ends the test."""
    tracemalloc.start()
    try:
        load_manifest(raw)
    except fx.CheckpointError as error:
        assert len(str(error)) < 5_000
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100 * len(raw) + 1_000_000
    return False
