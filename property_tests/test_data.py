"""Data laws: every row once, at every world size, from every cursor. No processes."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

import fxtrain as fx
from fxtrain.data._permute import permute, round_keys
from fxtrain.state import DistContext

sizes = st.integers(1, 6)
worlds = st.integers(1, 5)
counts = st.integers(1, 60)


def _loaders(dataset, plan, world, **kw):
    return [
        fx.shard(DataLoader(dataset, **kw), DistContext(rank=rank, world_size=world), plan)
        for rank in range(world)
    ]


def _real(batch):
    return batch.data[batch.valid].tolist()


def _joined(loaders, stop=None):
    """Real rows in global order, the last cursor, and every rank's batch counts."""
    found, positions, counts = [], [], []
    for loader in loaders:
        batches = list(loader)[:stop]
        counts.append(len(batches))
        positions.append([batch.position for batch in batches])
        found.append([_real(batch) for batch in batches])
    steps = max(counts)
    rows = [
        row for step in range(steps) for mine in found if step < len(mine) for row in mine[step]
    ]
    longest = max(positions, key=len)
    return rows, longest, counts


@given(n=counts, size=sizes, world=worlds, epoch=st.integers(0, 3), seed=st.integers(0, 9))
def test_padded_shards_cover_every_row_once_and_have_equal_length(n, size, world, epoch, seed):
    plan = fx.Plan(seed=seed)
    loaders = _loaders(torch.arange(n), plan, world, batch_size=size, shuffle=True)
    loaders = [loader.at(fx.Position(epoch=epoch)) for loader in loaders]
    rows, positions, lengths = _joined(loaders)
    assert sorted(rows) == list(range(n))
    assert len(set(lengths)) == 1 and lengths[0] == len(loaders[0])
    assert positions[-1].is_last and positions[-1].index == n == positions[-1].samples
    assert [p.is_last for p in positions[:-1]] == [False] * (len(positions) - 1)


@given(n=counts, size=sizes, world=worlds, seed=st.integers(0, 9))
def test_the_order_does_not_depend_on_the_world_size(n, size, world, seed):
    plan = fx.Plan(seed=seed)
    one, _, _ = _joined(_loaders(torch.arange(n), plan, 1, batch_size=size, shuffle=True))
    many, _, _ = _joined(_loaders(torch.arange(n), plan, world, batch_size=size, shuffle=True))
    assert one == many


@given(
    n=counts,
    size=sizes,
    before=worlds,
    after=worlds,
    cut=st.integers(1, 8),
    even=st.sampled_from(["pad", "drop", "uneven"]),
    stream=st.booleans(),
)
def test_another_world_goes_on_with_exactly_the_rows_not_yet_seen(
    n, size, before, after, cut, even, stream
):
    plan = fx.Plan(seed=3, even=even)
    dataset = _Numbers(n) if stream else torch.arange(n)
    shuffle = {} if stream else {"shuffle": True}
    one = _loaders(dataset, plan, 1, batch_size=1, **shuffle)
    order, _, _ = _joined(one)
    assume(even != "uneven" or n > (before - 1) * size)
    seen, positions, _ = _joined(_loaders(dataset, plan, before, batch_size=size, **shuffle), cut)
    assume(positions)
    last = positions[-1]
    left = n - last.index
    assume(even != "uneven" or left == 0 or left > (after - 1) * size)
    rest = [
        loader.at(last) for loader in _loaders(dataset, plan, after, batch_size=size, **shuffle)
    ]
    rows, _, _ = _joined(rest)
    assert seen == order[: len(seen)]
    assert rows == order[len(seen) : len(seen) + len(rows)]
    if even != "drop" and not last.is_last:
        assert seen + rows == order


class _Numbers(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return (torch.tensor(i) for i in range(self.n))


@given(n=counts, size=sizes, world=worlds, even=st.sampled_from(["pad", "drop", "uneven"]))
def test_a_stream_is_cut_like_a_table(n, size, world, even):
    assume(even != "uneven" or n > (world - 1) * size)
    plan = fx.Plan(even=even, accumulate=2)
    for table, stream in zip(
        _loaders(torch.arange(n), plan, world, batch_size=size),
        _loaders(_Numbers(n), plan, world, batch_size=size),
        strict=True,
    ):
        left, right = list(table), list(stream)
        assert [b.data.tolist() for b in left] == [b.data.tolist() for b in right]
        assert [b.position for b in left] == [b.position for b in right]
        assert [(b.rows, b.sizes, b.ghost is None) for b in left] == [
            (b.rows, b.sizes, b.ghost is None) for b in right
        ]


@given(
    n=counts,
    size=sizes,
    world=worlds,
    accumulate=st.integers(1, 5),
    flush=st.booleans(),
    even=st.sampled_from(["pad", "drop"]),
)
def test_windows_partition_the_micro_batches(n, size, world, accumulate, flush, even):
    plan = fx.Plan(accumulate=accumulate, flush=flush, even=even)
    (loader, *_) = _loaders(torch.arange(n), plan, world, batch_size=size)
    batches = [batch for epoch in loader.epochs(3) for batch in epoch]
    open_rows, updates, micro = [], 0, 0
    for batch in batches:
        open_rows.append(batch)
        micro += 1
        closed = micro == accumulate or (flush and batch.position.is_last)
        assert (batch.position.micro == 0) == closed
        if closed:
            held = sum(sum(b.sizes) for b in open_rows)
            assert all(b.window_rows in (held, None) for b in open_rows)
            assert flush is False or all(b.window_rows == held for b in open_rows)
            open_rows, micro, updates = [], 0, updates + 1
        assert batch.position.updates == updates


class _Dynamic(Sampler):
    """Batches of growing size."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        low, size = 0, 1
        while low < self.n:
            yield list(range(low, min(low + size, self.n)))
            low, size = low + size, size % 4 + 1


@given(n=counts, world=worlds, even=st.sampled_from(["pad", "uneven"]), cut=st.integers(1, 4))
def test_custom_batches_stay_whole_and_are_dealt_once(n, world, even, cut):
    batches = list(_Dynamic(n))
    assume(even != "uneven" or len(batches) >= world)
    plan = fx.Plan(even=even)
    loaders = _loaders(torch.arange(n), plan, world, batch_sampler=_Dynamic(n))
    found = [[_real(batch) for batch in loader] for loader in loaders]
    steps = max(map(len, found))
    dealt = [m[s] for s in range(steps) for m in found if s < len(m) and m[s]]
    assert dealt == batches
    positions = [batch.position for batch in loaders[0]]
    seen = positions[:cut][-1]
    rest = loaders[0].at(seen)
    if not seen.is_last and (even == "pad" or len(batches) - seen.index >= world):
        assert [_real(b) for b in rest] == found[0][cut:]


@given(n=st.integers(1, 40), world=worlds, size=sizes)
def test_global_batches_are_those_of_one_process(n, world, size):
    plan = fx.Plan(batch="global", even="drop")
    kw = {"batch_size": size * world}
    rows, _, _ = _joined(_loaders(torch.arange(n), plan, world, **kw))
    alone, _, _ = _joined(_loaders(torch.arange(n), plan, 1, **kw))
    assert rows == alone


@given(n=st.integers(1, 3000), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 5))
def test_permute_is_a_bijection(n, seed, epoch):
    out = permute(torch.arange(n), n, round_keys(seed, epoch))
    assert torch.equal(out.sort().values, torch.arange(n))


@given(n=st.integers(1 << 33, 1 << 45), at=st.integers(0, (1 << 33) - 1))
def test_permute_seeks_in_huge_ranges(n, at):
    keys = round_keys(1, 2)
    block = permute(torch.arange(at, at + 64), n, keys)
    assert len(set(block.tolist())) == 64
    assert bool(((block >= 0) & (block < n)).all())
    assert int(permute(torch.tensor([at + 5]), n, keys)) == int(block[5])


def test_permute_is_uniform():
    """Chi-square over all 24 permutations of 4, and over positions of 50, at fixed seeds."""
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = tuple(permute(torch.arange(4), 4, round_keys(seed, 0)).tolist())
        seen[order] = seen.get(order, 0) + 1
    chi = sum((seen.get(order, 0) - 200) ** 2 / 200 for order in seen)
    chi += 200 * (24 - len(seen))
    assert chi < 49.7  # 23 degrees of freedom, p = 0.001
    table = torch.zeros(50, 50)
    for seed in range(2000):
        table[torch.arange(50), permute(torch.arange(50), 50, round_keys(seed, 1))] += 1
    chi = float(((table - 40) ** 2 / 40).sum())
    assert chi < 2620  # 49 * 49 degrees of freedom, p = 0.001


def test_plain_batch_sampler_is_read_by_rows():
    loader = DataLoader(
        torch.arange(7), batch_sampler=BatchSampler(SequentialSampler(range(7)), 3, False)
    )
    found = [
        [batch.data.tolist() for batch in fx.shard(loader, DistContext(rank=r, world_size=2))]
        for r in range(2)
    ]
    assert found == [[[0, 1, 2], [6, 0, 1]], [[3, 4, 5], [2, 3, 4]]]
