"""Saving and restoring on real ranks: what comes back, what is kept, and who hears of failure."""

import os

import attrs
import numpy as np
import pytest
import torch
from torch import nn

import fxtrain as fx
from tests._errors import raises_code
from tests.checkpoint import _runs


def _with_extra(ctx, folder):
    model = fx.wrap(_runs.net(), ctx)
    ema = nn.Linear(2, 2)
    extra = {
        "best": 0.25,
        "seen": (1, 2.5, None, float("inf")),
        3: torch.arange(4, dtype=torch.bfloat16),
        "np": np.arange(3, dtype=np.int16),
        "files": np.arange(3, dtype=">f4"),  # as formats with another order of bytes have them
        "ema": ema,
        "plan": fx.Plan(accumulate=3),
        "z": torch.complex(torch.ones(2), -torch.ones(2)),
    }
    fx.save(folder, ctx, model, extra=extra, position=fx.Position(updates=3))
    plain = fx.restore(folder, ctx, model).extra
    other = nn.Linear(2, 2)
    template = {**extra, "ema": other, 3: torch.zeros(4, dtype=torch.bfloat16)}
    typed = fx.restore(folder, ctx, model, extra=template).extra
    assert typed["plan"] == fx.Plan(accumulate=3)
    assert typed["ema"] is other
    assert typed[3] is not plain[3] and template[3].tolist() == [0, 1, 2, 3]
    assert plain["ema"].keys() == {"weight", "bias"}
    return plain, torch.equal(other.weight, plain["ema"]["weight"])


def test_the_users_state_comes_back_as_it_was(cluster, tmp_path):
    for plain, same in cluster.run(_with_extra, str(tmp_path)):
        assert same
        assert plain["best"] == 0.25 and plain["seen"] == (1, 2.5, None, float("inf"))
        assert plain[3].dtype == torch.bfloat16 and plain[3].tolist() == [0, 1, 2, 3]
        assert plain["np"].dtype == np.int16 and plain["np"].tolist() == [0, 1, 2]
        assert plain["files"].dtype == np.float32 and plain["files"].tolist() == [0, 1, 2]
        assert plain["z"].tolist() == [1 - 1j, 1 - 1j]
        assert plain["plan"]["accumulate"] == 3


def _shared_on(ctx, folder, rank):
    """The best values are the last ones on one rank only."""
    last = torch.full((3,), 1.0 + ctx.rank)
    best = last if ctx.rank == rank else torch.zeros(3)
    fx.save(folder, ctx, fx.wrap(_runs.net(), ctx), extra={"last": last, "best": best})
    return fx.restore(folder, ctx, fx.wrap(_runs.net(), ctx)).extra["best"].tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_values_that_share_memory_on_some_ranks_are_those_of_rank_0(pair, rank, tmp_path):
    wanted = [float(rank == 0)] * 3
    assert pair.run(_shared_on, str(tmp_path), rank) == [wanted, wanted]


def _spread_without_elements(ctx, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    spread = distribute_tensor(torch.empty(0, 4), mesh, [Shard(1)])
    fx.save(folder, ctx, fx.wrap(_runs.net(), ctx), extra=spread)
    return fx.restore(folder, ctx, fx.wrap(_runs.net(), ctx)).extra.shape


def test_a_sharded_tensor_without_elements(pair, tmp_path):
    assert pair.run(_spread_without_elements, str(tmp_path)) == [(0, 4), (0, 4)]


def _several(ctx, folder):
    plan = fx.Plan(seed=2)
    models = {name: _runs.start(ctx, "plain", plan)[0] for name in ("student", "teacher")}
    with torch.no_grad():
        models["teacher"].module[0].weight.fill_(7)
    fx.save(folder, ctx, models)
    fresh = _runs.start(ctx, "plain", plan)[0]
    fx.restore(folder, ctx, {"teacher": fresh})
    with raises_code("FX603", "critic"):
        fx.restore(folder, ctx, {"critic": fresh})
    with raises_code("FX603", "student, teacher"):
        fx.restore(folder, ctx, fresh)
    return fresh.module[0].weight.mean().item()


def test_several_models_by_name(pair, tmp_path):
    assert pair.run(_several, str(tmp_path)) == [7, 7]


def _names(ctx, folder, updates, keywords):
    model = fx.wrap(nn.Linear(2, 2), ctx)
    for update in updates:
        metric = {"metric": float(update % 5)} if "keep_best" in keywords else {}
        fx.save(folder, ctx, model, position=fx.Position(updates=update), **metric, **keywords)
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    "keywords, kept",
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 2}, [6, 7]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 7]),
        ({"keep_every": 4}, [4, 7]),
        ({"keep_best": 2}, [5, 6, 7]),
        ({"keep_best": 1, "best": "max"}, [4, 7]),
    ],
)
def test_retention(pair, keywords, kept, tmp_path):
    found = pair.run(_names, str(tmp_path), list(range(1, 8)), keywords)[0]
    assert found == [f"update-{update:010d}" for update in kept]


def test_a_second_checkpoint_of_an_update_replaces_the_first_once_it_is_there(pair, tmp_path):
    found = pair.run(_names, str(tmp_path), [5, 3, 3, 3], {})[0]
    assert found == ["update-0000000003.2", "update-0000000005"]
    # The newest is what was committed last, not what has the most updates.
    assert fx.latest(tmp_path) == str(tmp_path / "update-0000000003.2")


@attrs.frozen
class Odd:
    field: object


def _run_only(ctx, folder):
    model = _runs.start(ctx, "plain", fx.Plan())[0]
    fx.save(folder, ctx, model)
    net = _runs.net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    other = fx.wrap(net, ctx)  # no optimizer
    fx.restore(folder, ctx, other)
    return all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_model_without_an_optimizer_takes_the_parameters(pair, tmp_path):
    assert pair.run(_run_only, str(tmp_path)) == [True, True]


def _tied(ctx, folder):
    def make():
        net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        net[1].weight = net[0].weight
        return fx.wrap(net, ctx, optimizer=lambda p: torch.optim.AdamW(p))

    model = make()
    saving = fx.save(folder, ctx, model)
    other = make()
    fx.restore(folder, ctx, other)
    assert other.module[0].weight is other.module[1].weight
    return torch.equal(model.module[0].weight, other.module[1].weight), fx.checkpoint.verify(
        saving.path
    ).size


def test_tied_weights_are_stored_once(pair, tmp_path):
    for same, size in pair.run(_tied, str(tmp_path)):
        assert same
        assert size < 80 + 2 * 22_000


def test_each_number_is_written_once(pair, tmp_path):
    pair.run(_big, str(tmp_path))
    sizes = sorted(
        os.path.getsize(tmp_path / "update-0000000000" / f"rank-0000{r}.safetensors")
        for r in (0, 1)
    )
    numbers = 4 * 1000 * 1000 * 4
    assert numbers < sum(sizes) < numbers + 60_000
    assert sizes[1] - sizes[0] < 1_000


def _big(ctx, folder):
    net = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(4)))
    fx.save(folder, ctx, fx.wrap(net, ctx))


def _in_memory(ctx, url):
    model = _runs.start(ctx, "plain", fx.Plan())[0]
    for update in range(4):
        fx.save(url, ctx, model, position=fx.Position(updates=update), keep_last=2)
    other = _runs.start(ctx, "plain", fx.Plan())[0]
    fx.restore(url, ctx, other)
    fx.checkpoint.verify(url)
    import fsspec

    system = fsspec.filesystem("memory")
    system.makedirs("/runs/a/update-0000000009")
    system.pipe_file("/runs/a/update-0000000009/rank-00000.safetensors", b"cut short")
    newest = fx.latest(url)
    fx.save(url, ctx, model, position=fx.Position(updates=9))
    return (
        newest,
        fx.latest(url),
        sorted(one.rpartition("/")[2] for one in system.ls("/runs/a", detail=False)),
    )


def test_a_url(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        newest, last, names = _in_memory(ctx, "memory://runs/a")
    assert newest == "memory://runs/a/update-0000000003"
    assert last == "memory://runs/a/update-0000000009"
    assert names == ["update-0000000002", "update-0000000003", "update-0000000009"]


def test_states_that_are_there_are_filled_unless_their_memory_is_shared(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        net = nn.Linear(2, 3)
        model = fx.wrap(net, ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        states = model.optimizers[0].state
        model.optimizers[0].step()
        fx.save(tmp_path, ctx, model)
        wanted, kept = net.weight.detach().clone(), states[net.weight]["momentum_buffer"]
        model.optimizers[0].step()
        fx.restore(tmp_path, ctx, model)
        assert states[net.weight]["momentum_buffer"] is kept
        assert torch.equal(kept, torch.ones(3, 2)) and torch.equal(net.weight, wanted)
        states[net.weight]["momentum_buffer"] = net.weight.data
        fx.restore(tmp_path, ctx, model)
        assert torch.equal(net.weight, wanted)
        assert torch.equal(states[net.weight]["momentum_buffer"], kept)


class Expanded(nn.Module):
    """Its buffer is one row, expanded; or a full matrix."""

    def __init__(self, scale, *, copy=False):
        super().__init__()
        rows = (torch.arange(4.0) * scale).expand(3, 4)
        self.register_buffer("rows", rows.clone() if copy else rows)


def test_an_expanded_buffer(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        fx.save(tmp_path, ctx, fx.wrap(Expanded(1), ctx))
        for copy in (False, True):
            model = fx.wrap(Expanded(2, copy=copy), ctx)
            fx.restore(tmp_path, ctx, model)
            assert torch.equal(model.module.rows, Expanded(1).rows)
        model.module.rows[1, 2] = 9
        fx.save(tmp_path, ctx, model)
        with raises_code("FX603", "module.rows"):
            fx.restore(tmp_path, ctx, fx.wrap(Expanded(1), ctx))
