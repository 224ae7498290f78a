"""Replicas that differ by a bit: found under every strategy, named on every rank, healed."""

import platform
import re
import time

import attrs
import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.backends import built_in
from fxtrain.backends.wrapping import problems_of
from fxtrain.ops.transport.exchange import CallState
from fxtrain.ops.whole_tensors import is_sharded
from fxtrain.testing import Transformer, fake_world
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import DOWN, PIPELINES, UP

HYBRID = fx.Mesh(replicate=2, shard=2)
TENSOR = fx.FSDP(wrap=("Block",), tensor=fx.TP(styles=(UP, DOWN)))
CASES = {
    "ddp": (2, None, fx.DDP()),
    "four": (4, None, fx.DDP()),
    "sharded states": (2, None, fx.DDP(shard_optimizer=True)),
    "hybrid": (4, HYBRID, fx.FSDP(wrap=("Block",))),
    "tensor": (2, fx.Mesh(replicate=1, tensor=2), TENSOR),
    "tensor and shards": (4, fx.Mesh(replicate=1, shard=2, tensor=2), TENSOR),
    "pipeline": (4, fx.Mesh(replicate=2, pipeline=2), fx.PP()),
}
SLOW = ("four", "hybrid", "tensor and shards", "state", "pipeline")


def _adamw(params):
    return torch.optim.AdamW(params, lr=0.0)  # what was damaged stays as it is


def _loss(model, batch):
    return model(batch.data).square().mean()


def _tensor(model, name):
    """This rank's part of a parameter, or of one of its optimizer states; None without either."""
    parameter = dict(model.module.named_parameters()).get(name.removesuffix(":exp_avg"))
    found = model.optimizer.state[parameter]["exp_avg"] if name.endswith("exp_avg") else parameter
    return found.to_local() if found is not None and is_sharded(found) else found


def _train(ctx, case, name="blocks.1.down.weight", ranks=(), how="raise"):
    """Three updates, each followed by a check; before the second, ranks change one bit of theirs.

    Returns:
        The error, or this rank's part of the tensor after each update; packets that a check sends.
    """
    _, mesh, strategy = CASES[case]
    plan = fx.Plan(strategy=strategy, verify_replicas=2, replicas_differ=how)
    seen = []
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(Transformer(), placed, plan, optimizer=_adamw)
        rows = torch.randint(
            Transformer.VOCABULARY,
            (32, Transformer.LENGTH),
            generator=torch.Generator().manual_seed(0),
        )
        loader = fx.shard(DataLoader(rows, batch_size=2), placed, plan)
        fns = fx.StepFns(model, _loss)
        for update, batch in zip(range(3), loader, strict=False):
            if update == 1 and placed.rank in ranks:
                _tensor(model, name).detach().view(-1).view(torch.int64)[placed.rank] ^= 1
            before = placed.comm.slot(CallState).count
            try:
                fx.step(placed, batch, fns)
            except fx.errors.StepError as error:
                return str(error), None
            found = _tensor(model, name)
            seen.append(None if found is None else found.detach().clone())
            if update == 1:
                exchanges = placed.comm.slot(CallState).count - before
        return seen, exchanges


def _cases(names):
    """With marks: what runs on four ranks is slow where the same runs on two as well."""
    slow = {name: [pytest.mark.slow] if name in SLOW else [] for name in names}
    stages = {"pipeline": [PIPELINES]}
    return [pytest.param(name, marks=slow[name] + stages.get(name, [])) for name in names]


@pytest.mark.parametrize("name", slow_after(2, _cases(CASES)))
def test_equal_replicas_pass_in_one_exchange(clusters, name):
    for seen, exchanges in clusters[CASES[name][0]].run(_train, name):
        assert len(seen) == 3
        assert exchanges <= 1 + (name == "pipeline") * 8  # whose stages exchange losses


# Case, tensor, damaged ranks, and the line that names them.
FOUND = {
    "parameter": ("ddp", "gain", [1], "ranks 0-1: 1 tensor differs between them: gain"),
    "majority": ("four", "gain", [2], "rank 2: 1 tensor differs from those of ranks 0-1, 3: gain"),
    "state": (
        "four",
        "norm.weight:exp_avg",
        [0],
        "rank 0: 1 tensor differs from those of ranks 1-3: optimizer.0.norm.weight.exp_avg",
    ),
    "sharded states": (
        "sharded states",
        "gain",
        [1],
        "ranks 0-1: 1 tensor differs between them: gain",
    ),
    "hybrid": ("hybrid", "gain", [3], "ranks 1, 3: 1 tensor differs between them: gain"),
    "tensor": (
        "tensor",
        "norm.weight",
        [1],
        r"ranks 0-1: \d+ tensors? differs? between.*norm.weig",
    ),
    "pipeline": ("pipeline", "gain", [3], "ranks 2-3: 1 tensor differs between them: gain"),
}


@pytest.mark.parametrize("name", slow_after(2, _cases(FOUND)))
def test_a_changed_bit_is_named_on_every_rank(clusters, name):
    case, tensor, ranks, line = FOUND[name]
    answers = clusters[CASES[case][0]].run(_train, case, tensor, ranks)
    errors = {error for error, _ in answers}
    (error,) = errors
    when = "before" if case == "sharded states" else "after"  # which overwrites parameters
    assert f"Replicas differ {when} update 2" in error
    assert "[FX506]" in error
    assert re.search(line, error), error


def _changed_gradient(ctx):
    """The error of an update whose gradients differ on one rank, after they were averaged."""
    plan = fx.Plan(strategy=fx.DDP(shard_optimizer=True), verify_replicas=1)
    model = fx.wrap(Transformer(), ctx, plan, optimizer=_adamw)
    fx.ops.backward(model(torch.zeros(2, 8, dtype=torch.int64)).square().mean(), model)
    if ctx.rank == 1:
        model.module.gain.grad.view(-1).view(torch.int64)[0] ^= 1
    with pytest.raises(fx.errors.StepError) as found:
        fx.ops.apply(model)
    return str(found.value)


def test_a_changed_gradient_is_found_where_one_rank_updates_for_all(pair):
    for error in pair.run(_changed_gradient):
        assert "Replicas differ before update 1" in error
        assert "1 tensor differs between them: grad.gain" in error


def _on_nodes(ctx):
    return _train(attrs.evolve(ctx, num_nodes=2), "four", "gain", [1])


def test_ranks_of_several_nodes_are_named_with_their_hosts(clusters):
    for error, _ in clusters[4].run(_on_nodes):
        assert f"rank 1 on {platform.node()}: 1 tensor differs from those of ranks 0, 2-3" in error


@pytest.mark.parametrize(
    ("tensor", "ranks"),
    slow_after(1, [("norm.weight:exp_avg", [3]), ("blocks.1.down.weight", [0]), ("gain", [2])]),
)
def test_healed_replicas_have_the_bits_of_most_ranks(clusters, tensor, ranks):
    answers = clusters[4].run(_train, "four", tensor, ranks, "heal")
    alone = clusters[4].run(_train, "four", tensor)
    for (seen, _), (wanted, _) in zip(answers, alone, strict=True):
        for mine, theirs in zip(seen, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_without_a_majority_nothing_is_healed(pair):
    for error, _ in pair.run(_train, "ddp", "blocks.1.down.weight", [1], "heal"):
        assert (
            "No majority of ranks agrees on blocks.1.down.weight, so nothing was overwritten"
            in error
        )


def _fit(ctx, folder, every, found_after):
    """A run whose rank 1 changes a parameter after update 4; the updates that were saved."""
    plan = fx.Plan(verify_replicas=every)
    model = fx.wrap(torch.nn.Linear(4, 1), ctx, plan, optimizer=_adamw)
    loader = fx.shard(DataLoader(torch.ones(64, 4), batch_size=2), ctx, plan)
    reports = fx.fit(
        ctx, fx.StepFns(model, _loss), loader, folder, updates=9, save_every=3, show=False
    )
    with raises_code("FX506", f"update {found_after} "):
        for report in reports:
            if report.updates == 4 and ctx.rank == 1:
                model.module.weight.data[0, 0] += 1
    while fx.latest(folder) is None:  # written in the background
        time.sleep(0.01)
    fx.ops.barrier(ctx)
    return fx.restore(folder, ctx, model).position.updates


@pytest.mark.parametrize(("every", "found_after"), slow_after(1, [(5, 5), (100, 6)]))
def test_no_checkpoint_of_fit_has_replicas_that_differ(pair, every, found_after, tmp_path):
    assert pair.run(_fit, str(tmp_path), every, found_after) == [3, 3]


def test_strategies_without_replicas_in_memory_are_refused():
    plan = fx.Plan(strategy=fx.Offload(), verify_replicas=10)
    with fake_world(2) as ctx:
        (problem,) = problems_of(built_in(fx.Offload), ctx, plan, Transformer())
    assert "Offload has no replicas in memory" in problem
