"""Which layers are quantized, what is refused, and that a refusal changes nothing."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import fxtrain as fx
from fxtrain.precision.targets import choose_layers, matches
from fxtrain.testing import Transformer
from tests._errors import raises_code
from tests.precision._records import RECORDS, frozen_mlp, marked, mlp

COMPONENT = st.text("ab_", min_size=1, max_size=3)
AO = pytest.mark.parametrize("name", marked(["int8"]))


@given(parts=st.lists(COMPONENT, min_size=1, max_size=5), data=st.data())
def test_patterns_match_whole_components(parts, data):
    start = data.draw(st.integers(0, len(parts) - 1))
    stop = data.draw(st.integers(start + 1, len(parts)))
    inside = parts[start:stop]
    assert matches(".".join(inside), ".".join(parts))
    assert matches("*", ".".join(parts))
    longer = [f"{parts[0]}x", *parts[1:]]
    assert matches(parts[0], ".".join(longer)) == (parts[0] in parts[1:])


def _skipped(net, **options):
    trains = options.pop("trains", False)
    return choose_layers(net, fx.Torchao(**options), trains=trains)[1]


def test_heads_and_ties_are_skipped_by_default():
    assert _skipped(mlp()) == {"3": "the output head"}
    assert choose_layers(mlp(), fx.Torchao(head=True), trains=False)[0] == ("0", "2", "3")
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    net[2].weight = net[0].weight
    assert _skipped(net, head=True) == {"2": "tied to another module"}
    inside = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8)))
    assert _skipped(inside) == {"2.0": "the output head"}
    # Without a head of its own, the last layer belongs to a block.
    assert _skipped(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6)))) == {}


def test_names_and_classes_are_skipped():
    net = Transformer(dtype=torch.float32)
    every = choose_layers(net, fx.Torchao(), trains=False)[0]
    assert len(every) == 12
    assert set(_skipped(net, skip="blocks.1")) == {one for one in every if one[7] == "1"}
    assert set(_skipped(net, skip_classes="Attention")) == {o for o in every if "attention" in o}
    assert set(_skipped(net, skip="*")) == set(every)


def test_layers_that_torch_computes_in_one_kernel_are_skipped():
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 8), nn.ReLU())
    assert set(_skipped(net)) == {"0.linear1", "0.linear2"}


def test_layers_whose_weight_is_computed_are_skipped():
    net = mlp()
    prune.l1_unstructured(net[0], "weight", amount=0.5)
    assert _skipped(net) == {"0": "its weight is computed from others", "3": "the output head"}


def test_trained_layers_are_skipped():
    net = frozen_mlp()
    net[0].requires_grad_(True)
    assert _skipped(net, trains=True) == {"0": "trained", "3": "the output head"}


def _tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def _with_conv1d():
    return nn.Sequential(type("Conv1D", (nn.Module,), {})())


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (mlp(), {"skip": "gte"}, r"Torchao\(skip='gte'\): no module of the model matches"),
        (mlp(), {"skip_classes": "Linar"}, "no class .* Did you mean 'Linear'"),
        (mlp(), {"keep_fp32": "norm"}, r"keep_fp32='norm'\): no module"),
        (mlp(), {"trains": True}, "0 [(]trained[)].* Freeze the model"),
        (nn.Sequential(nn.Conv1d(1, 1, 1)), {}, "Sequential has none"),
        (nn.Sequential(nn.Linear(4, 4)), {}, "0 .the output head.[.] Try: leave quantize out"),
        (nn.Linear(4, 4), {"head": True}, "the only one .the model itself.[.] Try"),
        (_tied(), {"head": True}, "1 .tied to another module.[.] Try: leave quantize out"),
        (_with_conv1d(), {}, "has none. Layers of class Conv1D stay as they are"),
        (mlp(dtype=torch.float64), {}, "0 is float64 [(]2 such layers.* net.float"),
        (mlp(96), {"weights": "int4"}, "0 has 64 input features.*2 such layers[)]. Use another"),
        (mlp(72), {"weights": "int4", "group": 32}, "0 has 72 output features, which 16 does not"),
    ],
)
def test_what_does_not_fit_is_refused(net, options, message):
    with pytest.raises(fx.PlanError, match=message):
        _skipped(net, **options)


def test_formats_of_torchao_that_do_not_go_together_are_refused():
    with raises_code("FX200", "int8", "float8"):
        fx.Torchao(weights="int4", activations="int8")


def _refused(net, plan, match, **options):
    """Wrapping fails with a message, and the module is as it was."""
    before = [(name, id(part)) for name, part in net.named_modules()]
    flags = [parameter.requires_grad for parameter in net.parameters()]
    with fx.detect(env={}, device="cpu") as ctx, pytest.raises(fx.FxError, match=match):
        fx.wrap(net, ctx, plan, **options)
    assert before == [(name, id(part)) for name, part in net.named_modules()]
    assert flags == [parameter.requires_grad for parameter in net.parameters()]


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


@AO
def test_wrap_refuses_and_leaves_the_module_as_it_was(name):
    plan = fx.Plan(quantize="torchao")
    _refused(mlp(), plan, "Freeze the model", optimizer=_sgd)
    dynamic = fx.Plan(quantize=fx.Torchao(activations="int8"))
    _refused(frozen_mlp(), dynamic, "without a gradient of its input", optimizer=_sgd)
    float8 = fx.Plan(quantize=fx.Torchao(weights="float8", activations="float8"))
    _refused(mlp(), float8, "needs a GPU with float8.* CUDA 8.9")
    _refused(frozen_mlp(), plan, "returned nothing", optimizer=lambda params: [])
    local = fx.Plan(quantize="torchao", local=fx.LocalSGD(every=2))
    _refused(mlp(), local, "average every parameter")


@AO
def test_two_quantizations_are_refused(name):
    with fx.detect(env={}, device="cpu") as ctx:
        net = fx.unwrap(fx.wrap(mlp(), ctx, fx.Plan(quantize="torchao")))
        fx.unwrap(fx.wrap(net, ctx, fx.Plan(quantize="torchao")))
    other = fx.Plan(quantize=fx.Torchao(weights="float8"))
    _refused(
        net, other, "asked for weights='float8', but 0 is quantized already, with weights='int8'"
    )


OTHER_FIELDS = [
    (fx.Torchao(), fx.Torchao(activations="int8"), "activations='int8', but 0 .* activations=None"),
    (fx.Torchao(weights="int4", group=32), fx.Torchao(weights="int4", group=64), "with group=32"),
    (fx.Bnb4(), fx.Bnb4(compute="fp32"), "asked for compute='fp32', but 0 .* compute='bf16'"),
    (fx.Bnb4(), fx.Bnb4(double_quant=False, blocksize=128), "with double_quant=True"),
    (fx.Bnb8(), fx.Bnb8(threshold=0), "asked for threshold=0.0, but 0 .* with threshold=6.0"),
]


@pytest.mark.parametrize(("record", "other", "message"), OTHER_FIELDS)
def test_a_plan_describes_how_a_model_is_quantized_already(record, other, message):
    pytest.importorskip("bitsandbytes" if record.kind != "torchao" else "torchao")
    with fx.detect(env={}, device="cpu") as ctx:
        net = fx.unwrap(fx.wrap(mlp(), ctx, fx.Plan(quantize=record)))
        fx.unwrap(fx.wrap(net, ctx, fx.Plan(quantize=record)))
    _refused(net, fx.Plan(quantize=other), message)


@AO
@pytest.mark.parametrize(
    "record", [fx.Torchao(weights="int4", group=32), fx.Torchao(activations="int8")]
)
def test_adapters_need_a_gradient_of_layers_that_are_quantized_already(name, record):
    net = mlp().requires_grad_(False)
    with fx.detect(env={}, device="cpu") as ctx:
        fx.unwrap(fx.wrap(net, ctx, fx.Plan(quantize=record)))
    adapted = nn.Sequential(nn.Linear(64, 64), net)
    _refused(adapted, fx.Plan(), r"1\.0 is quantized with.*without a gradient", optimizer=_sgd)


@AO
def test_recipes_refuse_layers_that_are_quantized_already(name):
    with fx.detect(env={}, device="cpu") as ctx:
        net = fx.unwrap(fx.wrap(mlp(), ctx, fx.Plan(quantize="torchao")))
    recipe = fx.Precision(compute="fp8", recipe=fx.Float8(emulate=True))
    _refused(net, fx.Plan(precision=recipe), "or the unquantized model")


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_a_missing_package_names_the_field_and_the_command(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    plan = fx.Plan(quantize="bnb8" if package == "bitsandbytes" else "torchao")
    message = rf"Plan\(quantize=fx.*{package}.*pip install 'fxtrain\[quant\]'"
    _refused(mlp(), plan, message)


@AO
def test_modules_are_kept_in_fp32(name, tmp_path):
    net = mlp(dtype=torch.bfloat16)
    with fx.detect(env={}, device="cpu") as ctx:
        fx.wrap(net, ctx, fx.Plan(quantize=fx.Torchao(keep_fp32="0")))
    assert net[0].weight.dtype == torch.float32
    assert type(net[0].weight) is nn.Parameter
    source, meta = mlp(), mlp(dtype=torch.bfloat16, device="meta")
    fx.load_model(source.state_dict(), meta, quantize=fx.Torchao(keep_fp32="0"), cast=True)
    assert torch.equal(meta[0].weight, source[0].weight)


@AO
def test_what_is_kept_in_fp32_is_read_again(name, tmp_path):
    record = fx.Torchao(keep_fp32="2")
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(mlp(dtype=torch.bfloat16), ctx, fx.Plan(quantize=record))
        fx.export(model, tmp_path)
    net = mlp(dtype=torch.bfloat16, seed=1)
    with raises_code("FX603", "2.weight", "torch.float32"):
        fx.load_model(tmp_path, net)
    assert net[2].weight.dtype == torch.bfloat16
    with raises_code("FX603"):
        fx.load_model(tmp_path, nn.Sequential(*net, nn.Linear(3, 3)), quantize=record)
    assert net[2].weight.dtype == torch.bfloat16
    fx.load_model(tmp_path, net, quantize=record)
    assert torch.equal(net[2].weight, model.module[2].weight)
    assert [one.weight.dtype for one in (net[2], net[3])] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("name", marked(RECORDS))
def test_hooks_of_quantized_layers_stay(name, tmp_path):
    net, calls = mlp(), []
    handle = net[0].register_forward_hook(lambda *_: calls.append("after"))
    net[0].register_forward_pre_hook(
        lambda part, given, named: calls.append("before"), with_kwargs=True
    )
    fx.export(net, tmp_path)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, fx.Plan(quantize=RECORDS[name]))
        model(torch.ones(2, 64))
        assert calls == ["before", "after"]
        handle.remove()
        fx.unwrap(model)(torch.ones(2, 64))
    assert calls == ["before", "after", "before"]
    loaded = mlp()
    loaded[2].register_forward_hook(lambda *_: calls.append("loaded"))
    fx.load_model(tmp_path, loaded, quantize=RECORDS[name])
    loaded(torch.ones(2, 64))
    assert calls[-1] == "loaded"
