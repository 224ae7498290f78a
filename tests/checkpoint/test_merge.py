"""From a checkpoint to a model's files, and the commands that look at checkpoints."""

import errno
import fcntl
import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import fxtrain as fx
from fxtrain.cli import main
from tests._errors import raises_code


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        net = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False))
    net[2].weight = net[0].weight
    return net


def _save(ctx, folder, sharded):
    plan = fx.Plan(strategy=fx.FSDP(wrap=("Linear",)) if sharded else fx.DDP())
    net = _net() if not sharded else _net()[1:2]
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.AdamW(p))
    fx.save(folder, ctx, {"net": model}, position=fx.Position(updates=2))


@pytest.mark.parametrize("sharded", [False, True])
def test_parts_of_all_ranks_become_one_model(pair, sharded, tmp_path):
    pair.run(_save, str(tmp_path / "runs"), sharded)
    files = fx.checkpoint.merge(tmp_path / "runs", tmp_path / "out", max_shard=300)
    assert len(files) > 1 if not sharded else len(files) == 1
    net = _net() if not sharded else _net()[1:2]
    wanted = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    fx.load_model(tmp_path / "out", net)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_model_of_several_is_chosen(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        models = {name: fx.wrap(_net(), ctx) for name in ("student", "teacher")}
        fx.save(tmp_path / "runs", ctx, models)
    with raises_code("FX600", "'student'", "'teacher'"):
        fx.checkpoint.merge(tmp_path / "runs", tmp_path / "out")
    with raises_code("FX600", "'critic'"):
        fx.checkpoint.merge(tmp_path / "runs", tmp_path / "out", model="critic")
    (file,) = fx.checkpoint.merge(tmp_path / "runs", tmp_path / "out", model="teacher")
    assert set(load_file(file)) == {"0.weight", "1.weight", "1.bias"}
    with raises_code("FX601"):
        fx.checkpoint.merge(tmp_path / "elsewhere", tmp_path / "out")


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_of_a_checkpoint_are_loaded(pair, sharded, tmp_path):
    pair.run(_save, str(tmp_path / "runs"), sharded)
    wanted, net = (_net() if not sharded else _net()[1:2] for _ in range(2))
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    assert fx.load_model(fx.checkpoint.saved_weights(tmp_path / "runs"), net) == fx.models.Loaded()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor), name
    with raises_code("FX601", "fx.load_model(fx.checkpoint.saved_weights"):
        fx.load_model(tmp_path / "runs", net)


def _load_shards(ctx, path):
    """Load a checkpoint into a sharded model; returns its whole weights and the bytes read."""
    plan = fx.Plan(strategy=fx.FSDP(wrap=("Linear",)))
    model = fx.wrap(nn.Sequential(nn.Linear(8, 8)), ctx, plan)
    fx.load_model(fx.checkpoint.saved_weights(path, model="net"), model)
    return {name: weight.tolist() for name, weight in fx.weights(model)}


def test_ranks_load_their_shards_of_a_checkpoint(pair, tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        net = nn.Sequential(nn.Linear(8, 8))
        path = fx.save(tmp_path, ctx, {"net": fx.wrap(net, ctx), "b": fx.wrap(_net(), ctx)}).path
    wanted = {name: tensor.tolist() for name, tensor in net.state_dict().items()}
    assert pair.run(_load_shards, path) == [wanted, wanted]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_is_streamed(pair, sharded, tmp_path):
    pair.run(_save, str(tmp_path / "runs"), sharded)
    wanted = _net() if not sharded else _net()[1:2]
    row = torch.tensor([1, 2]) if not sharded else torch.eye(8)
    on_disk = fx.state.Placement(units=(fx.state.Unit(name="", device="disk"),))
    config = fx.Offload(placement=on_disk, offload_folder=str(tmp_path / "units"))
    with fx.detect(env={}, device="cpu") as ctx:
        net = _net() if not sharded else _net()[1:2]
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        model = fx.wrap(net.to("meta"), ctx, fx.Plan(strategy=config))
        fx.load_model(fx.checkpoint.saved_weights(tmp_path / "runs"), model)
        assert torch.equal(model.module(row), wanted(row))
        # What one rank saved whole is used where it is.
        assert bool(list((tmp_path / "units").glob("*"))) == sharded


def test_the_commands(tmp_path, capsys):
    with fx.detect(env={}, device="cpu") as ctx:
        saving = fx.save(tmp_path / "runs", ctx, fx.wrap(_net(), ctx))
    assert main(["verify", "--json", str(tmp_path / "runs")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["whole"] is True and told["ranks"] == 1 and told["path"] == saving.path
    assert main(["merge-weights", saving.path, str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [str(tmp_path / "out/model.safetensors")]
    file = tmp_path / "runs/update-0000000000/rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert main(["verify", str(tmp_path / "runs")]) == 1
    assert "was changed in rank-00000.safetensors" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        assert main(["verify", str(tmp_path / name)]) == 2


def _merge(ctx, folder, out):
    """The files that this rank merged, and how many of them are complete at the end."""
    files = fx.checkpoint.merge(folder, out, max_shard=300)
    fx.ops.barrier(ctx)
    return [file.name for file in files], sum(file.is_file() for file in files)


def test_ranks_that_all_merge_write_one_model(pair, tmp_path):
    pair.run(_save, str(tmp_path / "runs"), False)
    for number in range(5):
        out = tmp_path / f"out{number}"
        first, second = pair.run(_merge, str(tmp_path / "runs"), str(out))
        assert first == second and first[1] == len(first[0])
        assert {path.name for path in out.iterdir()} == {
            *first[0], "model.safetensors.index.json",
        }  # fmt: skip
        fx.load_model(out, _net())


def test_without_locks_another_merge_is_named(tmp_path, monkeypatch, failing):
    with fx.detect(env={}, device="cpu") as ctx:
        fx.save(tmp_path / "runs", ctx, {"net": fx.wrap(_net(), ctx)})

    def another(entry):
        shutil.rmtree(next((tmp_path / "out").glob(".*")))

    failing(fcntl, "flock", errno.ENOLCK)
    monkeypatch.setattr("fxtrain.models.merging.write_index", lambda source, _: another(source))
    with raises_code("FX600", "another process"):
        fx.checkpoint.merge(tmp_path / "runs", tmp_path / "out")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable")
@pytest.mark.parametrize("inside", ["", "pytorch_model_fsdp_0"])
def test_a_checkpoint_of_another_library_is_named(tmp_path, capsys, inside):
    place = tmp_path / "pytorch_model_fsdp_0"
    dcp.save({"model": _net().state_dict()}, checkpoint_id=place, no_dist=True)
    assert main(["merge-weights", str(tmp_path / inside), str(tmp_path / "out")]) == 2
    assert "fxtrain import converts" in capsys.readouterr().err
    if inside:
        assert main(["import", str(place), str(tmp_path / "runs")]) == 0
        assert main(["merge-weights", str(tmp_path / "runs"), str(tmp_path / "out")]) == 0
