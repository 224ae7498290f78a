"""Models that start on the meta device: under FSDP, DDP and in one process."""

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.testing import Transformer
from tests._slow import slow_after

FSDP = fx.Plan(strategy=fx.FSDP())


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _from_rank_0(ctx, config):
    """Rank 0 has the values, the others only shapes."""
    with torch.device("cpu" if ctx.is_main else "meta"):
        net = Transformer(seed=5)
    model = fx.wrap(net, ctx, fx.Plan(strategy=config), optimizer=_sgd)
    tied = model.module.head.weight is model.module.embed.weight
    whole = fx.unwrap(model)
    same = all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(whole.parameters(), Transformer(seed=5).parameters(), strict=True)
    )
    return tied, same, {str(p.device) for p in whole.parameters()}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    "config",
    slow_after(
        2,
        [
            fx.FSDP(),
            fx.FSDP(shard=2),
            fx.FSDP(ignore=("gain",)),
            fx.FSDP(offload=True, mode="none"),
            fx.DDP(),
            fx.DDP(shard_optimizer=True),
        ],
    ),
    ids=["full", "hybrid", "ignored", "offload", "replicas", "zero1"],
)
def test_values_of_rank_0_reach_models_on_the_meta_device(clusters, config, n):
    assert clusters[n].run(_from_rank_0, config) == [(True, True, {"cpu"})] * n


def _plain_net():
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def _fresh(ctx, config):
    with torch.device("meta"):
        net = _plain_net()
    before = torch.get_rng_state()
    model = fx.wrap(net, ctx, fx.Plan(strategy=config, seed=11), optimizer=_sgd)
    assert torch.equal(before, torch.get_rng_state())
    return {name: value.clone() for name, value in fx.unwrap(model).state_dict().items()}


def test_a_model_on_the_meta_device_everywhere_makes_its_own_values(cluster):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        wanted = _plain_net().state_dict()
    for config in (fx.FSDP(), fx.FSDP(mode="none"), fx.DDP()):
        for got in cluster.run(_fresh, config):
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def _in_transformers(ctx, config):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    with torch.device("meta"):
        net = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        net.model.layers[1].mlp = nn.Sequential(nn.Linear(32, 32), nn.PReLU())
    plain = LlamaForCausalLM(net.config)
    model = fx.wrap(net, ctx, fx.Plan(strategy=config, seed=3), optimizer=_sgd)
    weights = {name: value.clone() for name, value in fx.weights(model)}
    for name, value in weights.items():
        if value.ndim == 2:  # not that of nn.Embedding and nn.Linear
            assert value.std().item() == pytest.approx(net.config.initializer_range, rel=0.15), name
    assert weights["model.norm.weight"].eq(1).all()
    assert weights["model.layers.1.mlp.1.weight"].eq(0.25).all()  # unknown to transformers
    for one, other in zip(net.buffers(), plain.buffers(), strict=True):  # frequencies
        assert torch.equal(one, other)
    return weights


def test_models_of_transformers_get_the_values_of_their_own_constructors(pair):
    alone = pair.run(_in_transformers, fx.DDP())
    for weights in [*alone, *pair.run(_in_transformers, fx.FSDP())]:
        assert all(torch.equal(weights[name], value) for name, value in alone[0].items())


def _from_files(ctx, folder, config):
    with torch.device("meta"):
        net = _plain_net()
    model = fx.wrap(net, ctx, fx.Plan(strategy=config), optimizer=_sgd)
    fx.load_model(folder, model)
    return {name: value.clone() for name, value in fx.unwrap(model).state_dict().items()}


@pytest.mark.parametrize(("n", "config"), [(2, fx.FSDP()), (4, fx.FSDP(shard=2, offload=True))])
def test_a_model_on_the_meta_device_everywhere_is_read_from_files(clusters, tmp_path, n, config):
    net = _plain_net()
    fx.export(net, tmp_path)
    for got in clusters[n].run(_from_files, str(tmp_path), config):
        assert all(torch.equal(got[name], value) for name, value in net.state_dict().items())


def _badly_meta(ctx, case):
    with torch.device("meta" if case == "all" or ctx.is_main else "cpu"):
        net = Transformer()
    if case == "some":
        net = Transformer()
        net.gain = nn.Parameter(net.gain.to("meta"))
    fx.wrap(net, ctx, FSDP)


@pytest.mark.parametrize(
    ("case", "words"),
    slow_after(
        2,
        [
            ("all", "no reset_parameters to initialize them: the model itself"),
            ("rank 0 only", "or on all but rank 0"),
            ("some", "or on all but rank 0"),
        ],
    ),
)
def test_a_meta_start_that_cannot_work_is_an_error_everywhere(pair, case, words):
    for error in pair.outcomes(_badly_meta, case):
        assert isinstance(error, fx.PlanError) and words in str(error)
