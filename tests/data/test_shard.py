"""The rows that each rank gets, over contexts made by hand: no processes."""

import warnings
from collections import UserDict
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import fxtrain as fx
from fxtrain.data.to_device import on_device
from fxtrain.state import DistContext
from tests._errors import raises_code
from tests.data._loaders import loaders, world


def rows(dataset, n, plan=fx.Plan(), **kw):  # noqa: B008
    return [[batch.data.tolist() for batch in mine] for mine in loaders(dataset, n, plan, **kw)]


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


def test_a_tiny_dataset_is_repeated_as_often_as_needed():
    assert rows(torch.arange(2), 3, batch_size=3) == [[[0, 1, 0]], [[1, 0, 1]], [[0, 1, 0]]]


def test_drop_last_drops():
    assert rows(torch.arange(7), 2, batch_size=3, drop_last=True) == [[[0, 1, 2]], [[3, 4, 5]]]


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


class _Gpu:
    """In place of `torch.cuda`: kernels end only when the host waits for an event after them."""

    queued = done = 0

    def __init__(self):
        gpu = self

        class Event:
            def __init__(self, **_):
                self.at = 0

            def record(self, _):
                self.at = gpu.queued

            def wait(self, _):
                pass

            def synchronize(self):
                gpu.done = max(gpu.done, self.at)

        self.Event, self.stream = Event, nullcontext
        self.Stream = self.current_stream = lambda _: nullcontext()


class _Graph:
    """A batch that moves itself."""

    def to(self, device):
        return self


def test_the_host_is_at_most_two_batches_ahead_of_a_gpu(monkeypatch):
    gpu, ahead = _Gpu(), []
    for name in ("Event", "Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    ctx = DistContext(device=torch.device("cuda", 0))
    for batches in (1, 1, 3, 1):  # of epochs
        loaded = ((number, (_Graph(),)) for number in range(batches))
        for _ in on_device(loaded, ctx, fx.Plan(), ahead=False):
            gpu.queued += 1
            ahead.append(gpu.queued - gpu.done)
    assert ahead == [1, 2, 2, 2, 2, 2]


def test_only_the_data_axes_split_the_data():
    # Four ranks, tensor=2: ranks 0 and 1 read the same rows.
    data = [DistContext(rank=rank // 2, world_size=2) for rank in range(4)]
    ctxs = [DistContext(rank=rank, world_size=4, axes={"data": data[rank]}) for rank in range(4)]
    found = [[b.data.tolist() for b in fx.shard(DataLoader(torch.arange(4)), c)] for c in ctxs]
    assert found == [[[0], [2]], [[0], [2]], [[1], [3]], [[1], [3]]]


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


class _Counting(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: list(fx.shard([1, 2], c)), r"batches that are ready, and found int, without"),
        (lambda c: fx.shard(torch.arange(3), c), r"a Tensor of rows needs a .*DataLoader\("),
        (lambda c: fx.shard(TensorDataset(torch.arange(3)), c), "a TensorDataset of rows needs"),
        (lambda c: fx.shard(DataLoader([1]), 2), "ctx is a int, not a context"),
        (lambda c: fx.shard(DataLoader([1]), fx.Plan(), c), "ctx is a Plan, not a context"),
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
    with pytest.raises((fx.errors.DataError, fx.errors.ContextError), match=says):
        call(DistContext())


def test_an_unknown_length_does_not_stop_list():
    (loader,) = loaders(_Counting(), 1)
    assert [batch.data.tolist() for batch in list(loader)] == [[0], [1], [2]]
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize(("size", "ways"), [(10, "8 or 12"), (3, "4")])
def test_a_global_batch_that_does_not_divide_names_sizes_that_do(size, ways):
    for ctx in world(4):
        with raises_code("FX400", f"batch_size={ways}"):
            fx.shard(DataLoader(range(40), batch_size=size), ctx, fx.Plan(batch="global"))


def test_a_distributed_sampler_is_refused():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    with raises_code("FX400", 'source="sharded"') as caught:
        fx.shard(DataLoader(range(8), sampler=sampler), DistContext())
    assert 'source="sharded"' in str(caught.value)
