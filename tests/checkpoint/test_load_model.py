"""Loading models: what does not fit is named, and memory is filled in place."""

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.models import export, load_model
from tests._errors import raises_code
from tests.checkpoint._exports import (
    Holder,
    Tied,
    as_the_ecosystem_reads,
    assert_same,
    loaded,
    some_state,
)


def test_names_shapes_and_dtypes_that_do_not_fit_are_listed(tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = net.state_dict()
    state["1.runing_mean"] = state.pop("1.running_mean")
    state["0.weight"] = torch.zeros(4, 2)
    state["0.bias"] = state["0.bias"].double()
    export(state, tmp_path)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(fx.CheckpointError) as caught:
        load_model(tmp_path, net)
    assert caught.value.message.splitlines() == [
        f"load_model: {tmp_path} does not match Sequential.",
        "  1 missing from the source:",
        "    1.running_mean (nearest: 1.runing_mean)",
        "  1 not in the model:",
        "    1.runing_mean (nearest: 1.running_mean)",
        "  1 with a different shape (skip_shapes=True skips):",
        "    0.weight is [4, 2] in the source, [4, 3] in the model",
        "  1 with a different dtype (cast=True converts):",
        "    0.bias is torch.float64 in the source, torch.float32 in the model",
    ]
    assert_same(net.state_dict(), before)  # nothing was touched
    with raises_code("FX603"):
        load_model(tmp_path, net, strict=False, cast=True)
    fixed = {**state, "0.weight": before["0.weight"]}
    found = load_model(fixed, net, strict=False, cast=True)
    assert (found.missing, found.unexpected) == (("1.running_mean",), ("1.runing_mean",))
    assert torch.equal(net[0].bias, state["0.bias"].float())


def test_no_conversion_drops_imaginary_parts():
    net = nn.Linear(2, 1, bias=False)
    with raises_code("FX603", "1 complex"):
        load_model({"weight": torch.full((1, 2), 1j)}, net, cast=True)
    net.weight = nn.Parameter(torch.zeros(1, 2, dtype=torch.complex64))
    load_model({"weight": torch.ones(1, 2)}, net, cast=True)
    assert torch.equal(net.weight, torch.ones(1, 2) + 0j)


def test_a_device_that_torch_does_not_know():
    with raises_code("FX200", "load_model(device='gpu')", "'cpu'", "'cuda'"):
        load_model({}, nn.Identity(), device="gpu")


def test_long_lists_are_cut():
    with raises_code("FX603", "30 missing", "20 more"):
        load_model({}, Holder({f"w{i}": torch.ones(1) for i in range(30)}))


def test_a_prefix_is_suggested_and_used():
    state = {f"model.{name}": tensor for name, tensor in some_state().items()}
    with raises_code("FX603", "prefix='model.'"):
        load_model(state, Holder(some_state(9)))
    holder = Holder(some_state(9))
    load_model(state | {"other.x": torch.ones(1)}, holder, prefix="model.")
    assert_same(holder.state_dict(), some_state())
    inner = nn.ModuleDict({"model": Holder(some_state(9))})
    load_model(some_state(), inner, rename=lambda name: "model." + name)
    assert_same(inner.state_dict(), state)


def test_rename_maps_names_and_leaves_out():
    holder = Holder({"a": torch.zeros(4, 4)})
    load_model(some_state(), holder, rename=lambda name: {"w1": "a"}.get(name))
    assert torch.equal(holder.a, some_state()["w1"])
    with raises_code("FX600", "'w0'", "'w1'"):
        load_model(some_state(), holder, rename=lambda _: "a")


def test_parameters_are_filled_in_place(tmp_path):
    net, other = nn.Linear(8, 8), nn.Linear(8, 8)
    export(net, tmp_path)
    places = [parameter.data_ptr() for parameter in other.parameters()]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    load_model(tmp_path, other)
    assert_same(other.state_dict(), net.state_dict())
    assert [parameter.data_ptr() for parameter in other.parameters()] == places
    assert optimizer.param_groups[0]["params"][0] is other.weight
    assert other.weight.requires_grad and other.weight.grad is None


def test_a_module_on_the_meta_device_is_given_memory(tmp_path):
    net = Tied()
    export(net, tmp_path)
    other = Tied(device="meta")
    other.body.bias.requires_grad_(False)
    other.body.bias.mark = "kept"
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    load_model(tmp_path, other)
    assert_same(other.state_dict(), net.state_dict())
    assert other.head.weight is other.embed.weight
    assert not other.body.bias.requires_grad and other.body.bias.mark == "kept"
    other(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert not torch.equal(other.embed.weight, net.embed.weight)


def test_a_recurrent_layer_on_the_meta_device_computes_with_what_is_loaded():
    net, other = nn.LSTM(3, 2), nn.LSTM(3, 2, device="meta")
    load_model(net.state_dict(), other)
    inputs = torch.ones(1, 3)
    assert torch.equal(other(inputs)[0], net(inputs)[0])
    other(inputs)[0].sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert not torch.equal(other(inputs)[0], net(inputs)[0])


def test_a_buffer_that_is_never_stored_needs_values_of_its_own():
    net = nn.Linear(2, 2, device="meta")
    net.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    values = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    with raises_code("FX603"):
        load_model(values, net)
    net.table = torch.ones(2)
    load_model(values, net)
    assert torch.equal(net.weight, torch.ones(2, 2)) and not net.weight.is_meta
    partly = nn.Linear(2, 2, device="meta")
    assert load_model({"bias": torch.ones(2)}, partly, strict=False).missing == ("weight",)
    assert partly.weight.is_meta and torch.equal(partly.bias, torch.ones(2))


class _Extra(nn.Linear):
    """Keeps something that is neither a parameter nor a buffer."""

    extra = torch.zeros(3)

    def get_extra_state(self):
        return self.extra.clone()

    def set_extra_state(self, state):
        self.extra = state


def test_state_that_a_module_makes_itself_goes_back_through_it(tmp_path):
    net, other = _Extra(2, 2), _Extra(2, 2)
    net.extra = torch.arange(3.0)
    export(net, tmp_path)
    load_model(tmp_path, other)
    assert_same(other.state_dict(), net.state_dict())


def test_wrapping_and_compiling_change_no_names(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = dict(net.state_dict())
    inner = nn.Sequential(torch.compile(net[0]), net[1])
    with fx.detect({}, device="cpu") as ctx:
        wrapped = fx.wrap(net, ctx)
        for model in (net, torch.compile(net), inner, wrapped):
            export(model, tmp_path)
            assert_same(as_the_ecosystem_reads(tmp_path), plain)
            load_model(tmp_path, model)
            load_model({name: tensor * 2 for name, tensor in plain.items()}, model)
            assert torch.equal(net[0].weight, as_the_ecosystem_reads(tmp_path)["0.weight"] * 2)
            load_model(tmp_path, model)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("gpt2-that-is-nowhere", "neither a file nor a folder"),
        (3, "found int"),
        ({"model": {"w": torch.ones(1)}, "epoch": 3}, "other values under 'model', 'epoch'"),
        ({1: torch.ones(1)}, "should map names"),
    ],
)
def test_a_source_that_is_none_is_named(source, words):
    with pytest.raises(fx.CheckpointError, match=words):
        load_model(source, nn.Linear(1, 1))


def test_pickles_are_read_as_far_as_weights_only_allows(tmp_path):
    state = some_state()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(loaded(tmp_path, state), state)
    assert_same(loaded(tmp_path / "pytorch_model.bin", state), state)
    torch.save({"state_dict": state, "epoch": 2}, tmp_path / "run.pt")
    with raises_code("FX600", "'state_dict'", "'epoch'"):
        load_model(tmp_path / "run.pt", Holder(state))
    torch.save(Holder(state), tmp_path / "whole.pt")
    with raises_code("FX600", "weights_only=True", "mmap=True"):
        load_model(tmp_path / "whole.pt", Holder(state))
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with raises_code("FX600", "old.pt"):
        load_model(tmp_path / "old.pt", Holder(state))
    (tmp_path / "short.bin").write_bytes((tmp_path / "run.pt").read_bytes()[:100])
    with raises_code("FX600", "short.bin"):
        load_model(tmp_path / "short.bin", Holder(state))
    (tmp_path / "model.onnx").write_bytes(b"x")
    with raises_code("FX600", "model.onnx", ".safetensors"):
        load_model(tmp_path / "model.onnx", Holder(state))


def test_tensors_of_another_shape_are_skipped_where_asked_for(tmp_path):
    pretrained = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    fx.export(pretrained, tmp_path)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    head = net[1].weight.detach().clone()
    with raises_code("FX603", "skip_shapes=True"):
        fx.load_model(tmp_path, net)
    loaded = fx.load_model(tmp_path, net, skip_shapes=True)
    assert loaded.other_shapes == ("1.bias", "1.weight")
    assert loaded.missing == loaded.unexpected == ()
    assert torch.equal(net[0].weight, pretrained[0].weight)
    assert torch.equal(net[1].weight, head)
