"""Failures on the device: memory that runs out, ranks that leave or never join."""

import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from fxtrain.ops import closing, opening
from fxtrain.state import CommState
from fxtrain.state.topology import Topology
from tests.devices._device import STAND_IN, differ_once_verified, is_gpu, keep_busy
from tests.devices._training import loss_of, parts, rows

pytestmark = pytest.mark.timeout(300)


def _exhaust(ctx):
    if not is_gpu(ctx):
        raise torch.OutOfMemoryError
    return torch.empty(1 << 50, device=ctx.device)


def _exhausted(ctx):
    """A step that runs out of memory, and one after it."""
    loader, fns = parts(ctx, fx.Plan())
    batches = iter(loader)

    def greedy(model, batch):
        return loss_of(model, batch) + _exhaust(ctx).sum()

    try:
        fx.step(ctx, next(batches), fx.StepFns(model=fns.model, loss=greedy))
    except torch.OutOfMemoryError:
        return 0 < float(fx.step(ctx, next(batches), fns).loss) < 10
    return False


def test_running_out_of_memory_is_torchs_error(one):
    assert one.run(_exhausted) == [True]


def _batch_size(ctx):
    """The largest batch size, where more than 48 rows exhaust the memory; what is left of it."""

    def trial(size, plan):
        loader = fx.shard(DataLoader(rows(), batch_size=size), ctx, plan)
        held = torch.empty(1 << 20, device=ctx.device)
        if size > 48:
            held = _exhaust(ctx)
        _, fns = parts(ctx, plan)
        fx.step(ctx, next(iter(loader)), fns)
        return held.numel()

    before = torch.cuda.memory_allocated() if is_gpu(ctx) else 0
    size, plan = fx.tuning.find_batch_size(ctx, trial, 128, fx.Plan(), shrink=0.5)
    after = torch.cuda.memory_allocated() if is_gpu(ctx) else 0
    return size, plan.accumulate, after - before < 1 << 24


def test_a_batch_size_that_fits_is_found(one):
    ((size, accumulate, freed),) = one.run(_batch_size)
    assert size <= 48 and size * accumulate == 128 and freed


def _left(ctx):
    """Seconds until a rank that fails has left a group whose kernels are still running."""
    dist.destroy_process_group()
    topology, store = Topology(rank=0, world_size=1), dist.HashStore()
    opening.open_group(topology, ctx.device, store, timedelta(seconds=60))  # as detect does
    close = closing.make_close(CommState(), 5.0, topology=topology, store=store)
    keep_busy(ctx, 30.0)
    dist.all_reduce(torch.ones(1, device=ctx.device))
    dist.all_reduce(torch.ones(1, device="cpu"))
    started = time.monotonic()
    close(ValueError("bad"))
    return time.monotonic() - started, dist.is_initialized()


def test_a_rank_that_fails_leaves_at_once(nccl):
    try:
        ((seconds, open_still),) = nccl.run(_left)
        assert seconds < 30  # for which the kernels run
        assert not open_still
    finally:
        nccl.close()


def _mismatched(ctx, kind):
    """What is raised where the ranks disagree, and whether the next call works."""
    mine = torch.ones(2, device=ctx.device)
    try:
        if kind == "call" and ctx.rank:
            ops.reduce(mine, ctx, op="sum")
        elif kind == "dtype" and ctx.rank:
            ops.gather(mine.double(), ctx)
        elif kind == "device" and ctx.rank:
            ops.gather(mine.cpu(), ctx)
        else:
            ops.gather(mine, ctx)
    except fx.CollectiveError as error:
        return str(error), ops.reduce(1, ctx, op="sum")
    return "", ops.reduce(1, ctx, op="sum")


@pytest.mark.parametrize(
    ("kind", "words"), [("call", "reduce"), ("dtype", "float64"), ("device", "@device")]
)
def test_a_mismatch_is_named_on_every_rank(two, kind, words):
    found = two.run(_mismatched, kind)
    assert [ranks for _, ranks in found] == [2, 2]
    if kind != "device" or STAND_IN != "cpu":
        assert all(words in message for message, _ in found)


def _absent(ctx):
    """Rank 1 does not join in time; the error of rank 0."""
    short = fx.detect({}, device=ctx.device, timeout_s=3)
    if ctx.rank:
        time.sleep(6)
        return ""
    try:
        ops.gather(torch.ones(2, device=ctx.device), short)
    except fx.CollectiveError as error:
        return str(error)
    return ""


def test_a_rank_that_never_joins_is_named(two):
    try:
        words, _ = two.run(_absent)
        assert "rank 1: never joined" in words, words
    finally:
        two.close()


def _differs_again(ctx):
    return *differ_once_verified(ctx), ops.reduce(1, ctx, op="sum")


def test_a_call_that_differs_after_it_was_verified_is_named_at_once(two):
    (text, seconds, ranks), (other, *_) = two.run(_differs_again)
    assert text == other
    assert "the ranks called different collectives" in text
    assert seconds < two.timeout_s / 2
    assert ranks == 2
