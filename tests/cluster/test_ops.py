"""Collectives on real ranks: values, errors, and that the group survives an error."""

import dataclasses
import re
import time
from collections import namedtuple

import attrs
import pytest
import torch

from fxtrain import CollectiveError, ContextError, DataError, ops
from fxtrain._tree import map_leaves
from fxtrain.ops.transport import routes

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


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unpad_after_pad_is_the_identity(cluster, dim):
    for before, padded, after in cluster.run(_ragged, dim, False):
        assert torch.equal(before, after)
        assert padded.shape[dim] == (cluster.n - 1) * 2


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


def _wrong_shape(ctx):
    return ops.gather({"x": torch.ones(2 + ctx.rank)}, ctx)


def _wrong_dtype(ctx):
    return ops.reduce(torch.ones(2, dtype=torch.int32 if ctx.rank else torch.float32), ctx)


def _wrong_structure(ctx):
    return ops.gather([torch.ones(2)] if ctx.rank else (torch.ones(2),), ctx)


def _wrong_order(ctx):
    return ops.barrier(ctx) if ctx.rank else ops.gather(torch.ones(2), ctx)


def _wrong_large(ctx):
    return ops.gather(torch.ones(5000 + ctx.rank), ctx)


def _wrong_op(ctx):
    return ops.reduce(torch.ones(2), ctx, op="sum" if ctx.rank else "max")


def _wrong_value(ctx):
    return ops.agree(ctx.rank, ctx, name="seed")


WRONG = {
    _wrong_shape: ("gather", "float32[2]", "float32[3]"),
    _wrong_dtype: ("reduce", "float32[2]", "int32[2]"),
    _wrong_structure: ("gather", "tuple(0: *)", "list(0: *)"),
    _wrong_order: ("different collectives", "gather(", "barrier("),
    _wrong_large: ("gather", "float32[5000]", "float32[5001]"),
    _wrong_op: ("reduce", "max", "sum"),
    _wrong_value: ("agree", "seed=0", "seed=1"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda fn: fn.__name__.strip("_"))
def test_a_mismatch_is_an_error_on_every_rank_and_the_group_survives(cluster, wrong):
    if cluster.n == 1:
        return
    started = time.monotonic()
    errors = cluster.outcomes(wrong)
    took_s = time.monotonic() - started
    assert took_s < 0.8 * cluster.timeout_s
    for error in errors:
        assert isinstance(error, CollectiveError)
        for words in (*WRONG[wrong], "rank 0:", "test_ops.py:"):
            assert words in str(error)
    assert len({str(error) for error in errors}) == 1
    assert cluster.run(_numbers)[0]["n"] == cluster.n * (cluster.n + 1) // 2


def _one_is_late(ctx):
    if ctx.rank == 1:
        time.sleep(1.8 * ctx.comm.timeout_s)
    ops.barrier(ctx)


def test_a_rank_that_never_comes_is_named_within_the_timeout(pair):
    errors = pair.outcomes(_one_is_late)
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "rank 1: never joined this" in str(errors[0])
    assert "barrier" in str(errors[0]) and "test_ops.py:" in str(errors[0])
    waited = re.search(r"rank 0: waited ([\d.]+) s", str(errors[1]))
    assert 0.9 * pair.timeout_s < float(waited[1]) < 1.7 * pair.timeout_s
    assert pair.run(_numbers)[0]["n"] == 3


def _unpicklable(ctx):
    return ops.gather_objects((lambda: 0) if ctx.rank else 0, ctx)


def test_an_object_that_does_not_pickle_is_an_error_everywhere(pair):
    for error in pair.outcomes(_unpicklable):
        assert isinstance(error, CollectiveError)
        assert "rank 1 passed a value that cannot be sent" in str(error)


def _main_first(ctx, fail):
    seen = []
    with ops.main_first(ctx):
        seen.append(time.monotonic())
        if ctx.is_main:
            time.sleep(0.2)
            if fail:
                raise OSError("disk full")
            seen.append(time.monotonic())
    return seen


def test_main_first_runs_main_first(cluster):
    results = cluster.run(_main_first, False)
    for others in results[1:]:
        assert others[0] >= results[0][1]


def test_main_first_releases_the_others_with_its_error(pair):
    first, second = pair.outcomes(_main_first, True)
    assert isinstance(first, OSError)
    assert isinstance(second, CollectiveError)
    assert "disk full" in str(second)


def _problem(ctx):
    ops.raise_together(ValueError("mine") if ctx.rank == 1 else None, ctx)


def test_raise_together(pair):
    first, second = pair.outcomes(_problem)
    assert isinstance(first, CollectiveError) and "rank 1: ValueError: mine" in str(first)
    assert isinstance(second, ValueError)


def _lagged(ctx, shape):
    from fxtrain.ops.transport import exchange

    call = ("gather", f"float32{shape[ctx.rank]}")
    exchange.compare(ctx, ("gather", "a"), wait=True)
    exchange.compare(ctx, ("gather", "b"), wait=True)
    exchange.compare(ctx, ("gather", "ab"[ctx.rank] if shape[0] != shape[1] else "a"), wait=False)
    ops.barrier(ctx)
    return call


def test_a_lagged_check_is_settled_by_the_next_call(pair):
    assert pair.run(_lagged, [[2], [2]])
    for error in pair.outcomes(_lagged, [[2], [3]]):
        assert isinstance(error, CollectiveError)
        assert "gather(a)" in str(error) and "gather(b)" in str(error)


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


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.gather({"x": 1}, None),
        lambda: ops.reduce(1, {"x": 1}),
        lambda: ops.pad(1, "ctx"),
        lambda: ops.any_rank(True, 1),
        lambda: ops.barrier(None),
        lambda: ops.say("text", None),
    ],
)
def test_what_is_no_context_is_refused(call):
    with pytest.raises(ContextError, match="Pass the value first, then the context"):
        call()


def _by_route(ctx):
    """The same forms again and again: values of every kind, and results that stay."""
    forms = {
        "leaves": lambda k: {"a": torch.full((2, 3), k), "b": torch.tensor(True), "c": [k] * 0},
        "conjugate": lambda k: torch.complex(torch.ones(2), torch.full((2,), 1.0 * k)).conj(),
        "strided": lambda k: (torch.arange(6.0).reshape(2, 3).T + k)[::2],
        "parameter": lambda k: torch.nn.Parameter(torch.full((2,), 1.0 * k)),
        "empty": lambda k: (torch.zeros(0, 4), torch.tensor([1.0 * k])),
        "double": lambda k: (torch.tensor(k), torch.tensor(1.0 * k, dtype=torch.float64)),
    }
    ctx.comm.state.routes.clear()
    got = {}
    for name, make in forms.items():
        with torch.inference_mode():
            first = [ops.gather(make(ctx.rank + 10 * k), ctx) for k in range(2)]
        rest = [ops.gather(make(ctx.rank + 10 * k), ctx) for k in range(2, 4)]
        got[name] = map_leaves(torch.clone, [*first, *rest])
    made = sum(isinstance(one, routes.PackedLayout) for one in ctx.comm.state.routes.values())
    for size in range(1, 100):
        ops.gather(torch.zeros(size), ctx)
    return got, made, len(ctx.comm.state.routes)


def test_small_trees_travel_over_kept_routes(pair):
    for got, made, kept in pair.run(_by_route):
        assert made == 5 and kept == 32  # all but the tree with a tensor without entries
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
