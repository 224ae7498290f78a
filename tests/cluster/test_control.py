"""Who runs what: main first, and shares of sequences."""

import time
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fxtrain import CollectiveError, ops
from fxtrain.errors import DataError


def _fails(ctx, who, nested):
    """One rank fails in the block; what each rank knows, which no timeout tells."""
    try:
        with ops.main_first(ctx):
            if nested:
                with ops.main_first(ctx):
                    _fail_on(ctx, who)
            else:
                _fail_on(ctx, who)
    except (OSError, CollectiveError) as error:
        found = type(error).__name__, str(error)
    else:
        found = "none", ""
    return *found, ops.reduce(1, ctx, op="sum")


def _fail_on(ctx, who):
    if ctx.rank in who:
        raise OSError(f"disk full on {ctx.rank}")


@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
def test_whichever_rank_fails_in_main_first_releases_the_others_at_once(cluster, nested):
    n = cluster.n
    for who in ([0], [n - 1], [0, n - 1], list(range(1, n)), list(range(n))):
        found = cluster.run(_fails, who, nested)
        first = [0] if 0 in who else who  # rank 0 ends it before the others begin
        for rank, (kind, text, total) in enumerate(found):
            assert total == n
            if not first:
                assert kind == "none"
            elif rank in first:
                assert (kind, text) == ("OSError", f"disk full on {rank}")
            else:
                assert kind == "CollectiveError"
                assert all(f"rank {one}: OSError: disk full on {one}" in text for one in first)


def _ordered(ctx):
    seen = []
    with ops.main_first(ctx), ops.main_first(ctx):
        seen.append(time.monotonic())
        time.sleep(0.1 * ctx.is_main)
        seen.append(time.monotonic())
    with ops.main_first(ctx):
        seen.append(time.monotonic())
    return seen


def test_main_is_first_in_nested_blocks_too(cluster):
    main, *others = cluster.run(_ordered)
    for seen in others:
        assert seen[0] >= main[1] and seen[2] >= main[2] >= main[1]


def _collective_inside(ctx, who):
    with ops.main_first(ctx):
        if ctx.rank in who:
            ops.gather(torch.ones(1), ctx)


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_a_collective_inside_main_first_is_an_error_everywhere(pair, who):
    for error in pair.outcomes(_collective_inside, who):
        assert isinstance(error, CollectiveError)
        assert "gather(" in str(error) and "main_first at" in str(error)
        assert "timed out" not in str(error)
    assert [total for *_, total in pair.run(_fails, [], False)] == [2, 2]


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index * index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


SPLIT = {
    "array": lambda: np.arange(10).reshape(5, 2),
    "texts": lambda: np.array(list("abcde")),
    "objects": lambda: np.array([{}, [], 1, "x", None], dtype=object),
    "tensor": lambda: torch.arange(10).reshape(5, 2),
    "list": lambda: list("abcde"),
    "tuple": lambda: tuple("abcde"),
    "range": lambda: range(5),
    "deque": lambda: deque(range(5)),
    "dataset": Squares,
    "tensors": lambda: TensorDataset(torch.arange(5)),
    "dict": lambda: {"x": np.arange(5), "y": {"z": list("abcde")}},
}


def _listed(value):
    if isinstance(value, dict):
        return {key: _listed(one) for key, one in value.items()}
    if isinstance(value, Dataset):
        value = [value[index] for index in range(len(value))]
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _split(ctx, name, pad):
    whole = SPLIT[name]()
    share = ops.split(whole, ctx, pad=pad)
    return type(share).__name__, _listed(share), _listed(whole)


@pytest.mark.parametrize("name", SPLIT)
def test_shares_make_up_the_whole(cluster, name):
    found = cluster.run(_split, name, False)
    padded = cluster.run(_split, name, True)
    most = -(-5 // cluster.n)
    whole = found[0][2]
    if name == "dict":
        whole = whole["x"]
        found = [(kind, share["x"], None) for kind, share, _ in found]
        assert [share["y"]["z"] for _, share, _ in padded][-1][-1] == "e"
        padded = [(kind, share["x"], None) for kind, share, _ in padded]
    assert [item for _, share, _ in found for item in share] == whole
    assert all(len(share) == most for _, share, _ in padded)
    assert all(share[-1] == whole[-1] for _, share, _ in padded[-1:])
    want = {"dataset": "Subset", "tensors": "Subset", "deque": "list"}
    assert {kind for kind, _, _ in found} == {want.get(name, type(SPLIT[name]()).__name__)}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Stream(), "test_control.Stream"),
        (np.array(3), "0-d ndarray"),
        (np.float32(3), "0-d float32"),
        (torch.tensor(3), "0-d Tensor"),
        ("text", "builtins.str"),
        ({1, 2}, "builtins.set"),
        ({"a": [1], "b": [1, 2]}, "different lengths"),
        (3, "builtins.int"),
    ],
)
def test_what_cannot_be_split_is_named(value, words):
    with ops.detect(env={}, device="cpu") as ctx, pytest.raises(DataError, match=words):
        ops.split(value, ctx)
