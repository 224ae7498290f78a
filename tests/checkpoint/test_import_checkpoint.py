"""Going on from what Accelerate and torch.distributed.checkpoint saved."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import fxtrain as fx
from fxtrain.cli import main
from tests._errors import raises_code

# dcp.save warns that one process saves alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def make_model():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    net[2].weight = net[0].weight
    return net


def _train(net, optimizer, steps, scheduler=None):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randint(0, 7, (8,), generator=generator)
        nn.functional.cross_entropy(net(x), (x + 1) % 7).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def _start():
    torch.manual_seed(0)
    net = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _goes_on(folder, wanted, schedules):
    torch.manual_seed(9)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(
            make_model(),
            ctx,
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.7),
            scheduler=(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
            if schedules
            else None,
        )
        restored = fx.restore(folder, ctx, model)
        assert restored.position.updates == 4
        _train(model.module, model.optimizer, 3, model.scheduler)
        for name, tensor in model.module.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name


@pytest.fixture
def accelerate_folder(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    net, optimizer, scheduler = _start()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(net, optimizer, scheduler)
    _train(net, optimizer, 4, scheduler)
    accelerator.save_state(str(tmp_path / "old"))
    assert prepared
    _train(net, optimizer, 3, scheduler)
    monkeypatch.chdir(tmp_path)
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_accelerate_goes_on(accelerate_folder, tmp_path, capsys):
    words = ["import", "old", "new", "--updates", "4", "--json"]
    assert main(words) == 2  # the optimizer numbers its parameters
    assert "Pass module=" in capsys.readouterr().err
    (tmp_path / "made.py").write_text(
        "from tests.checkpoint.test_import_checkpoint import make_model\n"
    )
    assert main([*words, "--model", "made:make_model"]) == 0
    path = json.loads(capsys.readouterr().out)["path"]
    assert fx.checkpoint.verify(path).position.updates == 4
    _goes_on("new", accelerate_folder, schedules=True)
    assert main([*words, "--model", "made:nothing"]) == 2
    assert "made has no 'nothing'" in capsys.readouterr().err


def test_a_run_of_torchs_own_checkpoints_goes_on(tmp_path):
    net, optimizer, _ = _start()
    _train(net, optimizer, 4)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": optim}, checkpoint_id=tmp_path / "old", no_dist=True)
    _train(net, optimizer, 3)
    path = fx.interop.import_checkpoint(
        tmp_path / "old", tmp_path / "new", module=make_model(), position=fx.Position(updates=4)
    )
    assert fx.checkpoint.verify(path).world_size == 1
    wanted = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    _goes_on(tmp_path / "new", wanted, schedules=False)


def test_what_cannot_be_imported_says_why(tmp_path):
    bring = fx.interop.import_checkpoint
    with raises_code("FX601"):
        bring(tmp_path / "nowhere", tmp_path / "new")
    with raises_code("FX601"):
        bring(tmp_path, tmp_path / "new")
    step = tmp_path / "ds" / "global_step4"
    step.mkdir(parents=True)
    (step / "mp_rank_00_model_states.pt").write_bytes(b"")
    with raises_code("FX601", "'latest'"):
        bring(tmp_path / "ds", tmp_path / "new")


def test_the_state_dict_of_a_model_alone_is_imported(tmp_path):
    old, net = make_model(), make_model()
    dcp.save(old.state_dict(), checkpoint_id=tmp_path / "old", no_dist=True)
    path = fx.interop.import_checkpoint(tmp_path / "old", tmp_path / "new", module=make_model())
    fx.load_model(fx.checkpoint.saved_weights(path), net)
    assert torch.equal(net[2].weight, old[2].weight) and torch.equal(net[1].bias, old[1].bias)


def test_an_optimizer_in_another_order_is_noticed(tmp_path):
    net, _, _ = _start()
    optimizer = torch.optim.AdamW([*net.parameters()][::-1], lr=0.1)
    _train(net, optimizer, 1)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    with raises_code("FX600", "order"):
        fx.interop.import_checkpoint(tmp_path / "old", tmp_path / "new", module=make_model())
    path = fx.interop.import_checkpoint(tmp_path / "old", tmp_path / "new", optimizer=False)
    assert fx.checkpoint.verify(path).tensors >= 3


def _regrouped(params):
    """Biases first, without weight decay."""
    biases, weights = ([p for p in params if (p.ndim == 1) is one] for one in (True, False))
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
    return torch.optim.AdamW(groups, lr=0.1)


def test_an_optimizer_in_other_groups_is_imported_by_its_factory(tmp_path):
    net, _, _ = _start()
    optimizer = _regrouped([*net.parameters()])
    _train(net, optimizer, 2)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    bring = partial(fx.interop.import_checkpoint, tmp_path / "old", tmp_path / "new")
    with raises_code("FX600", "optimizer="):
        bring(module=make_model(), optimizer=lambda _: _regrouped([*net.parameters()]))
    bring(module=make_model(), optimizer=_regrouped)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(make_model(), ctx, optimizer=_regrouped)
        fx.restore(tmp_path / "new", ctx, model)
        for name, parameter in model.module.named_parameters():
            saved = optimizer.state[net.get_parameter(name)]
            for key, value in model.optimizer.state[parameter].items():
                assert torch.equal(value, saved[key])


@pytest.mark.parametrize("named", [False, True])
def test_frozen_parameters_of_an_optimizer_are_left_out(named, tmp_path):
    def start(make_optimizer):
        net = make_model()
        net[1].requires_grad_(requires_grad=False)
        return net, make_optimizer(net)

    net, optimizer = start(lambda net: torch.optim.AdamW(net.parameters()))
    _train(net, optimizer, 2)
    states = get_state_dict(net, optimizer) if named else (net.state_dict(), optimizer.state_dict())
    folder = tmp_path / "old"
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    fx.interop.import_checkpoint(folder, tmp_path / "new", module=start(id)[0])
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(start(id)[0], ctx, optimizer=lambda params: torch.optim.AdamW(params))
        fx.restore(tmp_path / "new", ctx, model)
    state = model.optimizer.state[model.module[0].weight]
    assert torch.equal(state["exp_avg"], optimizer.state[net[0].weight]["exp_avg"])
