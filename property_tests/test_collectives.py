"""Laws of collectives on real ranks."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fxtrain import ops

ON_RANKS = settings(
    max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@st.composite
def trees(draw, leaves):
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.tuples(inner, inner),
                st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            ),
            max_leaves=6,
        )
    )


leaf = st.tuples(
    st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, len(DTYPES) - 1)
)


def _fill(spec, rank):
    """A tensor per (shape, dtype) leaf of a tree of specs, different on every rank."""
    if isinstance(spec, list):
        return [_fill(one, rank) for one in spec]
    if isinstance(spec, dict):
        return {key: _fill(one, rank) for key, one in spec.items()}
    if len(spec) == 2 and isinstance(spec[1], int):
        shape, dtype = spec
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(0, 5, shape, generator=generator).to(DTYPES[dtype])
    return tuple(_fill(one, rank) for one in spec)


def _pairs(left, right):
    if isinstance(left, torch.Tensor):
        yield left, right
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            yield from _pairs(left[key], right[key])
    else:
        assert type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            yield from _pairs(one, other)


TIMES = 3  # from the second call of a form on its tensors travel over a kept route


def _gather(ctx, spec):
    return [ops.gather(_fill(spec, ctx.rank + 10 * time), ctx) for time in range(TIMES)]


@ON_RANKS
@given(spec=trees(leaf))
def test_gather_is_concatenation_in_rank_order(cluster, spec):
    for time, got in ((t, all_[t]) for all_ in cluster.run(_gather, spec) for t in range(TIMES)):
        mine = [_fill(spec, rank + 10 * time) for rank in range(cluster.n)]
        columns = zip(*[[x for x, _ in _pairs(tree, tree)] for tree in mine], strict=True)
        flat = [x for x, _ in _pairs(got, got)]
        for parts, joined in zip(columns, flat, strict=True):
            stacked = torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts)
            assert joined.dtype == parts[0].dtype and torch.equal(joined, stacked)


def _split_then_gather(ctx, x):
    share = ops.split(x, ctx)
    return ops.unpad(ops.gather(ops.pad(share, ctx), ctx), ctx)


@ON_RANKS
@given(n=st.integers(0, 20), width=st.integers(0, 3))
def test_gather_after_split_is_the_identity(cluster, n, width):
    x = torch.arange(n * width).reshape(n, width)
    for got in cluster.run(_split_then_gather, x):
        assert torch.equal(got, x)


def _pad_then_unpad(ctx, lengths, dim):
    shape = [2, 2]
    shape[dim] = lengths[ctx.rank]
    x = torch.rand(shape)
    padded = ops.pad({"x": x, "s": torch.tensor(1)}, ctx, dim=dim)
    return torch.equal(ops.unpad(padded, ctx)["x"], x), tuple(padded.data["x"].shape)


@ON_RANKS
@given(data=st.data(), dim=st.sampled_from([0, 1, -1, -2]))
def test_unpad_after_pad_is_the_identity(cluster, data, dim):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=cluster.n, max_size=cluster.n))
    results = cluster.run(_pad_then_unpad, lengths, dim)
    assert all(same for same, _ in results)
    assert len({shape for _, shape in results}) == 1
    assert results[0][1][dim] == max(lengths)


def _reduce(ctx, rows, op):
    return [ops.reduce(rows[ctx.rank] + time, ctx, op=op) for time in range(TIMES)]


@ON_RANKS
@given(data=st.data(), op=st.sampled_from(["mean", "sum", "max", "min", "product"]))
def test_reduce_equals_the_single_process(cluster, data, op):
    size = data.draw(st.sampled_from([1, 7, 2000]))
    seed = data.draw(st.integers(0, 99))
    rows = torch.randn(cluster.n, size, generator=torch.Generator().manual_seed(seed)).double()
    alone = {
        "mean": torch.mean,
        "sum": torch.sum,
        "max": torch.amax,
        "min": torch.amin,
        "product": torch.prod,
    }[op]
    results = cluster.run(_reduce, rows, op)
    for time in range(TIMES):
        for got in results:
            torch.testing.assert_close(got[time], alone(rows + time, 0))
            assert torch.equal(got[time], results[0][time])


def _wrong(ctx, spec, other):
    for _ in range(2):
        ops.gather(_fill(spec, 0), ctx)
    ops.gather(_fill(other if ctx.is_last else spec, 0), ctx)


@ON_RANKS
@given(spec=trees(leaf), other=trees(leaf))
def test_any_two_different_trees_meet_in_an_error_everywhere(cluster, spec, other):
    if cluster.n == 1 or _shape(spec) == _shape(other):
        return
    for error in cluster.outcomes(_wrong, spec, other):
        assert type(error).__name__ == "CollectiveError"


def _shape(spec):
    if isinstance(spec, list):
        return ("list", *map(_shape, spec))
    if isinstance(spec, dict):
        return ("dict", *[(key, _shape(spec[key])) for key in sorted(spec)])
    if len(spec) == 2 and isinstance(spec[1], int):
        return spec
    return ("tuple", *map(_shape, spec))


def _gradients(ctx, shapes):
    """Gradients of a rank's leaves, of a sum that weighs each rank's copy of the rows by itself."""
    leaves = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = ops.gather({"rows": leaves, "name": "a", "fixed": torch.ones(2)}, ctx, grad=True)
    assert not found["fixed"].requires_grad and found["name"] == ["a"] * ctx.world_size
    total = sum(
        (whole * _weights(whole.shape, ctx.rank, n)).sum() for n, whole in enumerate(found["rows"])
    )
    if isinstance(total, torch.Tensor):
        total.backward()
    return [one.grad for one in leaves]


def _weights(shape, rank, leaf):
    generator = torch.Generator().manual_seed(100 * rank + leaf)
    return torch.randint(-9, 9, shape, generator=generator).double()


@ON_RANKS
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=3))
def test_gradients_of_a_gather_are_summed_over_the_losses_of_all_ranks(cluster, shapes):
    for rank, grads in enumerate(cluster.run(_gradients, shapes)):
        for n, (shape, grad) in enumerate(zip(shapes, grads, strict=True)):
            rows = shape[0] if shape else 1
            whole = (rows * cluster.n, *shape[1:])
            total = sum(_weights(whole, one, n) for one in range(cluster.n))
            assert torch.equal(grad, total[rank * rows : (rank + 1) * rows].reshape(shape))
