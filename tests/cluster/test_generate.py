"""Generating text under each strategy: the tokens of one process, at lengths that differ."""

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.testing import count_collectives
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import PIPELINES, gpt2, llama, mixtral, t5

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


@pytest.mark.parametrize(
    ("name", "order"), slow_after(1, [("DDP", "static"), *((name, "dynamic") for name in PLANS)])
)
def test_tokens_are_those_of_one_process(pair, name, order, tmp_path):
    net = llama()
    wanted = [_tokens(net, prompt) for prompt in PROMPTS]
    strategy, mesh = PLANS[name]
    if isinstance(strategy, fx.Offload):  # both ranks write the units there, and map them
        strategy = attrs.evolve(strategy, offload_folder=str(tmp_path))
    assert pair.run(_generated, strategy, mesh, order) == [wanted, wanted]
    assert any(tmp_path.iterdir()) == (name == "offload")


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


@pytest.mark.parametrize("name", slow_after(1, TOGETHER))
def test_ranks_generate_together(clusters, name):
    ranks, strategy, mesh = TOGETHER[name]
    net = llama()
    answers = clusters[ranks].run(_together, strategy, mesh)
    for prompt, tokens, _ in answers:
        assert tokens == _tokens(net, prompt)
    assert len({str(counts) for _, _, counts in answers}) == 1
    # Under TP, weights are never gathered whole.
    assert ("all_gather" not in answers[0][2]) == (name == "TP")


def _one_text(ctx, strategy, mesh):
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(llama(), placed, fx.Plan(strategy=strategy))
        with raises_code("FX301"):
            model.generate(torch.tensor([PROMPTS[2 * ctx.rank]]), max_new_tokens=2)
        torch.manual_seed(ctx.rank)
        options = {"do_sample": True, "pad_token_id": 0, "max_new_tokens": 6}
        return model.generate(torch.tensor([PROMPTS[0]]), **options).tolist()


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    slow_after(
        1,
        [
            (TOGETHER["TP"][1], fx.Mesh(tensor=2)),
            pytest.param(fx.PP(), fx.Mesh(pipeline=2), marks=PIPELINES),
        ],
    ),
    ids=["TP", "PP"],
)
def test_ranks_of_one_model_write_one_text(pair, strategy, mesh):
    """From one prompt, and with one seed, whatever states their generators are in."""
    first, second = pair.run(_one_text, strategy, mesh)
    assert first == second


class _Own(torch.nn.Linear):
    def generate(self, rows):
        return self(rows)


def _own_generate(ctx):
    model = fx.wrap(_Own(2, 2), ctx, fx.Plan(strategy=fx.FSDP()))
    with pytest.raises(AttributeError, match=r"Use with fx\.gathered\(model\)"):
        model.generate(torch.ones(1, 2))


def test_one_that_cannot_wait_for_other_ranks_is_refused(pair):
    pair.run(_own_generate)


KINDS = {
    "greedy": {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0},
    "beams": {"max_new_tokens": 5, "do_sample": False, "num_beams": 3, "pad_token_id": 0},
    "sampled": {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 0},
}


DECODERS = {"llama": lambda: llama(num_hidden_layers=4), "gpt2": gpt2, "mixtral": mixtral}


def _decoder(kind):
    return DECODERS[kind]().eval()


def _by_stages(ctx, config, mesh, kind):
    """Texts of each kind, and of which layers this rank caches keys."""
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(_decoder(kind), placed, fx.Plan(strategy=config)).eval()
        rank = placed.axis("data").rank
        prompt = torch.tensor([PROMPTS[3], PROMPTS[3][::-1]])[:, rank:]
        found = {}
        for name, options in KINDS.items():
            torch.manual_seed(4 + placed.rank)
            found[name] = model.generate(prompt, **options).tolist()
        kept = model.generate(prompt, return_dict_in_generate=True, **KINDS["greedy"])
        layers = [vars(one).get("keys") for one in kept.past_key_values.layers]
        with raises_code("FX500", "fx.gathered"):
            model.generate(prompt, use_cache=False, **KINDS["greedy"])
        return found, [one is not None for one in layers]


PIPES = {
    "1f1b": (2, fx.PP(), fx.Mesh(pipeline=2), "llama", [[True] * 2 + [False] * 2]),
    "two stages a rank": (
        2,
        fx.PP(schedule="interleaved_1f1b", stages_per_rank=2),
        fx.Mesh(pipeline=2),
        "llama",
        [[True, False, True, False]],
    ),
    "gpt2": (2, fx.PP(), fx.Mesh(pipeline=2), "gpt2", [[True, False]]),
    "experts": (2, fx.PP(), fx.Mesh(pipeline=2), "mixtral", [[True, False]]),
    "replicas": (4, fx.PP(), fx.Mesh(pipeline=2, replicate=2), "llama", [[True] * 2 + [False] * 2]),
}


@pytest.mark.slow
@PIPELINES
@pytest.mark.parametrize("name", slow_after(1, PIPES))
def test_a_pipeline_generates_by_stages(clusters, name):
    ranks, config, mesh, kind, (cached,) = PIPES[name]
    net = _decoder(kind)
    answers = clusters[ranks].run(_by_stages, config, mesh, kind)
    halves = [answers[i :: ranks // 2] for i in range(ranks // 2)]  # the pipeline axis is outermost
    for rank, (first, second) in enumerate(halves):
        prompt = torch.tensor([PROMPTS[3], PROMPTS[3][::-1]])[:, rank:]
        for text in ("greedy", "beams"):
            assert first[0][text] == net.generate(prompt, **KINDS[text]).tolist()
        assert first[0] == second[0]  # the choices of one rank
        assert first[1] == cached and second[1] == [not here for here in cached]


def _traffic(ctx, size):
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        net = llama(num_hidden_layers=4, intermediate_size=size).eval()
        model = fx.wrap(net, placed, fx.Plan(strategy=fx.PP())).eval()
        with count_collectives() as traffic:
            model.generate(torch.tensor([PROMPTS[3]]), **KINDS["greedy"])
        return traffic.counts, traffic.bytes


@pytest.mark.slow
@PIPELINES
def test_no_weights_are_sent_to_generate(pair):
    assert pair.run(_traffic, 24) == pair.run(_traffic, 4096)


REFUSED = {
    "sharded stages": (fx.FSDP(mode="grads_and_optimizer"), llama, {}, "share their stages"),
    "a cache of fixed size": (None, llama, {"cache_implementation": "static"}, "DynamicCache"),
    "no cache": (None, llama, {"use_cache": False}, "found NoneType"),
    "hidden states": (
        None,
        llama,
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "no attentions or hidden states",
    ),
    "an encoder": (None, t5, {}, "needs a decoder; found T5ForConditionalGeneration"),
}


def _refused(ctx, stages, kind, options, text):
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        split = ("decoder.block.0",) if kind is t5 else ()
        model = fx.wrap(kind(), placed, fx.Plan(strategy=fx.PP(stages=stages, split=split)))
        with pytest.raises((fx.PlanError, fx.errors.StepError), match=text):
            model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2, **options)


@PIPELINES
@pytest.mark.parametrize("name", slow_after(3, REFUSED))
def test_what_a_pipeline_does_not_generate_is_refused(pair, name):
    pair.run(_refused, *REFUSED[name])


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
