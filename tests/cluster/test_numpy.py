"""NumPy values in collectives, and values that are compared by their bits."""

import enum
from decimal import Decimal

import attrs
import numpy as np
import pytest
import torch

from fxtrain import CollectiveError, ops
from fxtrain._words import canonical_text

LARGE = 5000


class Color(enum.Enum):
    RED = 1


@attrs.frozen
class Setup:
    rates: object
    name: str = "a"


class Plain:
    """An object without a repr of its own."""

    def __init__(self, inside):
        self.inside = inside


def _arrays(rank):
    x = np.arange(6.0).reshape(2, 3) + rank
    return {
        "float": np.float32(rank + 1),
        "int": np.int64(rank + 1),
        "bool": np.bool_(rank == 0),
        "zero_d": np.array(rank + 0.5),
        "strided": x.T[::-1],
        "empty": np.zeros((0, 3), np.int16),
        "half": np.full(3, rank + 1, np.float16),
        "swapped": np.full(2, rank + 1, ">i4"),
        "unsigned": np.array([2**64 - 1 - rank, rank], np.uint64),
        "read_only": np.broadcast_to(np.array([1.0 + rank]), (2,)),
        "complex": np.full(2, 1j * (rank + 1)),
        "large": np.full(LARGE, rank, np.int32),
        "long": np.full(2, rank + 1).astype(np.ulonglong),
    }


def _reduced(ctx, op):
    values = {k: v for k, v in _arrays(ctx.rank).items() if op == "sum" or k != "complex"}
    return ops.reduce(values, ctx, op=op)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_numpy_values_are_reduced_as_tensors_are(cluster, op):
    trees = [_arrays(rank) for rank in range(cluster.n)]
    combine = {"sum": np.sum, "max": np.max, "min": np.min}[op]
    for got in cluster.run(_reduced, op):
        for name, value in got.items():
            stacked = np.stack([tree[name] for tree in trees])
            want = combine(stacked, axis=0)
            before = trees[0][name]
            assert type(value) is (np.ndarray if isinstance(before, np.ndarray) else type(want))
            assert value.shape == before.shape
            if name != "bool":  # a sum of truths counts
                assert value.dtype == before.dtype.newbyteorder("=") or name == "long"
            np.testing.assert_array_equal(value, want)


def _means(ctx):
    high = np.array([2**63 + 2**40 * ctx.rank], np.uint64)
    return ops.reduce((np.int32(ctx.rank), high, 1j * ctx.rank, torch.tensor(3)), ctx)


def test_means_of_whole_numbers_are_float32(pair):
    for mean, high, imaginary, whole in pair.run(_means):
        assert mean == np.float32(0.5) and mean.dtype == np.float32
        assert high.dtype == np.float32 and high[0] == np.float32(2**63 + 2**39)
        assert imaginary == 0.5j and whole.dtype == torch.float32


def _traveled(ctx):
    tree = {"x": np.arange(2) + 10 * ctx.rank, "s": np.float32(ctx.rank), "t": np.array(["a"])}
    ragged = ops.pad({"x": np.arange(ctx.rank + 1.0)}, ctx, value=-1)
    letters = [{"x": np.arange(rank + 1)[::-1], "s": np.int8(rank)} for rank in range(2)]
    return (
        ops.gather(tree, ctx),
        ops.gather(tree["x"], ctx),
        ops.gather(tree["x"] + 1, ctx),  # over a kept route
        ops.broadcast(tree, ctx, src=1),
        ops.scatter(letters if ctx.is_main else None, ctx),
        (ragged.data["x"], ops.unpad(ops.gather(ragged, ctx), ctx)["x"]),
    )


def test_numpy_values_travel_as_tensors_do(pair):
    for rank, (got, x, more, sent, letter, (padded, whole)) in enumerate(pair.run(_traveled)):
        assert got["x"].tolist() == x.tolist() == [0, 1, 10, 11]
        assert more.tolist() == [1, 2, 11, 12] and isinstance(more, np.ndarray)
        assert isinstance(got["s"], np.ndarray) and got["s"].tolist() == [0.0, 1.0]
        assert [one.tolist() for one in got["t"]] == [["a"], ["a"]]
        assert sent["x"].tolist() == [10, 11] and type(sent["s"]) is np.float32
        assert letter["x"].tolist() == list(range(rank + 1))[::-1]
        assert type(letter["s"]) is np.int8 and letter["s"] == rank
        assert padded.tolist() == ([0.0, -1.0] if rank == 0 else [0.0, 1.0])
        assert isinstance(whole, np.ndarray) and whole.tolist() == [0.0, 0.0, 1.0]


def _kept(ctx):
    values = {"text": np.array(["a", "b"]), "name": np.str_("x"), "flag": True, "none": None}
    return ops.reduce(values, ctx, op="sum")


def test_what_is_no_number_is_kept(cluster):
    for got in cluster.run(_kept):
        assert got["text"].tolist() == ["a", "b"] and got["name"] == "x" and got["flag"] is True


UNCOMBINED = {
    "objects": lambda rank: np.array([1, "a"], object),
    "dates": lambda rank: np.datetime64("2020-01-01"),
    "masked": lambda rank: np.ma.masked_array([1, 2], [0, 1]),
    "wide": lambda rank: np.longdouble(1),
    "huge": lambda rank: 2**70,
    "decimal": lambda rank: Decimal("1.5"),
    "one_huge": lambda rank: 2**70 if rank else 1,
    "one_object": lambda rank: np.array([1], object) if rank else np.array([1]),
    "texts": lambda rank: np.array(["a", "b" if rank else "c"]),
}


def _uncombined(ctx, name):
    return ops.reduce({"x": UNCOMBINED[name](ctx.rank)}, ctx, op="sum")


@pytest.mark.parametrize("name", UNCOMBINED)
def test_what_cannot_be_combined_is_refused_on_every_rank(pair, name):
    errors = pair.outcomes(_uncombined, name)
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert ("cannot be combined" in str(errors[0])) == (not name.startswith(("one_", "texts")))


def _alike(rank, name, differs):
    x = torch.arange(float(LARGE))
    x[LARGE // 2] += 1000 * rank if differs else 0
    return {
        "tensor": x,
        "bfloat16": x.to(torch.bfloat16)[::2].neg().neg(),
        "array": x.numpy(),
        "record": Setup(x.numpy()),
        "nested": {"b": [x], "a": 1},
        "object": Plain(x),
        "objects": np.array([x.numpy(), None], dtype=object),
        "sparse": x.to_sparse(),
        "parameter": torch.nn.Parameter(x),
        "set": frozenset({f"word{i + differs * rank}" for i in range(50)}),
        "dict": dict(sorted({"a": 1, "b": differs * rank}.items(), reverse=bool(rank))),
        "dtype": torch.float32 if differs * rank else torch.float64,
        "enum": Color.RED if not differs * rank else 1,
        "function": torch.nn.functional.gelu if differs * rank else torch.nn.functional.relu,
        "zero": -0.0 if differs * rank else 0.0,
        "empty": torch.empty(0, 2 + differs * rank),
        "view": (x + 1)[LARGE // 2 : LARGE // 2 + 1],
        "huge": 10**9000 + differs * rank,
    }[name]


def _agreed(ctx, name, differs):
    ops.agree(_alike(ctx.rank, name, differs), ctx, name="it")
    return "agreed"


NAMES = (
    *("tensor", "bfloat16", "array", "record", "nested", "object", "objects", "sparse"),
    *("parameter", "set", "dict", "dtype", "enum", "function", "zero", "empty", "view", "huge"),
)


@pytest.mark.parametrize("name", NAMES)
def test_agree_compares_every_bit_and_nothing_else(pair, name):
    assert pair.run(_agreed, name, False) == ["agreed"] * 2
    errors = pair.outcomes(_agreed, name, True)
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "agree: the ranks passed different values" in str(errors[0])


@attrs.frozen
class Labeled:
    x: object
    label: object = attrs.field(metadata={"static": True})


def _labeled(ctx, differs):
    label = np.zeros(LARGE)
    label[LARGE // 2] = ctx.rank * differs
    return ops.gather(Labeled(torch.ones(1), label), ctx).x.tolist()


def test_static_fields_are_compared_by_their_bits(pair):
    assert pair.run(_labeled, False) == [[1.0, 1.0]] * 2
    assert all(isinstance(error, CollectiveError) for error in pair.outcomes(_labeled, True))


def test_words_of_a_value_in_itself_end():
    value = []
    value.append(value)
    holder = Plain(None)
    holder.inside = holder
    assert canonical_text(value).count("[") < 200 and canonical_text(holder).count("Plain") < 200


def _flag(ctx, flags):
    return ops.any_rank(flags[ctx.rank], ctx)


def test_a_flag_that_is_neither_true_nor_false_is_refused_on_every_rank(cluster):
    flags = [False] * (cluster.n - 1) + [torch.ones(2)]
    for error in cluster.outcomes(_flag, flags):
        assert isinstance(error, CollectiveError)
        assert f"flag of rank {cluster.n - 1} is neither true nor false" in str(error)
