"""Quantized weights: which layers, what they hold, files, and what is refused."""

import copy
import json
import os
from pathlib import Path

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

import fxtrain as fx
from fxtrain.models import quantized_loading
from fxtrain.models.stored_layers import saved_layers
from fxtrain.precision.quantizing import (
    library_of,
    live_tensors,
    quantize_layers,
    quantized_tensors,
    stored_tensors,
)
from tests._errors import raises_code
from tests.precision._records import RECORDS, TRAINABLE, frozen_mlp, marked, mlp

CPU = torch.device("cpu")
EVERY = pytest.mark.parametrize("name", marked(RECORDS))
SOME = pytest.mark.parametrize("name", marked(TRAINABLE))


def _values(net):
    return {name: value.detach().clone() for name, value in stored_tensors(net).items()}


def _same(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def _int8_overflows():
    """Whether a limit of oneDNN is below what torch finds out about the CPU by itself.

    torch then leaves products of int8 to kernels of oneDNN for older CPUs, whose sums of two
    products overflow at 16 bits.
    """
    most = torch.full((32, 64), 127, dtype=torch.int8)
    exact = int(torch._int_mm(most, most.t())[0, 0]) == 64 * 127**2
    return "ONEDNN_MAX_CPU_ISA" in os.environ and not exact


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_outputs_are_near_and_forward_changes_nothing(name, dtype):
    if name == "int8 dynamic" and _int8_overflows():
        pytest.skip("ONEDNN_MAX_CPU_ISA makes products of int8 overflow")
    net, x = mlp(dtype=dtype).requires_grad_(False), torch.randn(5, 64, dtype=dtype)
    wanted = net(x).float()
    before = _values(net)
    undo = quantize_layers(net, RECORDS[name], CPU)
    assert live_tensors(net[0]) and live_tensors(net[2]) and not live_tensors(net[3])
    held = _values(net)
    for mode in (net.eval, net.train):
        error = (mode()(x).float() - wanted).norm() / wanted.norm()
        assert 0 < error < (0.15 if "4" in name else 0.05)
    net.eval()
    if name != "int8 dynamic":  # a single row has another scale of its inputs by torchao
        assert torch.allclose(net(x[0]), net(x[:1])[0], rtol=1e-2, atol=1e-2)
    assert net(x[0]).shape == (3,)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    _same(_values(net), held)
    _same(_values(copy.deepcopy(net)), held)
    undo()
    _same(_values(net), before)


@EVERY
def test_rows_of_zeros_stay_zero(name):
    net = mlp().requires_grad_(False)
    net[2].weight[:2] = 0
    quantize_layers(net, RECORDS[name], CPU)
    outputs = net(torch.randn(5, 64)), net[2](torch.randn(5, 64))
    assert torch.isfinite(outputs[0]).all() and not outputs[1][:, :2].any()


@EVERY
def test_a_quantized_model_can_be_pickled(name, tmp_path):
    net, x = mlp().requires_grad_(False).eval(), torch.randn(5, 64)
    quantize_layers(net, RECORDS[name], CPU)
    torch.save(net, tmp_path / "net")
    assert torch.equal(torch.load(tmp_path / "net", weights_only=False)(x), net(x))


@EVERY
def test_released_layers_hold_no_memory(name):
    net = mlp().requires_grad_(False).eval()
    quantize_layers(net, RECORDS[name], CPU)
    net(torch.randn(2, 64))
    refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in quantized_tensors(net).values()]
    for _ in range(2):
        fx.release(net)
    assert refs and all(ref.expired() for ref in refs)


@EVERY
def test_the_form_on_meta_has_the_same_tensors(name):
    real, fake = mlp(), mlp(device="meta")
    for net in (real, fake):
        quantize_layers(net, RECORDS[name], CPU)
    kinds = [{k: (v.shape, v.dtype) for k, v in stored_tensors(n).items()} for n in (real, fake)]
    assert kinds[0] == kinds[1]


@EVERY
def test_loading_quantizes_one_layer_at_a_time(name, tmp_path, monkeypatch):
    fx.export(mlp(), tmp_path)
    left = []

    def counting(record):
        library = library_of(record)

        def quantize(layer, record):
            left.append(sum(not p.is_meta for p in net.parameters() if p.ndim == 2))
            return library.quantize(layer, record)

        return attrs.evolve(library, quantize=quantize)

    monkeypatch.setattr(quantized_loading, "library_of", counting)
    net, wanted = mlp(device="meta"), mlp()
    fx.load_model(tmp_path, net, quantize=RECORDS[name])
    assert left == [1, 1]  # the head alone has values meanwhile
    quantize_layers(wanted, RECORDS[name], CPU)
    _same(_values(net), _values(wanted))


OTHERS = [
    (
        "nf4",
        fx.Bnb4(quant_type="fp4"),
        "asked for quant_type='fp4', but . is quantized already .* with quant_type='nf4'",
    ),
    ("nf4", fx.Bnb4(blocksize=128), "asked for blocksize=128, but . is .* with blocksize=64"),
    ("int8", fx.Torchao(activations="int8"), "asked for activations='int8'"),
    ("int4", fx.Torchao(), "asked for weights='int8', but . is .* with weights='int4'"),
]


@pytest.mark.parametrize(
    ("record", "message", "name"),
    [pytest.param(r, m, n, marks=marked([n])[0].marks) for n, r, m in OTHERS],
)
def test_a_file_of_another_format_is_refused(record, message, name, tmp_path):
    net = mlp()
    quantize_layers(net, RECORDS[name], CPU)
    fx.export(net, tmp_path)
    plain = mlp(seed=1)
    with pytest.raises(fx.CheckpointError, match=f"{message}.* Leave quantize out"):
        fx.load_model(tmp_path, plain, quantize=record)
    assert all(type(part) is type(other) for part, other in zip(plain, mlp(), strict=True))
    fx.load_model(tmp_path, plain, quantize=RECORDS[name])


@EVERY
def test_tensors_that_do_not_fit_their_weight_are_refused(name, tmp_path):
    net = mlp()
    quantize_layers(net, RECORDS[name], CPU)
    fx.export(net, tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as found:
        metadata = found.metadata()
        tensors = {key: found.get_tensor(key) for key in found.keys()}  # noqa: SIM118
    cut = [key for key in _keys_of_first(net) if key in tensors and tensors[key].ndim]
    assert len(cut) >= 2
    for key in cut:
        short = tensors[key].flatten()[:-1].clone()
        if key.endswith(("qdata", ".weight")) and tensors[key].ndim == 2:
            short = tensors[key][:-1].clone()
        save_file({**tensors, key: short}, file, metadata=metadata)
        plain = mlp(seed=1)
        with pytest.raises(fx.CheckpointError, match="quantized layer 0 is") as error:
            fx.load_model(tmp_path, plain)
        assert "damaged" in str(error.value) or "in the model" in str(error.value)
        assert all(type(one) is type(other) for one, other in zip(plain, mlp(), strict=True))


def _keys_of_first(net):
    """Names of the tensors of the first layer's weight."""
    return [f"0.{key}" for key in live_tensors(net[0])]


@pytest.mark.parametrize("name", marked(["fp4"]))
def test_scales_in_bf16_are_read(name, tmp_path):
    net = mlp()
    quantize_layers(net, RECORDS[name], CPU)
    fx.export(net, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rounded = tensors["0.weight.absmax"].bfloat16().reshape(1, -1)  # as bitsandbytes may write it
    save_file({**tensors, "0.weight.absmax": rounded}, tmp_path / "model.safetensors")
    fx.load_model(tmp_path, plain := mlp(seed=1))
    x = torch.randn(3, 64)
    torch.testing.assert_close(plain.eval()(x), net.eval()(x), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("name", marked(["nf4"]))
@pytest.mark.parametrize("change", [{"blocksize": 0}, {"blocksize": "64"}, {"dtype": "rand"}])
def test_a_damaged_description_of_a_layer_is_refused(name, change, tmp_path):
    net = mlp()
    quantize_layers(net, RECORDS[name], CPU)
    fx.export(net, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "0.weight.quant_state.bitsandbytes__nf4"
    told = json.loads(bytes(tensors[key].tolist())) | change
    tensors[key] = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with raises_code("FX602", "ValueError"):
        fx.load_model(tmp_path, mlp())


@pytest.mark.parametrize("name", marked(["int8", "float8"]))
def test_torchao_reads_our_files(name, tmp_path):
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    net = mlp()
    quantize_layers(net, RECORDS[name], CPU)
    (path,) = fx.export(net, tmp_path)
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        found, rest = unflatten_tensor_state_dict(tensors, file.metadata())
    assert not rest
    assert torch.equal(found["0.weight"].dequantize(), net[0].weight.dequantize())


@SOME
def test_a_checkpoint_resumes_bit_for_bit(name, tmp_path):
    plan, x = fx.Plan(quantize=RECORDS[name]), torch.randn(4, 64)

    def made(ctx, seed):
        return fx.wrap(
            frozen_mlp(seed=seed), ctx, plan, optimizer=lambda params: torch.optim.AdamW(params)
        )

    def train(ctx, model):
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
        for batch in fx.shard(torch.utils.data.DataLoader(x, batch_size=4), ctx, plan):
            fx.step(ctx, batch, fns)

    with fx.detect(env={}, device="cpu") as ctx:
        one, other = made(ctx, 0), made(ctx, 1)
        before = _values(one.module)
        train(ctx, one)
        after = _values(one.module)
        assert {key for key in after if not torch.equal(after[key], before[key])} == {
            "3.weight",
            "3.bias",
        }
        fx.save(tmp_path, ctx, one, position=fx.Position())
        fx.restore(tmp_path, ctx, other)
        for model in (one, other):
            train(ctx, model)
        _same(_values(one.module), _values(other.module))
        assert fx.unwrap(one)[0].weight.requires_grad is False


@EVERY
def test_plain_layers_become_those_of_a_checkpoint(name, tmp_path):
    other = fx.big.empty(mlp)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(mlp().requires_grad_(False), ctx, fx.Plan(quantize=RECORDS[name]))
        fx.save(tmp_path / "run", ctx, model, position=fx.Position())
    source = fx.checkpoint.saved_weights(tmp_path / "run")
    fx.load_model(source, other)
    _same(_values(other), _values(model.module))
    settings = [library_of(RECORDS[name]).settings(net[0]) for net in (other, model.module)]
    assert settings[0] == settings[1]
    if name != "bnb8":  # of which a file says no more than tensors do
        with raises_code("FX600", "saved_weights"):
            fx.checkpoint.merge(tmp_path / "run", tmp_path / "model")


@pytest.mark.parametrize(
    ("values", "plan"),
    [([], {}), ({"quantized": [1]}, {}), ({"quantized": {"0": {"format": 1}}}, {}), ({}, None)],
)
def test_a_damaged_description_in_a_checkpoint_is_refused(values, plan):
    with raises_code("FX602"):
        saved_layers("it", {}, {"values": values, "plan": plan})


@pytest.mark.parametrize("name", marked(["nf4"]))
def test_a_checkpoint_of_another_format_is_refused(name, tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        plans = [fx.Plan(quantize=fx.Bnb4(quant_type=one)) for one in ("nf4", "fp4")]
        saved, other = (fx.wrap(mlp(), ctx, plan) for plan in plans)
        fx.save(tmp_path, ctx, saved, position=fx.Position())
        with raises_code("FX603", "nf4"):
            fx.restore(tmp_path, ctx, other)


@pytest.mark.parametrize("name", marked(["nf4", "int8"]))
def test_a_checkpoint_may_hold_digests_of_the_base(name, tmp_path):
    plan = fx.Plan(quantize=RECORDS[name], frozen="digests")
    with fx.detect(env={}, device="cpu") as ctx:
        model, same, other = (fx.wrap(frozen_mlp(seed=seed), ctx, plan) for seed in (0, 0, 1))
        with torch.no_grad():
            model.module[3].weight.zero_()
        handle = fx.save(tmp_path, ctx, model, position=fx.Position())
        size = sum(path.stat().st_size for path in Path(handle.path).rglob("*.safetensors"))
        assert size < 20_000  # the head and random states
        fx.restore(tmp_path, ctx, same)
        _same(_values(same.module), _values(model.module))
        before = _values(other.module)
        with raises_code("FX603"):
            fx.restore(tmp_path, ctx, other)
        _same(_values(other.module), before)


def test_strategies_that_hold_parts_refuse_digests():
    with fx.detect(env={}, device="cpu") as ctx:
        plan = fx.Plan(strategy=fx.PP(), frozen="digests")
        with raises_code("FX202"):
            fx.wrap(mlp(), ctx, plan)
