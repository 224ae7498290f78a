"""Parameters held in one dtype, computed with in another."""

import copy

import pytest
import torch
import transformers
from torch import nn

import fxtrain as fx
from fxtrain import big


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.other = nn.Linear(8, 7, bias=False)
        self.other.weight = self.head.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden = self.norm(self.attention(hidden, hidden, hidden)[0])
        return self.head(hidden) + self.other(hidden)


def rounded(net, storage, keep=("norm", "embed")):
    """The model with parameters that were stored in a narrow dtype once."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if not any(word in name for word in keep):
                parameter.copy_(parameter.to(storage).to(parameter.dtype))
    return net


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_outputs_are_those_of_rounded_parameters(storage):
    torch.manual_seed(0)
    net, same = Net(), Net()
    same.load_state_dict(net.state_dict())
    ids = torch.arange(6)[None]
    before = {name: parameter.dtype for name, parameter in net.named_parameters()}
    widen = big.narrow(net, storage=storage, compute="float32")
    kept = {name for name, one in net.named_parameters() if one.dtype != storage}
    assert kept == {"embed.weight", "norm.weight", "norm.bias"}
    assert net.head.weight is net.other.weight
    with torch.no_grad():
        assert torch.equal(net(ids), rounded(same, storage)(ids))
    assert net.head.weight.dtype == storage  # dropped after the forward
    widen()
    assert {name: one.dtype for name, one in net.named_parameters()} == before
    assert all(one.requires_grad for one in net.parameters())
    with torch.no_grad():
        assert torch.equal(net(ids), same(ids))


def test_gradients_reach_inputs_and_what_is_kept():
    torch.manual_seed(0)
    net, same = Net(), Net()
    same.load_state_dict(net.state_dict())
    big.narrow(net, compute="float32")
    rounded(same, torch.float8_e4m3fn)
    for one in (net, same):
        one(torch.arange(6)[None]).square().sum().backward()
    for name in ("embed.weight", "norm.weight", "norm.bias"):
        assert torch.equal(net.get_parameter(name).grad, same.get_parameter(name).grad)
    assert net.head.weight.grad is None and not net.head.weight.requires_grad


def test_what_is_kept_is_chosen_by_class_pattern_and_tie():
    net = Net()
    big.narrow(net, keep=("other",), keep_kinds=("LayerNorm",))
    assert net.head.weight.dtype == net.norm.bias.dtype == torch.float32
    assert net.embed.weight.dtype == torch.float8_e4m3fn


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(2))
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.rand(8))})

    def forward(self, x):
        return x * (self.many[0] * self.many[1] + self.named["last"])


def test_parameters_in_lists_and_dicts_are_converted_for_the_module_that_has_them():
    torch.manual_seed(0)
    net, same = Scales(), Scales()
    same.load_state_dict(net.state_dict())
    big.narrow(net, storage="bfloat16", compute="float32")
    assert torch.equal(net(torch.ones(8)), rounded(same, torch.bfloat16)(torch.ones(8)))


def test_a_copy_computes_with_its_own_parameters():
    net = Net()
    big.narrow(net, compute="float32")
    other, ids = copy.deepcopy(net), torch.arange(6)[None]
    assert torch.equal(other(ids), net(ids))
    other.head.weight.data.zero_()
    assert not other(ids).any() and net(ids).any()


def test_a_failing_forward_leaves_no_wide_parameters():
    net = Net()
    big.narrow(net)
    with pytest.raises(RuntimeError):
        net.head(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert "weight" not in vars(net.head)


def test_a_language_model_generates_and_exports(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    widen = big.narrow(net, storage="float8_e4m3fn", compute="bfloat16")
    out = net.generate(torch.arange(4)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 8)
    fx.export(net, tmp_path)
    again = transformers.LlamaForCausalLM(config)
    fx.load_model(tmp_path, again, cast=True)
    widen()
    wide = dict(net.named_parameters())
    for name, one in again.named_parameters():
        assert torch.equal(one.detach().to(torch.bfloat16), wide[name])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"storage": "int8"}, "floating-point dtype"),
        ({"storage": "float32"}, "Swap them"),
        ({"keep": ("(",)}, "keep"),
        ({"keep_kinds": ("Lineer",)}, "the model has no Lineer"),
        ({"keep": ("",)}, "no parameter of Net is left"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_changes(asked, words):
    net = Net()
    with pytest.raises(fx.PlanError, match=words):
        big.narrow(net, **asked)
    assert {one.dtype for one in net.parameters()} == {torch.float32}
