"""Profiles of several ranks: one trace per rank, and which rank the others wait for."""

import gzip
import json
import time

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from fxtrain.ops.transport.exchange import CallState
from fxtrain.profiling import summary
from tests.profiling._dry_runs import OLD_TORCH

pytestmark = pytest.mark.skipif(
    OLD_TORCH,
    reason="with torch 2.9 for CUDA and no GPU, no traces were written",
)
NAP_S = 0.05


def _loss_of(ctx, slow):
    """A loss that one rank computes only when the other has, and waits for its gradients."""

    def loss(model, x):
        key = f"waits/{x.position.epoch}/{x.position.index}/{ctx.comm.slot(CallState).count}"
        if ctx.rank == slow:
            ctx.comm.store.wait([key])
            time.sleep(NAP_S)
        out = model(x.data).square().mean()
        if slow is not None and ctx.rank != slow:
            ctx.comm.store.set(key, "")
        return out

    return loss


def _train(ctx, spec, slow=None):
    torch.manual_seed(0)
    net, plan = nn.Linear(4, 4), fx.Plan(profile=spec)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    fns = fx.StepFns(model=model, loss=_loss_of(ctx, slow))
    loader = fx.shard(DataLoader(torch.randn(16, 4), batch_size=1), ctx, plan)
    with fx.profile(ctx, plan) as trace:
        for batch in loader:
            fx.step(ctx, batch, fns)
            trace.step()
    return trace.files, trace.summary, net.weight.detach().clone()


def test_ranks_are_summarized_and_the_slowest_is_named(pair, tmp_path):
    spec = fx.Profile(folder=str(tmp_path / "p"), wait=1, warmup=1, active=2, repeat=2)
    plain = pair.run(_train, None)
    found = pair.run(_train, spec, 1)
    for (files, together, weight), (_, nothing, unprofiled) in zip(found, plain, strict=True):
        assert nothing is None
        assert torch.equal(weight, unprofiled)
        assert together == found[0][1] == summary(spec.folder)
        assert len(files) == 2
    names = sorted(
        path.relative_to(spec.folder).as_posix() for files, *_ in found for path in files
    )
    assert names == [f"cycle-00{c}/rank-0000{r}.json.gz" for c in (0, 1) for r in (0, 1)]
    together = found[0][1]
    fast, slow = together.ranks
    assert (fast.rank, slow.rank, together.slowest) == (0, 1, 1)
    assert len(fast.steps) == len(slow.steps) == 4
    assert slow.total.idle_ns >= 4 * NAP_S * 0.9e9
    assert fast.total.communication_ns > slow.total.communication_ns


def _refusals(ctx, specs):
    """What `fx.profile` says to different settings by rank."""
    found = []
    for mine in specs:
        try:
            with fx.profile(ctx, mine[ctx.rank]):
                found.append("nothing")
        except fx.FxError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_ranks_refuse_together(pair, tmp_path):
    (tmp_path / "file").write_text("")
    spec = fx.Profile(folder=str(tmp_path / "p"))
    taken = attrs.evolve(spec, folder=str(tmp_path / "file"))
    specs = [(spec, attrs.evolve(spec, wait=7)), (spec, None), (taken, taken)]
    left, right = pair.run(_refusals, specs)
    assert left == right
    words = ["profile.wait", "profile", "Choose another folder"]
    for text, word in zip(left, words, strict=True):
        assert word in text, text


def test_only_the_chosen_ranks_are_profiled(pair, tmp_path):
    spec = fx.Profile(folder=str(tmp_path / "p"), wait=0, warmup=0, active=2, ranks=(1,))
    (none, seen, _), (files, together, _) = pair.run(_train, spec)
    assert none == ()
    assert [file.name for file in files] == ["rank-00001.json.gz"]
    assert seen == together
    assert [one.rank for one in together.ranks] == [1]
    assert together.slowest is None


def _reduce_in_every_step(ctx, spec):
    events = []
    with fx.profile(ctx, spec) as trace:
        for _ in range(6):
            value = torch.ones(3) * (ctx.rank + 1)
            events.append(ops.reduce(value, ctx, op="sum").tolist())
            events.append(ops.gather_objects("x" * 20_000 * (ctx.rank + 1), ctx)[1][:1])
            trace.step()
    names = [
        event.get("name", "")
        for file in trace.files
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
    ]
    return names, trace.summary, events


def test_messages_in_flight_when_the_profiler_stops_have_no_events(pair, tmp_path):
    # torch 2.13 writes the end of an event into freed memory if the profiler has stopped.
    spec = fx.Profile(folder=str(tmp_path / "p"), wait=0, warmup=1, active=1, repeat=3)
    for names, summary_, values in pair.run(_reduce_in_every_step, spec):
        assert values == [[3.0, 3.0, 3.0], "x"] * 6
        assert not [name for name in names if name in ("gloo:recv", "gloo:send")]
        assert names.count("fxtrain::exchange") >= 3
        assert min(rank.total.communication_ns for rank in summary_.ranks) > 0


def _of_a_block(ctx, spec, failing):
    def on_trace_ready(trace):
        if ctx.rank == failing:
            raise KeyError("mine")

    try:
        with fx.profile(ctx, spec, on_trace_ready=on_trace_ready) as trace:
            ops.reduce(torch.ones(8, 8) @ torch.ones(8, 8), ctx)
    except (KeyError, fx.CollectiveError) as error:
        return type(error).__name__, str(error)
    counts = {one.key: one.count for one in trace.key_averages()}
    return counts.get("aten::mm", 0), len(trace.summary.ranks)


def test_a_block_without_steps_is_recorded_on_chosen_ranks(pair, tmp_path):
    spec = fx.Profile(folder=str(tmp_path / "p"), active=None, ranks=(1,))
    assert pair.run(_of_a_block, spec, 0) == [(0, 1), (1, 1)]  # rank 0 records nothing


def test_an_error_of_a_function_for_traces_reaches_every_rank(pair, tmp_path):
    spec = fx.Profile(folder=str(tmp_path / "p"), active=None)
    first, second = pair.run(_of_a_block, spec, 1)
    assert first[0] == "CollectiveError" and "rank 1: KeyError: 'mine'" in first[1]
    assert second == ("KeyError", "'mine'")
