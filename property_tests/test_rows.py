"""Laws of gather_valid: random rows, of any kind, in batches of any size."""

from collections import namedtuple

import attrs
import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import CollectiveError, ops
from fxtrain._words import canonical_text
from fxtrain.errors import DataError

ON_RANKS = settings(
    max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
Pair = namedtuple("Pair", "correct total")


@attrs.frozen
class Found:
    boxes: object
    name: str


# What one row can be, from its index.
ENTRIES = {
    "number": lambda i: i,
    "text": lambda i: f"text{i}",
    "bytes": lambda i: bytes([i % 7] * (i % 4)),
    "none": lambda i: None if i % 2 else i,
    "dict": lambda i: {"image_id": i, "label": [f"c{i}"]},
    "tokens": lambda i: [f"t{i}"] * (i % 4),
    "pair": lambda i: (i, f"text{i}"),
    "named": lambda i: Pair(i, i + 1),
    "record": lambda i: Found(torch.full((i % 3, 4), float(i)), f"r{i}"),
    "boxes": lambda i: torch.full((i % 4, 2), float(i)),
    "square": lambda i: torch.full((2, 2), i),
    "scalar": lambda i: torch.tensor(float(i)),
    "array": lambda i: np.full(i % 3, i),
    "set": lambda i: {i, i + 1},
    "any": lambda i: [i, f"text{i}", (i,), {"a": i}, torch.ones(i % 3), None][i % 6],
}


def _gathered(ctx, n, size, entries, per_rank):
    """Each kind of rows over an epoch; columns and values of a batch beside them."""
    plan = fx.Plan(batch="per_rank" if per_rank else "global")
    found = {name: [] for name in (*entries, "column", "labels", "texts", "pairs", "tensors")}
    for batch in fx.shard(DataLoader(torch.arange(n), batch_size=size), ctx, plan):
        mine = batch.data.tolist()
        tree = {
            **{name: [ENTRIES[name](i) for i in mine] for name in entries},
            "column": (batch.data * 2, batch.data.numpy() / 2),
            "labels": np.array([f"label{i}" for i in mine]),
            "texts": tuple(f"text{i}" for i in mine),
            "pairs": (len(mine), Pair(sum(mine), torch.tensor(max(mine)))),
        }
        got = ops.gather_valid(tree, batch, ctx)
        assert ops.gather_valid(tree["column"][0], batch, ctx).tolist() == got["column"][0].tolist()
        for name in entries:
            assert type(got[name]) is list
            found[name] += got[name]
        found["column"] += [*zip(*[column.tolist() for column in got["column"]], strict=True)]
        found["labels"] += got["labels"].tolist()
        found["texts"] += got["texts"]
        (counts, (sums, tops)) = got["pairs"]
        assert type(got["texts"]) is tuple and type(got["pairs"][1]) is Pair
        assert len(counts) == len(sums) == len(tops) == sum(rows > 0 for rows in batch.rows)
    return {name: canonical_text(rows) for name, rows in found.items()}


@ON_RANKS
@given(
    n=st.integers(1, 13),
    size=st.integers(1, 5),
    entries=st.lists(st.sampled_from(sorted(ENTRIES)), min_size=1, max_size=4, unique=True),
    per_rank=st.booleans(),
)
def test_gather_valid_gives_exactly_the_rows_once_each_in_order(
    cluster, n, size, entries, per_rank
):
    size = size if per_rank else size * cluster.n  # a global batch divides
    want = {name: [ENTRIES[name](i) for i in range(n)] for name in entries}
    want["column"] = [(2 * i, i / 2) for i in range(n)]
    want["labels"] = [f"label{i}" for i in range(n)]
    want["texts"] = [f"text{i}" for i in range(n)]
    for found in cluster.run(_gathered, n, size, entries, per_rank):
        for name, rows in want.items():
            assert found[name] == canonical_text(rows), name


MISFITS = {
    "columns in a list": lambda n: [torch.ones(n), torch.ones(n), torch.ones(n)][: 2 + (n == 2)],
    "short list": lambda n: ["a"] * (n - 1),
    "texts": lambda n: ("a",) * (n + 1),
    "column": lambda n: torch.ones(n + 1),
    "array": lambda n: np.ones((n + 1, 2)),
    "set": lambda n: set(range(n)),
    "range": lambda n: range(n),
    "inside": lambda n: {"a": (torch.ones(n), [1] * (n + 1))},
}


def _misfit(ctx, name, size, alone):
    """The error of a rank; returned, since the ranks can work on after it."""
    (batch, *_) = fx.shard(DataLoader(torch.arange(20), batch_size=size), ctx)
    fits = {"a": (torch.ones(size), [1] * size)} if name == "inside" else [1] * size
    wrong = ctx.is_last or not alone
    try:
        ops.gather_valid(MISFITS[name](size) if wrong else fits, batch, ctx)
    except (DataError, CollectiveError) as error:
        return error


@ON_RANKS
@given(name=st.sampled_from(sorted(MISFITS)), size=st.integers(1, 4), alone=st.booleans())
def test_what_could_be_rows_or_not_is_refused_on_every_rank(cluster, name, size, alone):
    errors = cluster.run(_misfit, name, size, alone and cluster.n > 1)
    assert all(isinstance(error, DataError | CollectiveError) for error in errors)
    assert "gather_valid" in str(errors[-1]) and "entry per row into a list" in str(errors[-1])


def _kinds_differ(ctx):
    (batch,) = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
    ops.gather_valid(["a", "b"] if ctx.is_main else "ab", batch, ctx)


def test_rows_on_one_rank_and_a_value_on_another_are_refused(pair):
    for error in pair.outcomes(_kinds_differ):
        assert isinstance(error, CollectiveError) and "list of rows" in str(error)
