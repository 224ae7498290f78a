"""Models without memory: buffers as usual, ties, random state, devices and dtypes."""

import numpy
import pytest
import torch
import transformers
from torch import nn

import fxtrain as fx
from fxtrain import big
from tests._errors import raises_code

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 64,
}  # fmt: skip


class Odd(nn.Module):
    """Buffers in every way, and decisions by values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        steps = torch.arange(6.0)
        steps[1::2] = torch.tensor([7.0, 8.0, 9.0])
        steps.mul_(2)
        self.register_buffer("view", steps.view(2, 3).t())
        self.register_buffer("part", steps[2:4], persistent=False)
        self.register_buffer("full", torch.eye(3).fill_(5))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("drawn", torch.randn(3, generator=torch.Generator().manual_seed(3)))
        self.plain = self.full
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.listed = torch.linspace(0, 1, 3).tolist()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(int(torch.tensor(2))))


class Constants(nn.Module):
    """Tensors that have values when code gets them, and are changed in place."""

    def __init__(self):
        super().__init__()
        given = torch.from_numpy(numpy.arange(4.0))
        copied = torch.zeros(4)
        copied.copy_(given)
        given.mul_(3)
        given.add_(torch.ones(4))
        self.register_buffer("given", given)
        self.register_buffer("copied", copied)
        self.register_buffer("back", torch.from_numpy(torch.ones(3).numpy() * 2))
        self.register_buffer("drawn", torch.tensor([1.0, 2.0]).uniform_().sign())


def _tied(named):
    return [[other for other in named if named[other] is named[name]] for name in named]


BUILDERS = {
    "odd": Odd,
    "constants": Constants,
    "norm": lambda: nn.BatchNorm2d(3),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**TINY)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
    "mixtral": lambda: transformers.AutoModelForCausalLM.from_config(
        transformers.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)
    ),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            image_size=32,
        )
    ),
    "swin": lambda: transformers.SwinModel(
        transformers.SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 2], image_size=32)
    ),
}  # fmt: skip


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_buffers_and_ties_are_those_of_a_model_that_is_built_as_usual(build):
    before = torch.get_rng_state()
    net = big.empty(build)
    assert torch.equal(before, torch.get_rng_state())
    usual = build()
    wanted = dict(usual.named_buffers(remove_duplicate=False))
    found = dict(net.named_buffers(remove_duplicate=False))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    parameters = dict(net.named_parameters(remove_duplicate=False))
    assert all(parameter.is_meta for parameter in parameters.values())
    assert _tied(parameters) == _tied(dict(usual.named_parameters(remove_duplicate=False)))
    shapes = {name: value.shape for name, value in usual.state_dict().items()}
    assert {name: value.shape for name, value in net.state_dict().items()} == shapes


def test_values_that_code_reads_are_those_of_a_usual_build():
    net = big.empty(Odd)
    assert net.rates == net.listed == [0.0, 0.5, 1.0] and len(net.layers) == 2
    assert net.plain is net.full and torch.equal(net.full, torch.full((3, 3), 5.0))


def test_buffers_may_stay_without_values():
    net = big.empty(Odd, buffers="meta")
    assert all(tensor.is_meta for tensor in [*net.parameters(), *net.buffers()])


def test_a_filled_model_computes_as_the_original():
    build = BUILDERS["llama"]
    usual = build().eval()
    net = big.empty(build, device="cpu", dtype=torch.float32).eval()
    assert net.lm_head.weight is net.model.embed_tokens.weight and not net.lm_head.weight.is_meta
    fx.load_model(usual.state_dict(), net)
    ids = torch.arange(6)[None]
    assert torch.equal(net(ids).logits, usual(ids).logits)


def test_dtype_holds_for_parameters_and_torchs_default_comes_back():
    net = big.empty(BUILDERS["llama"], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    assert net.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_model_of_60_gb_takes_no_memory():
    net = big.empty(lambda: nn.ModuleList(nn.Linear(50_000, 50_000) for _ in range(6)))
    assert sum(parameter.nbytes for parameter in net.parameters()) > 60e9


def test_a_failing_builder_leaves_nothing_behind():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        big.empty(lambda: nn.Linear(2, 2) and 1 / 0, dtype=torch.float16)
    assert torch.get_default_dtype() == torch.float32
    assert not nn.Linear(1, 1).weight.is_meta
    torch.set_rng_state(before)
    with raises_code("FX200", "'real'", "'meta'"):
        big.empty(Odd, buffers="fake")
