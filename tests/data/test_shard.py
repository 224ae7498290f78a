"""What each rank gets, and where cursors stand. Contexts are made by hand: no processes."""

import warnings
from collections import UserDict

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import fxtrain as fx
from fxtrain.state import DistContext


def world(n):
    return [DistContext(rank=rank, world_size=n) for rank in range(n)]


def loaders(dataset, n, plan=fx.Plan(), **kw):  # noqa: B008
    return [fx.shard(DataLoader(dataset, **kw), ctx, plan) for ctx in world(n)]


def rows(dataset, n, plan=fx.Plan(), **kw):  # noqa: B008
    return [[batch.data.tolist() for batch in mine] for mine in loaders(dataset, n, plan, **kw)]


def positions(loader):
    return [batch.position for batch in loader]


@pytest.mark.parametrize(
    ("even", "expected"),
    [
        ("pad", [[[0, 1, 2], [6, 0, 1]], [[3, 4, 5], [2, 3, 4]]]),
        ("drop", [[[0, 1, 2]], [[3, 4, 5]]]),
        ("uneven", [[[0, 1, 2], [6]], [[3, 4, 5], [2, 3, 4]]]),
    ],
)
def test_seven_rows_in_batches_of_three_on_two_ranks(even, expected):
    assert rows(torch.arange(7), 2, fx.Plan(even=even), batch_size=3) == expected
    assert [
        len(mine) for mine in loaders(torch.arange(7), 2, fx.Plan(even=even), batch_size=3)
    ] == [len(mine) for mine in expected]


def test_a_global_batch_is_shared():
    found = rows(torch.arange(10), 2, fx.Plan(batch="global"), batch_size=4)
    assert found == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]


def test_padding_is_marked_at_the_end_of_each_rank():
    first, second = loaders(torch.arange(7), 2, batch_size=3)
    assert [b.valid.tolist() for b in first] == [[True] * 3, [True, False, False]]
    assert [b.valid.tolist() for b in second] == [[True] * 3, [False] * 3]
    assert [(b.rows, b.sizes) for b in first] == [((3, 3), (3, 3)), ((1, 0), (3, 3))]
    assert [(b.rows, b.sizes) for b in second] == [((3, 3), (3, 3)), ((1, 0), (3, 3))]


def test_a_tiny_dataset_is_repeated_as_often_as_needed():
    assert rows(torch.arange(2), 3, batch_size=3) == [[[0, 1, 0]], [[1, 0, 1]], [[0, 1, 0]]]


def test_one_rank_pads_nothing():
    assert rows(torch.arange(5), 1, batch_size=2) == [[[0, 1], [2, 3], [4]]]
    assert rows(torch.arange(5), 1, fx.Plan(even="drop"), batch_size=2) == [[[0, 1], [2, 3]]]


def test_drop_last_drops():
    assert rows(torch.arange(7), 2, batch_size=3, drop_last=True) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_no_rows_no_batches():
    assert rows(torch.arange(0), 2, batch_size=3) == [[], []]
    assert rows(torch.arange(3), 2, fx.Plan(even="drop"), batch_size=3) == [[], []]


def test_a_mask_of_only_real_rows_is_made_once():
    (loader,) = loaders(torch.arange(6), 1, batch_size=2)
    assert len({id(batch.valid) for batch in loader}) == 1


def test_on_the_cpu_data_stays_the_same_object():
    made = []

    def collate(rows):
        made.append(UserDict(x=torch.stack(rows)))
        return made[-1]

    (loader,) = loaders(torch.arange(4), 1, batch_size=2, collate_fn=collate)
    assert [batch.data is made[-1] for batch in loader] == [True, True]


def test_tensors_go_to_the_device_of_the_context_and_nothing_else_does():
    ctx = DistContext(device=torch.device("meta"))
    loader = DataLoader(
        TensorDataset(torch.arange(4)),
        batch_size=2,
        collate_fn=lambda rows: {"x": [torch.stack(row) for row in rows], "name": "a"},
    )
    for batch in fx.shard(loader, ctx):
        assert [x.device.type for x in batch["x"]] == ["meta", "meta"]
        assert batch["name"] == "a"
        assert batch.valid.device.type == "meta"
    stay = fx.Plan(data=fx.Data(to_device=False))
    for batch in fx.shard(loader, ctx, stay):
        assert [x.device.type for x in batch["x"]] == ["cpu", "cpu"]
        assert batch.valid.device.type == "cpu"


def test_only_the_data_axes_split_the_data():
    # Four ranks, tensor=2: ranks 0 and 1 read the same rows.
    data = [DistContext(rank=rank // 2, world_size=2) for rank in range(4)]
    ctxs = [DistContext(rank=rank, world_size=4, axes={"data": data[rank]}) for rank in range(4)]
    found = [[b.data.tolist() for b in fx.shard(DataLoader(torch.arange(4)), c)] for c in ctxs]
    assert found == [[[0], [2]], [[0], [2]], [[1], [3]], [[1], [3]]]


# Cursors


def test_positions_count_real_rows_of_all_ranks():
    for loader in loaders(torch.arange(7), 2, batch_size=3):
        (one, two) = [b.position for epoch in loader.epochs(2) for b in epoch][2:]
        assert one == fx.Position(epoch=1, index=6, samples=13, updates=3)
        assert two == fx.Position(epoch=1, index=7, samples=14, updates=4, is_last=True)


@pytest.mark.parametrize(
    ("flush", "micros", "updates", "window_rows"),
    [
        (True, [1, 0, 0, 1, 0, 0], [0, 1, 2, 2, 3, 4], [4, 4, 1, 4, 4, 1]),
        (False, [1, 0, 1, 0, 1, 0], [0, 1, 1, 2, 2, 3], [4, 4, 3, 3, 3, 3]),
    ],
)
def test_windows_close_every_few_batches_and_at_the_end(flush, micros, updates, window_rows):
    plan = fx.Plan(accumulate=2, flush=flush)
    (loader,) = loaders(torch.arange(5), 1, plan, batch_size=2)
    batches = [batch for epoch in loader.epochs(2) for batch in epoch]
    assert [batch.position.micro for batch in batches] == micros
    assert [batch.position.updates for batch in batches] == updates
    assert [batch.window_rows for batch in batches] == window_rows


def test_a_window_entered_in_its_middle_has_an_unknown_size():
    (loader,) = loaders(torch.arange(12), 1, fx.Plan(accumulate=3), batch_size=2)
    rest = loader.at(positions(loader)[0])
    assert [batch.window_rows for batch in rest] == [None, None, 6, 6, 6]


@pytest.mark.parametrize("shuffle", [False, True])
def test_another_world_goes_on_with_the_next_row(shuffle):
    kw = {"batch_size": 2, "shuffle": shuffle}
    (alone,) = loaders(torch.arange(11), 1, batch_size=11, shuffle=shuffle)
    order = next(iter(alone)).data.tolist()
    cut = positions(loaders(torch.arange(11), 2, **kw)[0])[0]
    left = [list(loader.at(cut)) for loader in loaders(torch.arange(11), 3, **kw)]
    real = [
        row for step in zip(*left, strict=True) for b in step for row in b.data[b.valid].tolist()
    ]
    assert real == order[4:]
    assert left[2][-1].data.tolist() == order[3:5]  # padding counts from the epoch's start


def test_epochs_go_on_up_to_epoch_n_of_the_run():
    (loader,) = loaders(torch.arange(4), 1, batch_size=2)
    cut = next(iter(loader)).position
    assert [len(epoch) for epoch in loader.at(cut).epochs(3)] == [1, 2, 2]
    assert [e.position.epoch for e in loader.at(fx.Position(epoch=2)).epochs(3)] == [2]
    assert list(loader.at(fx.Position(epoch=3)).epochs(3)) == []


@pytest.mark.parametrize("end", [fx.Position(index=4, is_last=True), fx.Position(index=4)])
def test_from_the_end_of_an_epoch_the_next_one_follows(end):
    (loader,) = loaders(torch.arange(4), 1, batch_size=2)
    assert list(loader.at(end)) == [] and len(loader.at(end)) == 0
    assert [epoch.position.epoch for epoch in loader.at(end).epochs(3)] == [1, 2]


def test_epochs_made_before_any_ran_stand_where_they_would():
    for plan in (fx.Plan(), fx.Plan(accumulate=2, flush=False), fx.Plan(accumulate=3)):
        (loader,) = loaders(torch.arange(7), 1, plan, batch_size=2)
        ahead = list(loader.epochs(3))
        for late, one in zip(ahead, loader.epochs(3), strict=True):
            assert late.position == one.position
            assert [(b.position, b.window_rows) for b in late] == [
                (b.position, b.window_rows) for b in one
            ]


def test_after_a_break_the_next_epoch_counts_what_was_seen():
    (loader,) = loaders(torch.arange(10), 1, fx.Plan(accumulate=2), batch_size=2)
    seen = []
    for epoch in loader.epochs(2):
        for number, batch in enumerate(epoch):
            seen.append(batch)
            if number == 2:
                break
    assert [b.position.samples for b in seen] == [2, 4, 6, 8, 10, 12]
    # The window that was left open takes the first batch of the next epoch in.
    assert [b.position.updates for b in seen] == [0, 1, 1, 2, 2, 3]
    assert [b.window_rows for b in seen] == [4, 4, 4, 4, 4, 4]


def test_an_epoch_that_is_skipped_counts_nothing():
    (loader,) = loaders(torch.arange(8), 1, batch_size=2)
    for number, epoch in enumerate(loader.epochs(4)):
        if number in (0, 2):
            continue
        *_, last = epoch
        assert last.position == fx.Position(
            epoch=number,
            index=8,
            samples=8 if number == 1 else 16,
            updates=4 if number == 1 else 8,
            is_last=True,
        )


def test_skipping_many_epochs_is_cheap():
    (loader,) = loaders(torch.arange(2), 1)
    *_, last = loader.epochs(20_000)
    assert last.position == fx.Position(epoch=19_999)
    assert len(list(last)) == 2


def test_an_open_window_and_rows_seen_survive_a_skipped_epoch():
    (loader,) = loaders(torch.arange(10), 1, fx.Plan(accumulate=2), batch_size=2)
    start = fx.Position(epoch=1, index=6, samples=16, updates=8, micro=1)
    rest = list(loader.at(start).epochs(4))
    assert [epoch.position.epoch for epoch in rest] == [1, 2, 3]
    first = next(iter(rest[2])).position
    assert first == fx.Position(epoch=3, index=2, samples=18, updates=9)


def test_the_same_loader_gives_the_same_epoch_again():
    (loader,) = loaders(torch.arange(4), 1, batch_size=2)
    assert [b.position for b in loader] == [b.position for b in loader]


# Ranks without rows


def test_a_rank_that_ends_early_gets_rows_that_count_for_nothing():
    first, second = loaders(torch.arange(7), 2, fx.Plan(even="uneven", accumulate=2), batch_size=3)
    mine, theirs = list(first), list(second)
    assert [b.position for b in mine] == [b.position for b in theirs]
    last = theirs[-1]
    assert (last.rows, last.sizes, last.window_rows) == ((1, 0), (1, 0), 7)
    assert last.data.tolist() == [2, 3, 4] and last.valid.tolist() == [False] * 3


def test_a_rank_without_any_row_takes_part_with_weight_zero():
    found = [
        list(mine) for mine in loaders(torch.arange(2), 3, fx.Plan(even="uneven"), batch_size=2)
    ]
    assert [[b.data.tolist() for b in mine] for mine in found] == [[[0, 1]], [[0, 1]], [[0, 1]]]
    assert [b.valid.tolist() for (b,) in found] == [[True] * 2, [False] * 2, [False] * 2]
    assert {b.sizes for (b,) in found} == {(2, 0, 0)}
    assert [len(m) for m in loaders(torch.arange(2), 3, fx.Plan(even="uneven"), batch_size=2)] == [
        1,
        1,
        1,
    ]


# Second passes


def test_a_second_shuffled_pass_warns_once_and_names_epochs():
    (loader,) = loaders(torch.arange(4), 1, batch_size=2, shuffle=True)
    next(iter(loader))  # a look is not a pass
    first = [batch.data.tolist() for batch in loader]
    with pytest.warns(UserWarning, match=r"loader\.epochs") as caught:
        again = [batch.data.tolist() for batch in loader]
    assert again == first
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_with_set_epoch_warns_if_it_shuffles(shuffle):
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0, shuffle=shuffle)
    plan = fx.Plan(data=fx.Data(source="sharded"))
    (loader,) = loaders(range(8), 1, plan, sampler=sampler)
    list(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    assert len(caught) == shuffle


def test_a_broken_off_pass_counts():
    (loader,) = loaders(torch.arange(6), 1, batch_size=2, shuffle=True)
    for number, _ in enumerate(loader):
        if number:
            break
    with pytest.warns(UserWarning, match="second pass over epoch 0"):
        next(iter(loader))


def test_second_passes_in_a_fixed_order_and_new_epochs_do_not_warn():
    (plain,) = loaders(torch.arange(4), 1, batch_size=2)
    (shuffled,) = loaders(torch.arange(4), 1, batch_size=2, shuffle=True)
    for _ in range(2):
        list(plain)
    orders = {tuple(b.data.tolist()) for e in shuffled.epochs(6) for b in e}
    assert len(orders) > 3


# Wrong calls


class _Counting(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: fx.shard([1, 2], c), r"takes a torch DataLoader, found list.*DataLoader\("),
        (lambda c: fx.shard(torch.arange(3), c), "found Tensor"),
        (lambda c: fx.shard(TensorDataset(torch.arange(3)), c), "found TensorDataset"),
        (lambda c: fx.shard(DataLoader([1]), 2), "ctx is a int, not a context"),
        (lambda c: fx.shard(DataLoader([1]), fx.Plan(), c), "ctx is a Plan"),
        (lambda c: fx.shard(DataLoader([1]), c, "ddp"), "plan is a str, not an"),
        (lambda c: fx.shard(fx.shard(DataLoader([1]), c), c), "sharded already"),
        (lambda c: fx.shard(DataLoader([1]), c).at(3), "found int"),
        (lambda c: fx.shard(DataLoader([1]), c).epochs(-1), "number of epochs"),
        (lambda c: fx.shard(DataLoader([1]), c).epochs(True), "number of epochs"),
        (lambda c: list(fx.shard(DataLoader([1]), c).at(fx.Position(index=5))), "other data"),
        (lambda c: list(fx.shard(DataLoader(_Counting()), c).at(fx.Position(index=5))), "other"),
        (lambda c: len(fx.shard(DataLoader(_Counting()), c)), "no length"),
    ],
)
def test_wrong_calls_say_what_to_do(call, says):
    with pytest.raises(fx.DataError, match=says):
        call(DistContext())


def test_an_unknown_length_does_not_stop_list():
    (loader,) = loaders(_Counting(), 1)
    assert [batch.data.tolist() for batch in list(loader)] == [[0], [1], [2]]
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize(("size", "ways"), [(10, "8 or 12"), (3, "4")])
def test_a_global_batch_that_does_not_divide_names_sizes_that_do(size, ways):
    for ctx in world(4):
        with pytest.raises(fx.DataError, match=f"Use batch_size={ways}, or"):
            fx.shard(DataLoader(range(40), batch_size=size), ctx, fx.Plan(batch="global"))


def test_a_distributed_sampler_is_refused():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(fx.DataError, match="without it") as caught:
        fx.shard(DataLoader(range(8), sampler=sampler), DistContext())
    assert 'source="sharded"' in str(caught.value)
