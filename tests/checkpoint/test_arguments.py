"""Arguments of `save` that make no sense, or differ between ranks, are one error on all ranks."""

import os

import pytest
from torch import nn

import fxtrain as fx


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
