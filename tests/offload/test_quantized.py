"""Streamed models with quantized weights: bitwise equal to resident ones, in each format."""

import pytest
import torch

import fxtrain as fx
from fxtrain.precision.quantizing import quantize_layers, stored_tensors
from tests._slow import slow_after
from tests.offload._streamed import COPIES, placement
from tests.precision._records import RECORDS, TRAINABLE, frozen_mlp, marked, mlp

CPU = torch.device("cpu")
EVERY = pytest.mark.parametrize("name", marked(RECORDS))
X = torch.linspace(-1, 1, 320).view(5, 64)


def _quantized(name, make=mlp):
    net = make(seed=3).eval()
    quantize_layers(net, RECORDS[name], CPU)
    return net


def _values(net):
    return {name: value.detach().clone() for name, value in stored_tensors(net).items()}


def _same(one, other):
    assert sorted(one) == sorted(other)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@EVERY
@pytest.mark.parametrize("row", slow_after(1, [COPIES, None]), ids=["copied", "in place"])
def test_files_of_quantized_models_stream(ctx, name, row, tmp_path):
    resident = _quantized(name)
    fx.export(resident, tmp_path)
    net = mlp(device="meta")
    config = fx.Offload(placement=placement("0", "2"), source=str(tmp_path))
    model = fx.wrap(net.eval(), ctx, fx.Plan(strategy=config), strategy=row)
    for _ in range(3):
        assert torch.equal(model(X), resident(X))
        with torch.no_grad():  # by another kernel, on some CPUs
            assert torch.equal(model(X), resident(X))
    tensors = model.strategy_state.tensors.values()
    assert {one.source.name for one in tensors if one.source} == {"model.safetensors"}
    assert sum(one.file is not None for one in tensors) >= 4
    _same(_values(model.module), _values(resident))
    assert fx.unwrap(model) is net
    assert torch.equal(net(X), resident(X))


@EVERY
def test_plain_files_are_quantized_one_layer_at_a_time(ctx, name, tmp_path):
    fx.export(mlp(seed=3), tmp_path / "model")
    config = fx.Offload(
        placement=placement("2"), source=str(tmp_path / "model"), offload_folder=str(tmp_path / "x")
    )
    plan = fx.Plan(strategy=config, quantize=RECORDS[name])
    model = fx.wrap(mlp(device="meta").eval(), ctx, plan)
    resident = _quantized(name)
    _same(_values(model.module), _values(resident))
    assert torch.equal(model(X), resident(X))
    fx.export(model, tmp_path / "again")
    fx.unwrap(model)
    other = mlp(device="meta")
    fx.load_model(tmp_path / "again", other)
    _same(_values(other), _values(resident))


@pytest.mark.parametrize("name", marked(["nf4", "int8"]))
def test_a_model_in_memory_is_quantized_and_written_once(ctx, name, tmp_path):
    config = fx.Offload(placement=placement("0"), offload_folder=str(tmp_path))
    plan, seen = fx.Plan(strategy=config, quantize=RECORDS[name]), []
    for _ in range(2):
        model = fx.wrap(mlp(seed=3).eval(), ctx, plan)
        assert torch.equal(model(X), _quantized(name)(X))
        seen.append({path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()})
        fx.unwrap(model)
    assert seen[0] == seen[1] and len(seen[0]) > 1


@pytest.mark.parametrize("name", marked(TRAINABLE))
def test_adapters_train_through_streamed_weights(ctx, name, tmp_path):
    fx.export(_quantized(name, frozen_mlp), tmp_path / "model")
    losses, values = [], []
    for strategy in (
        fx.Single(),
        fx.Offload(placement=placement("0", "2"), source=str(tmp_path / "model")),
    ):
        net = frozen_mlp(device="meta")
        if isinstance(strategy, fx.Single):
            fx.load_model(tmp_path / "model", net)
        plan = fx.Plan(strategy=strategy)
        model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
        loader = torch.utils.data.DataLoader(X.repeat(4, 1), batch_size=5)
        losses.append([fx.step(ctx, b, fns).loss.item() for b in fx.shard(loader, ctx, plan)])
        values.append(_values(model.module))
        if isinstance(strategy, fx.Offload):
            fx.save(tmp_path / "runs", ctx, model, position=fx.Position())
            with torch.no_grad():
                model.module[3].weight.zero_()
            fx.restore(tmp_path / "runs", ctx, model)
            _same(_values(model.module), values[0])
    assert losses[0] == losses[1]
    _same(*values)


@EVERY
def test_sizes_are_those_of_the_quantized_tensors(name, tmp_path):
    net = _quantized(name)
    held = {id(one): one.nbytes for one in stored_tensors(net).values()}
    fx.export(net, tmp_path)
    assert fx.big.sizes(net).bytes == sum(held.values())
    assert fx.big.sizes(tmp_path).bytes == sum(held.values())
    plain = mlp(seed=3)
    assert fx.big.sizes(plain, quantize=RECORDS[name]).bytes == sum(held.values())
    assert type(plain[0].weight) is torch.nn.Parameter and not plain[0].weight.is_meta


@pytest.mark.parametrize("name", marked(["nf4", "int8"]))
def test_a_failure_leaves_the_model_as_it_was(ctx, name, tmp_path, threads):
    fx.export(_quantized(name), tmp_path)
    (tmp_path / "file").write_text("")
    net = mlp(device="meta")
    parts = [id(part) for part in (*net.modules(), *net.parameters())]
    config = fx.Offload(
        placement=placement("2"), source=str(tmp_path), offload_folder=str(tmp_path / "file")
    )
    plan = fx.Plan(strategy=config, quantize=fx.Bnb4(quant_type="fp4"))
    with pytest.raises((fx.PlanError, fx.CheckpointError)):
        fx.wrap(net, ctx, plan)
    assert parts == [id(part) for part in (*net.modules(), *net.parameters())]
    assert not threads()
