"""Collectives on real ranks: values, errors, and that the group survives an error."""

import dataclasses
from collections import namedtuple

import attrs
import pytest
import torch

from fxtrain import ops
from fxtrain._tree import map_leaves
from fxtrain.errors import DataError

Point = namedtuple("Point", "x y")


@attrs.frozen
class Record:
    a: torch.Tensor
    name: str


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def _tree(rank, size):
    base = torch.arange(size) + 10 * rank
    return {
        "tuple": (base.float(), base.to(torch.bfloat16)),
        "point": Point(torch.tensor(float(rank)), torch.empty(0, 3)),
        "record": Record(base.view(-1, 1).expand(-1, 3).t().t(), f"r{rank}"),
        "pair": Pair(base > 3, [None, rank]),
        "complex": torch.complex(base.double(), -base.double()),
    }


def _gather_tree(ctx, size):
    return ops.gather(_tree(ctx.rank, size), ctx)


@pytest.mark.parametrize("size", [4, 5000], ids=["small", "large"])
def test_gather_walks_every_container(cluster, size):
    for got in cluster.run(_gather_tree, size):
        trees = [_tree(rank, size) for rank in range(cluster.n)]
        assert torch.equal(got["tuple"][0], torch.cat([t["tuple"][0] for t in trees]))
        assert torch.equal(got["tuple"][1], torch.cat([t["tuple"][1] for t in trees]))
        assert got["tuple"][1].dtype == torch.bfloat16
        assert torch.equal(got["point"].x, torch.arange(cluster.n).float())
        assert got["point"].y.shape == (0, 3)
        assert torch.equal(got["record"].a, torch.cat([t["record"].a for t in trees]))
        assert got["record"].name == [f"r{rank}" for rank in range(cluster.n)]
        assert torch.equal(got["pair"].left, torch.cat([t["pair"].left for t in trees]))
        assert got["pair"].right == [None, list(range(cluster.n))]
        assert torch.equal(got["complex"], torch.cat([t["complex"] for t in trees]))


def _columns(ctx, rows):
    table = torch.arange(5.0 * rows).view(rows, 5) + ctx.rank
    last = ops.broadcast(table[:, 3], ctx, src=ctx.world_size - 1)
    return table, ops.gather(table[:, 1], ctx), ops.reduce(table[:, 2], ctx, op="sum"), last


@pytest.mark.parametrize("rows", [1, 3])
def test_columns_of_any_number_of_rows(cluster, rows):
    found = cluster.run(_columns, rows)
    tables = torch.stack([table for table, *_ in found])
    for _, gathered, total, last in found:
        assert torch.equal(gathered, tables[:, :, 1].flatten())
        assert torch.equal(total, tables[:, :, 2].sum(0))
        assert torch.equal(last, tables[-1, :, 3])


def _reduce_all(ctx, size, op):
    rows = _rows(ctx.rank, size, op)
    return ops.reduce(rows, ctx, op=op), rows


def _rows(rank, size, op):
    generator = torch.Generator().manual_seed(rank)
    base = torch.randint(1, 4, (size,), generator=generator)
    kinds = [d for d in DTYPES if not (d.is_complex and op in ("max", "min"))]
    return {str(dtype): base.to(dtype) for dtype in kinds}


@pytest.mark.parametrize("size", [3, 3000], ids=["small", "large"])
@pytest.mark.parametrize("op", ["mean", "sum", "max", "min", "product"])
def test_reduce_equals_one_process(cluster, size, op):
    results = cluster.run(_reduce_all, size, op)
    for name in results[0][0]:
        rows = torch.stack([mine[name] for _, mine in results])
        integer = not (rows.dtype.is_floating_point or rows.dtype.is_complex)
        wide = rows.double() if not rows.is_complex() else rows.to(torch.complex128)
        want = {
            "mean": lambda x: x.mean(0),
            "sum": lambda x: x.sum(0),
            "max": lambda x: x.amax(0),
            "min": lambda x: x.amin(0),
            "product": lambda x: x.prod(0),
        }[op](wide)
        for got, _ in results:
            assert torch.equal(got[name], results[0][0][name])
            if op == "mean" and integer:
                assert got[name].dtype == torch.float32
            elif rows.dtype == torch.bool and op in ("sum", "product"):
                assert got[name].dtype == torch.int64
            else:
                assert got[name].dtype == rows.dtype
            torch.testing.assert_close(
                got[name].to(want.dtype),
                want,
                rtol=1e-2 if rows.dtype.itemsize < 4 else 1e-6,
                atol=0,
            )


def _numbers(ctx):
    return ops.reduce({"n": ctx.rank + 1, "x": 0.5, "same": "s"}, ctx, op="sum")


def test_reduce_of_numbers_gives_numbers(cluster):
    n = cluster.n
    assert cluster.run(_numbers) == [{"n": n * (n + 1) // 2, "x": n / 2, "same": "s"}] * n


def _broadcast(ctx, size, src):
    return ops.broadcast(_tree(ctx.rank, size), ctx, src=src)


@pytest.mark.parametrize("size", [4, 5000], ids=["small", "large"])
def test_broadcast_gives_everybody_the_source(cluster, size):
    src = cluster.n - 1
    want = _tree(src, size)
    for got in cluster.run(_broadcast, size, src):
        assert torch.equal(got["tuple"][1], want["tuple"][1])
        assert got["record"].name == want["record"].name
        assert torch.equal(got["complex"], want["complex"])


def _scatter(ctx):
    letters = None
    if ctx.is_main:
        letters = [
            {"x": torch.arange(rank * 3000), "words": ["w"] * rank, "flag": torch.tensor(True)}
            for rank in range(ctx.world_size)
        ]
    return ops.scatter(letters, ctx)


def test_scatter_sends_each_rank_its_own_tree(cluster):
    for rank, got in enumerate(cluster.run(_scatter)):
        assert torch.equal(got["x"], torch.arange(rank * 3000))
        assert got["words"] == ["w"] * rank
        assert got["flag"].item() is True


def _ragged(ctx, dim, gathered):
    shape = [2, 2]
    shape[dim] = ctx.rank * 2
    x = torch.full(shape, ctx.rank + 1)
    padded = ops.pad({"x": x, "n": torch.tensor(3)}, ctx, dim=dim, value=-1)
    if gathered:
        padded = ops.gather(padded, ctx)
    return x, padded.data["x"], ops.unpad(padded, ctx)["x"]


def test_ragged_rows_are_gathered_through_pad(cluster):
    results = cluster.run(_ragged, 0, True)
    whole = torch.cat([before for before, _, _ in results])
    for _, _, after in results:
        assert torch.equal(after, whole)


def _unpad_columns(ctx):
    return ops.unpad(ops.gather(ops.pad(torch.ones(2, ctx.rank + 1), ctx, dim=1), ctx), ctx)


def test_gathered_columns_of_different_length_stay_padded(pair):
    for error in pair.outcomes(_unpad_columns):
        assert isinstance(error, DataError)
        assert "[1, 2]" in str(error)


def _objects(ctx):
    mine = {"rank": ctx.rank, "blob": "x" * (9000 * ctx.rank)}
    gathered = ops.gather_objects(mine, ctx)
    return (
        [len(found["blob"]) for found in gathered],
        ops.broadcast_object(mine, ctx, src=ctx.world_size - 1)["rank"],
        ops.any_rank(ctx.is_last, ctx),
        ops.all_ranks(ctx.is_main, ctx),
        ops.agree(7, ctx),
    )


def test_objects_and_flags(cluster):
    n = cluster.n
    want = ([9000 * rank for rank in range(n)], n - 1, True, n == 1, 7)
    assert cluster.run(_objects) == [want] * n


def _split(ctx, pad):
    return (
        ops.split([0, 1, 2, 3, 4], ctx, pad=pad),
        ops.split({"t": torch.arange(5), "u": tuple("abcde")}, ctx, pad=pad),
    )


def test_split(pair):
    (a, x), (b, y) = pair.run(_split, False)
    assert (a, b) == ([0, 1, 2], [3, 4])
    assert x["t"].tolist() == [0, 1, 2] and y["u"] == ("d", "e")
    (a, _), (b, y) = pair.run(_split, True)
    assert (a, b) == ([0, 1, 2], [3, 4, 4])
    assert y["t"].tolist() == [3, 4, 4] and y["u"] == ("d", "e", "e")


def _repeated(ctx):
    """The same call several times, with leaves of every kind."""
    trees = {
        "leaves": lambda k: {"a": torch.full((2, 3), k), "b": torch.tensor(True), "c": [k] * 0},
        "conjugate": lambda k: torch.complex(torch.ones(2), torch.full((2,), 1.0 * k)).conj(),
        "strided": lambda k: (torch.arange(6.0).reshape(2, 3).T + k)[::2],
        "parameter": lambda k: torch.nn.Parameter(torch.full((2,), 1.0 * k)),
        "empty": lambda k: (torch.zeros(0, 4), torch.tensor([1.0 * k])),
        "double": lambda k: (torch.tensor(k), torch.tensor(1.0 * k, dtype=torch.float64)),
    }
    results = {}
    for name, make in trees.items():
        with torch.inference_mode():
            first = [ops.gather(make(ctx.rank + 10 * k), ctx) for k in range(2)]
        rest = [ops.gather(make(ctx.rank + 10 * k), ctx) for k in range(2, 4)]
        results[name] = map_leaves(torch.clone, [*first, *rest])
    return results


def test_results_of_repeated_gathers_are_separate(pair):
    for got in pair.run(_repeated):
        for k in range(4):
            low, high = 10 * k, 10 * k + 1
            assert got["leaves"][k]["a"].tolist() == [[low] * 3] * 2 + [[high] * 3] * 2
            assert got["leaves"][k]["b"].tolist() == [True, True]
            assert got["conjugate"][k].tolist() == [1 - low * 1j] * 2 + [1 - high * 1j] * 2
            column = [[low, low + 3.0], [low + 2, low + 5.0]]
            assert got["strided"][k][:2].tolist() == column
            assert got["parameter"][k].tolist() == [low, low, high, high]
            assert got["empty"][k][0].shape == (0, 4)
            assert got["empty"][k][1].tolist() == [low, high]
            assert [one.tolist() for one in got["double"][k]] == [[low, high]] * 2


def _in_and_after_inference(ctx):
    other = ops.duplicate(ctx)  # whose first exchange makes its packets
    with torch.inference_mode():
        first = ops.gather(torch.tensor([ctx.rank]), other)
    return first.tolist(), ops.gather(torch.tensor([ctx.rank, 7]), other).tolist()


def test_a_context_first_used_in_inference_mode_can_be_used_outside_of_it(pair):
    assert pair.run(_in_and_after_inference) == [([0, 1], [0, 7, 1, 7])] * 2


def _padded_in_front(ctx):
    x = torch.arange(1, ctx.rank + 2)
    padded = ops.pad(x, ctx, first=True)
    both = ops.unpad(ops.gather(padded, ctx), ctx)
    return padded.data.tolist(), ops.unpad(padded, ctx).tolist(), both.tolist()


def test_padding_may_be_in_front(pair):
    both = [1, 1, 2]
    assert pair.run(_padded_in_front) == [([0, 1], [1], both), ([1, 2], [1, 2], both)]
