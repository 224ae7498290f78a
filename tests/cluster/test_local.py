"""Copies that train alone: traffic, buffers, refusals, loops by hand, other numbers of ranks."""

from importlib.util import find_spec

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.ops.transport.exchange import CallState
from fxtrain.testing import LAWS, count_collectives, fake_world
from fxtrain.testing.training import on_mesh
from tests._slow import slow_after

JUMPS = fx.DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)
# Each copy clips its own gradient.
HOLD = [law for law in LAWS if law.__name__ not in ("same_clipped", "one_rank_is_the_loop")]


@pytest.mark.parametrize("law", slow_after(1, HOLD), ids=lambda law: law.__name__)
def test_rounds_of_one_update_are_ddp(pair, law):
    law(pair, fx.Plan(local=fx.LocalSGD(every=1)))


def test_an_outer_optimizer_may_jump(pair):
    LAWS[0](pair, fx.Plan(local=JUMPS))


# What a parameter could break that is whole beside shards.
BESIDE_SHARDS = ("same_by_tokens", "frozen_and_tied_stay", "resumes_where_it_stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "ignore"),
    [(law, ()) for law in HOLD]
    + [(law, ("gain",)) for law in HOLD if law.__name__ in BESIDE_SHARDS],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_copies_may_be_sharded(clusters, law, ignore):
    plan = fx.Plan(strategy=fx.FSDP(ignore=ignore), local=fx.LocalSGD(every=1))
    law(clusters[4], plan, fx.Mesh(replicate=-1, shard=2))


@pytest.mark.slow
def test_one_copy_is_the_loop(clusters):
    for law in LAWS:
        law(clusters[1], fx.Plan(local=fx.DiLoCo(every=2)))


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def _start(ctx, plan, seed=0, count=48):
    net = _net()
    with torch.no_grad():
        net[0].weight.add_(ctx.rank)  # rank 0's count
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05))
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    loader = fx.shard(DataLoader(TensorDataset(rows), batch_size=4, shuffle=True), ctx, plan)
    return model, loader, fx.StepFns(model=model, loss=lambda m, batch: _loss(m, batch[0]))


def _loss(model, x):
    return F.cross_entropy(model(x), (x[:, 0] > 0).long())


def _values(model):
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def _counted(ctx, plan):
    model, loader, fns = _start(ctx, plan)
    counts = []
    for epoch in loader.epochs(2):
        for batch in epoch:
            with count_collectives() as traffic:
                fx.step(ctx, batch, fns)
            counts.append((traffic.counts, traffic.bytes))
    return counts, _values(model)


def test_between_averages_nothing_is_sent(pair):
    # Running statistics, and twice the weight.
    size = sum(p.numel() for p in _net().parameters()) + 1 + 12 + 1
    round_end = {"all_reduce": 2, "broadcast": 1}, {"all_reduce": 4 * size, "broadcast": 8}
    alone = ({}, {})
    for outer in (fx.LocalSGD(every=4), fx.DiLoCo(every=4)):
        answers = pair.run(_counted, fx.Plan(local=outer))
        for counts, values in answers:
            # Six batches an epoch, whose end is the end of a round too.
            wanted = [alone] * 3 + [round_end, alone, round_end, alone] + [round_end]
            assert counts == wanted + [alone] * 3 + [round_end]
            assert all(torch.equal(value, answers[0][1][name]) for name, value in values.items())
            assert values["1.num_batches_tracked"] == 12


def test_fragments_are_sent_in_turn_and_in_eight_bits(pair):
    local = fx.DiLoCo(every=4, fragments=2, delay=1, compress="int8")
    # Blocks of 1024 integers with a scale, and the replica's weight.
    send = {"all_gather": 1}, {"all_gather": 1024 + 4 + 8}
    buffers = {"all_reduce": 1, "broadcast": 1}, {"all_reduce": 4 * (12 + 1), "broadcast": 8}
    for counts, values in pair.run(_counted, fx.Plan(local=local)):
        with_buffers = send[0] | buffers[0], send[1] | buffers[1]
        assert counts[:4] == [({}, {}), send, ({}, {}), with_buffers]
        # The fragment under way is applied where the data ends, and the other one is averaged.
        assert counts[4] == ({}, {})
        assert values["1.num_batches_tracked"] == 12


def _groups_of_averages(ctx, mesh, plan):
    """By step, whether it opened a group, and whether a group of the context sent an average."""
    seen, start = [], dist.all_reduce

    def recorded(tensor, *args, group, **kwargs):
        sent.append(group)
        return start(tensor, *args, group=group, **kwargs)

    with on_mesh(ctx, mesh) as placed, pytest.MonkeyPatch.context() as patch:
        axes = [placed.axis(name).comm for name in ("data", "loss", "replicate", "shard")]
        shared = {comm.group for comm in (placed.comm, *axes)}
        model, loader, fns = _start(placed, plan)
        patch.setattr(dist, "all_reduce", recorded)
        for batch in loader:
            sent, opened = [], len(placed.comm.state.opened_groups)
            fx.step(placed, batch, fns)
            opened = len(placed.comm.state.opened_groups) - opened
            seen.append((opened, [group in shared for group in sent if group is not None]))
        fx.unwrap(model)
    return seen


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_under_way_has_a_process_group_of_its_own_when_it_is_first_used(clusters, ranks):
    mesh = fx.Mesh(replicate=2, shard=ranks // 2)
    strategy = fx.DDP() if ranks == 2 else fx.FSDP()
    late = fx.Plan(strategy=strategy, local=fx.DiLoCo(every=2, delay=1))
    for seen in clusters[ranks].run(_groups_of_averages, mesh, late):
        opened = [count for count, _ in seen]
        assert sum(opened) == 1
        assert opened[1] == 1  # the update after which the first average is sent
        assert [shared[-1:] for _, shared in seen[:2]] == [[], [False]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 2, "fragments": 3}, "Use at most fragments=2"),
        ({"every": 2, "delay": 2}, "Use at most delay=1"),
    ],
)
def test_fragments_and_delays_that_no_round_has_room_for(options, words):
    with pytest.raises(fx.PlanError, match=words):
        fx.DiLoCo(**options)


def _one_average(ctx, local):
    net = nn.Module()
    net.narrow = nn.Parameter(torch.full((3,), 1.0 + ctx.rank, dtype=torch.bfloat16))
    net.wide = nn.Parameter(torch.full((2,), 1.0 + ctx.rank, dtype=torch.float64))
    net.phase = nn.Parameter(torch.full((2,), 1j * (1 + ctx.rank)))
    net.register_buffer("seen", torch.tensor([ctx.rank == 0, True]))
    net.register_buffer("count", torch.tensor(7 + ctx.rank, dtype=torch.int16))
    model = fx.wrap(net, ctx, fx.Plan(local=local))
    with torch.no_grad():
        for value in (*net.parameters(), net.count):
            value.add_(ctx.rank)
        net.seen.logical_xor_(torch.tensor(ctx.rank == 1))
    with count_collectives() as traffic:
        fx.ops.average(model)
    return {name: (t.dtype, t.tolist()) for name, t in net.state_dict().items()}, traffic.counts


def test_every_format_is_averaged_exactly(pair):
    for local in (fx.LocalSGD(every=2), fx.DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)):
        for values, counts in pair.run(_one_average, local):
            assert values == {
                "narrow": (torch.bfloat16, [1.5] * 3),
                "wide": (torch.float64, [1.5] * 2),
                "phase": (torch.complex64, [0.5 + 1j] * 2),
                "seen": (torch.bool, [True, True]),
                "count": (torch.int16, 7),
            }
            # float32 and float64; bool and int16
            assert counts == {"all_reduce": 2, "broadcast": 2}


def _hand_loop(ctx, plan):
    model, loader, _ = _start(ctx, plan)
    for epoch in loader.epochs(1):
        for batch in epoch:
            with fx.ops.sync(model):
                fx.ops.backward(_loss(model, batch[0]), model)
            fx.ops.apply(model)
            fx.ops.average(model, batch.position)
    by_hand = _values(model)
    model, loader, fns = _start(ctx, plan)
    for batch in loader:
        fx.step(ctx, batch, fns)
    return [name for name, value in _values(model).items() if not torch.equal(value, by_hand[name])]


def test_a_loop_by_hand_is_the_step(pair):
    assert pair.run(_hand_loop, fx.Plan(local=fx.DiLoCo(every=2))) == [[], []]


BAD = {
    "one copy": (fx.FSDP(), fx.Mesh(shard=4), "replicate=1 and shard=4"),
    "no mesh": (fx.FSDP(shard=2), None, "shard=1. Use fx.detect"),
    "deepspeed": (fx.DeepSpeed(), None, "does not support that"),
    "mesh": (fx.DDP(), fx.Mesh(tensor=2), "the mesh has tensor=2"),
    "zero": (fx.DDP(shard_optimizer=True), None, "Remove one of them"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_does_not_fit_is_refused_once_plans_are_compared(name):
    strategy, mesh, words = BAD[name]
    if name == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    with fake_world(4, mesh=mesh) as ctx:
        calls = ctx.comm.slot(CallState).count
        plan = fx.Plan(strategy=strategy, local=fx.LocalSGD(every=2))
        with pytest.raises(fx.PlanError, match=words):
            fx.wrap(_net(), ctx, plan)
        assert ctx.comm.slot(CallState).count == calls + 1


HYBRID = fx.Mesh(replicate=-1, shard=2)
PLACES = {
    "two copies": (2, fx.DDP(), None),
    "four copies": (4, fx.DDP(), None),
    "sharded copies": (4, fx.FSDP(), HYBRID),
    "one": (1, fx.DDP(), None),
    "sharded": (2, fx.FSDP(), None),
}
ROUNDS = fx.Plan(local=fx.DiLoCo(every=4), seed=3)
LATE = fx.DiLoCo(every=4, fragments=2, delay=2, compress="int8")


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _state(model):
    found = {name: _whole(value) for name, value in model.module.state_dict().items()}
    state = model.strategy.state(model)
    kept = {key: _whole(t) for key, t in state.tensors.items() if key.kind == "round"}
    return found, kept


def _save(ctx, folder, plan, mesh, count):
    """Stop after five of six updates, and what going on from there gives."""
    with on_mesh(ctx, mesh) as placed:
        model, loader, fns = _start(placed, plan, count=count)
        batches = iter(loader)
        for _ in range(5):
            report = fx.step(placed, next(batches), fns)
        fx.save(folder, placed, model, position=report.position)
        stopped = _state(model)
        fx.step(placed, next(batches), fns)
        return stopped, _state(model)


def _restore(ctx, folder, plan, mesh, count):
    with on_mesh(ctx, mesh) as placed:
        model, _, fns = _start(placed, plan, seed=1)
        restored = fx.restore(folder, placed, model)
        found = _state(model)
        loader = _start(placed, plan, count=count)[1].at(restored.position)
        for batch in loader:
            fx.step(placed, batch, fns)
        return found, _state(model)


@pytest.mark.slow
@pytest.mark.parametrize("local", [ROUNDS.local, LATE], ids=["together", "fragments"])
@pytest.mark.parametrize("first", ["two copies", "sharded copies"])
def test_an_open_round_goes_on_here_and_elsewhere(clusters, first, local, tmp_path):
    n, strategy, mesh = PLACES[first]
    rounds = attrs.evolve(ROUNDS, local=local)
    plan = attrs.evolve(rounds, strategy=strategy)
    answers = clusters[n].run(_save, str(tmp_path), plan, mesh, 24 * n)
    one, other = answers[0][0][0], answers[-1][0][0]
    assert not torch.equal(one["0.weight"], other["0.weight"])
    anchors = answers[0][0][1]
    for place, (ranks, strategy, mesh) in PLACES.items():
        for local in (rounds.local, None) if ranks > 1 and place != "sharded" else (None,):
            plan = attrs.evolve(rounds, strategy=strategy, local=local)
            got = clusters[ranks].run(_restore, str(tmp_path), plan, mesh, 24 * n)
            if local is not None and place == first:
                _same_bits(got, answers)
                continue
            for (values, kept), _ in got:
                for name, _ in _net().named_parameters():
                    torch.testing.assert_close(values[name], (one[name] + other[name]) / 2)
                assert kept.keys() == (anchors.keys() if local else set())
                assert all(torch.equal(value, anchors[name]) for name, value in kept.items())
            ends = [end for _, (end, _) in got]
            assert all(torch.equal(end["0.weight"], ends[0]["0.weight"]) for end in ends)


def _same_bits(got, wanted):
    for mine, theirs in zip(got, wanted, strict=True):
        for found, right in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1]), strict=True):
            assert found.keys() == right.keys()
            assert [name for name in right if not torch.equal(found[name], right[name])] == []
