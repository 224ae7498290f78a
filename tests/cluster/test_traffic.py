"""How many collectives a call makes, and of how many bytes."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.testing import count_collectives, fake_world


def _count(ctx, fn_name, size):
    kinds = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
    tree = {f"{k}{i}": torch.ones(size).to(k) for k in kinds for i in range(4)}
    calls = {
        "gather": lambda: ops.gather(tree, ctx),
        "reduce": lambda: ops.reduce(tree, ctx, op="max"),
        "broadcast": lambda: ops.broadcast(tree, ctx),
        "any_rank": lambda: ops.any_rank(False, ctx),
        "barrier": lambda: ops.barrier(ctx),
    }
    with count_collectives() as traffic:
        calls[fn_name]()
    return traffic.counts


SMALL = ("gather", "reduce", "broadcast", "any_rank", "barrier")
PACKET = {"send": 1, "recv": 1}  # of two ranks


def _packets(ranks):
    """The messages of a rank, by which all ranks get the packets of each other."""
    rounds = (ranks - 1).bit_length()
    return {"send": rounds, "recv": rounds}


@pytest.mark.slow
def test_small_trees_of_any_dtypes_take_one_packet(clusters):
    for name in SMALL:
        assert clusters[2].run(_count, name, 8) == [_packets(2)] * 2
        assert clusters[4].run(_count, name, 8) == [_packets(4)] * 4


def test_packets_of_few_ranks_take_the_logarithm_of_their_number():
    for ranks in (2, 3, 8):
        with fake_world(ranks), fx.detect(env={}, device="cpu") as ctx:
            for name in SMALL:
                assert _count(ctx, name, 8) == _packets(ranks)


def test_many_ranks_send_as_many_messages_as_the_logarithm_of_their_number():
    for ranks, rounds in ((9, 4), (100, 7), (4096, 12)):
        # Rank 0 sends a row along a tree, which others receive.
        sends = {"send": rounds, "recv": rounds}
        with fake_world(ranks), fx.detect(env={}, device="cpu") as ctx:
            assert _count(ctx, "any_rank", 8) == _count(ctx, "barrier", 8) == sends
            assert _count(ctx, "reduce", 8) == {"send": 2 * rounds, "recv": 2 * rounds}
            if ranks < 1000:  # of more, only a smaller tree is sent so
                assert _count(ctx, "gather", 8) == {"send": 2 * rounds, "recv": 2 * rounds}
                assert _count(ctx, "broadcast", 8) == {"send": 2 * rounds, "recv": rounds}


def test_large_trees_take_the_check_and_one_collective_per_dtype_at_most(pair):
    assert pair.run(_count, "gather", 90_000) == [PACKET | {"all_gather": 4}] * 2
    assert pair.run(_count, "broadcast", 9000) == [PACKET | {"broadcast": 4}] * 2
    assert pair.run(_count, "reduce", 9000) == [PACKET | {"all_reduce": 4}] * 2


@pytest.mark.slow
def test_a_gather_that_does_not_fit_in_a_packet_takes_one_collective_more(clusters):
    for ranks in (2, 4):
        counts = _packets(ranks) | {"all_gather": 1}
        assert clusters[ranks].run(_count, "gather", 9000) == [counts] * ranks
    with fake_world(8), fx.detect(env={}, device="cpu") as ctx:
        assert _count(ctx, "gather", 9000) == _packets(8) | {"all_gather": 1}


def test_one_rank_talks_to_nobody(clusters):
    for name in ("gather", "reduce", "broadcast", "any_rank", "barrier"):
        assert clusters[1].run(_count, name, 9000) == [{}]


def _step_counts(ctx, weighted, accumulate):
    x = torch.randn(16, 4)
    plan = fx.Plan(accumulate=accumulate, clip_norm=1.0)
    model = fx.wrap(
        nn.Linear(4, 2), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )

    def loss(model, batch):
        total = F.mse_loss(model(batch[0]), batch[0][:, :2], reduction="sum")
        return fx.Weighted(total, batch[0].numel()) if weighted else total / batch[0].numel()

    fns = fx.StepFns(model=model, loss=loss)
    (epoch,) = fx.shard(DataLoader(TensorDataset(x), batch_size=2), ctx, plan).epochs(1)
    counts = []
    for batch in epoch:
        with count_collectives() as traffic:
            fx.step(ctx, batch, fns)
        counts.append(traffic.counts)
    return counts


def test_a_step_makes_the_collectives_of_ddp_and_hides_none(pair):
    grads, weight = {"all_reduce": 1}, PACKET
    first = grads | PACKET  # in which the ranks agree on the order of gradients
    for counts in pair.run(_step_counts, False, 1):
        assert counts == [first, *[grads] * 3]
    for counts in pair.run(_step_counts, False, 2):
        assert counts == [{}, first, {}, grads]
    for counts in pair.run(_step_counts, True, 1):
        both = {"all_reduce": 2}
        assert counts == [both | PACKET, *[both] * 3]
    for counts in pair.run(_step_counts, True, 2):
        assert counts == [weight, grads | {"send": 2, "recv": 2}, weight, weight | grads]


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _costs(ctx, weighted):
    """Operators of a step, and functions that it enters outside of torch and the transport."""
    model = fx.wrap(nn.Linear(8, 4), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    batch = next(iter(fx.shard(DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4), ctx)))

    def loss(model, batch):
        out = model(batch[0])
        return fx.Weighted(out.sum(), len(out)) if weighted else out.sum()

    fns, entered = fx.StepFns(model=model, loss=loss), []

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and "/torch/" not in name and "/transport/" not in name:
            entered.append(name)

    fx.step(ctx, batch, fns)
    with _Operators() as operators:
        fx.step(ctx, batch, fns)
    sys.setprofile(note)
    try:
        fx.step(ctx, batch, fns)
    finally:
        sys.setprofile(None)
    return operators.count, len(entered)


def test_a_weighted_loss_adds_few_operators_and_calls(pair):
    mean, weighted = pair.run(_costs, False)[0], pair.run(_costs, True)[0]
    # By hand: an all-reduce of the weight, two products, and a quotient. A packet takes a few more.
    assert weighted[0] - mean[0] <= 16
    assert weighted[1] - mean[1] <= 16
