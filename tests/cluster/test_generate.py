"""Generating text under each strategy: the tokens of one process, at lengths that differ."""

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.testing import count_collectives
from fxtrain.testing.training import on_mesh
from tests.cluster._models import PIPELINES, llama

pytest.importorskip("transformers")

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 3]]
STYLES = tuple(
    fx.Style(modules=f"model.layers.*.{name}", style=style)
    for name, style in (
        ("self_attn.[qkv]_proj", "colwise"),
        ("self_attn.o_proj", "rowwise"),
        ("mlp.gate_proj", "colwise"),
        ("mlp.up_proj", "colwise"),
        ("mlp.down_proj", "rowwise"),
    )
)
STREAMED = fx.state.Placement(
    units=(
        fx.state.Unit(name="", device="cpu"),
        fx.state.Unit(name="model.layers.0", device="disk"),
        fx.state.Unit(name="model.layers.1", device="disk"),
    )
)
PLANS = {
    "DDP": (fx.DDP(), None),
    "FSDP": (fx.FSDP(), None),
    "TP": (fx.FSDP(tensor=fx.TP(styles=STYLES)), fx.Mesh(tensor=2)),
    "offload": (fx.Offload(placement=STREAMED), None),
}


def _tokens(net, prompt):
    """As many tokens as depend on the prompt."""
    options = {"max_new_tokens": sum(prompt) % 5 + 1, "do_sample": False, "pad_token_id": 0}
    return net.generate(torch.tensor([prompt]), **options)[0].tolist()


def _generated(ctx, strategy, mesh, order):
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(llama(), placed, fx.Plan(strategy=strategy))
        with fx.gathered(model) as net:
            data = placed.axis("data")
            return fx.ops.map(lambda prompt: _tokens(net, prompt), PROMPTS, data, order=order)


@pytest.mark.parametrize("order", ["static", "dynamic"])
@pytest.mark.parametrize("name", PLANS)
def test_tokens_are_those_of_one_process(pair, name, order, tmp_path):
    net = llama()
    wanted = [_tokens(net, prompt) for prompt in PROMPTS]
    strategy, mesh = PLANS[name]
    if isinstance(strategy, fx.Offload):  # both ranks write the units there, and map them
        strategy = attrs.evolve(strategy, offload_folder=str(tmp_path))
    assert pair.run(_generated, strategy, mesh, order) == [wanted, wanted]
    assert len(list(tmp_path.iterdir())) == (2 if name == "offload" else 0)


@PIPELINES
def test_tokens_of_a_pipeline_are_those_of_one_process(pair):
    net = llama()
    wanted = [_tokens(net, prompt) for prompt in PROMPTS]
    found = pair.run(_generated, fx.PP(), fx.Mesh(pipeline=2), "static")
    assert found == [wanted, wanted]


TOGETHER = {
    "FSDP": (2, fx.FSDP(), None),
    "TP": (2, fx.FSDP(mode="none", tensor=fx.TP(styles=STYLES)), fx.Mesh(tensor=2)),
    "FSDP and TP": (4, fx.FSDP(tensor=fx.TP(styles=STYLES)), fx.Mesh(shard=2, tensor=2)),
}


def _together(ctx, strategy, mesh):
    """One prompt for each data rank; their lengths differ."""
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(llama(), placed, fx.Plan(strategy=strategy))
        prompt = PROMPTS[placed.axis("data").rank]
        first = _tokens(model, prompt)
        with count_collectives() as traffic:
            assert _tokens(model, prompt) == first
        return prompt, first, traffic.counts


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if TOGETHER[n][0] == 4 else []) for n in TOGETHER],
)
def test_ranks_generate_together(clusters, name):
    ranks, strategy, mesh = TOGETHER[name]
    net = llama()
    answers = clusters[ranks].run(_together, strategy, mesh)
    for prompt, tokens, _ in answers:
        assert tokens == _tokens(net, prompt)
    assert len({str(counts) for _, _, counts in answers}) == 1
    assert ("all_gather" in answers[0][2]) == (name != "TP")  # weights are never gathered whole


class _Own(torch.nn.Linear):
    def generate(self, rows):
        return self(rows)


def _own_generate(ctx):
    model = fx.wrap(_Own(2, 2), ctx, fx.Plan(strategy=fx.FSDP()))
    with pytest.raises(AttributeError, match=r"Use with fx\.gathered\(model\)"):
        model.generate(torch.ones(1, 2))


def test_one_that_cannot_wait_for_other_ranks_is_refused(pair):
    pair.run(_own_generate)


def _own_by_stages(ctx):
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        net = torch.nn.Sequential(_Own(2, 2), _Own(2, 2))
        net.generate = net.forward
        model = fx.wrap(net, placed, fx.Plan(strategy=fx.PP()))
        with pytest.raises(AttributeError, match=r"Use with fx\.gathered\(model\)"):
            model.generate(torch.ones(1, 2))


@PIPELINES
def test_a_pipeline_of_a_plain_module_refuses_generate(pair):
    pair.run(_own_by_stages)
