"""Experts over data ranks: what is sent and held, checkpoints, transformers, and refusals."""

import itertools
import logging

import pytest
import torch
import torch.nn.functional as F

import fxtrain as fx
from fxtrain.testing import count_collectives, fake_world
from fxtrain.testing.training import on_mesh
from property_tests.test_experts import WIDTH, Block
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import PIPELINES
from tests.cluster.test_tensor import MIXED, by_hand, train

SPREAD = fx.Plan(strategy=fx.FSDP(expert=2), clip_norm=0.5)
PLANS = {
    "spread": SPREAD,
    "sharded": fx.Plan(strategy=fx.FSDP(), clip_norm=0.5),
    "replicas": fx.Plan(clip_norm=0.5),
}


def _net():
    torch.manual_seed(0)
    return Block(4, 2, 0.0)


def _wrap(ctx, plan):
    return fx.wrap(_net(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))


def _update(ctx, model, number):
    rows = torch.linspace(-1, 1, 8 * 3 * WIDTH).view(8, 3, WIDTH) * (number + 1)
    held = 8 // ctx.world_size
    mine = rows[ctx.rank * held : (ctx.rank + 1) * held].contiguous()
    batch = fx.batch(mine, ctx, model.plan)
    return fx.update(ctx, batch, model, model(mine).float().square().mean()).position


def _counted(ctx, precision):
    plan = fx.Plan(strategy=fx.FSDP(expert=2), precision=precision)
    model = _wrap(ctx, plan)
    with count_collectives() as traffic:
        _update(ctx, model, 0)
    held = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    return traffic.counts, held["experts.weight"], {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("precision", slow_after(1, ["fp32", "bf16"]))
def test_tokens_travel_and_experts_stay(pair, precision):
    for counts, held, dtypes in pair.run(_counted, precision):
        # How many tokens, the tokens, the outputs; and in backward the gradients of the outputs,
        # since the tokens are data here.
        assert counts["all_to_all"] == 4
        assert held == (2, WIDTH, WIDTH)
        assert dtypes == {torch.float32}


def _in_bf16(ctx, strategy):
    model = _wrap(ctx, fx.Plan(strategy=strategy, precision="bf16"))
    for number in range(3):
        _update(ctx, model, number)
    return {name: value.clone() for name, value in fx.weights(model)}


def test_experts_compute_in_bf16_as_those_that_are_gathered(pair):
    wanted = pair.run(_in_bf16, fx.FSDP())[0]
    for weights in pair.run(_in_bf16, fx.FSDP(expert=2)):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=0.05, atol=0.02)


def _resumed(ctx, plan, folder, start, stop):
    model, position = _wrap(ctx, plan), None
    if start:
        fx.restore(folder, ctx, model)
    for number in range(start, stop):
        position = _update(ctx, model, number)
    if not start:
        fx.save(folder, ctx, model, position=position)
    return {name: value.clone() for name, value in fx.weights(model)}


@pytest.mark.parametrize(("before", "after"), slow_after(1, itertools.permutations(PLANS, 2)))
def test_checkpoints_are_resharded(pair, tmp_path, before, after):
    wanted = pair.run(_resumed, PLANS["sharded"], str(tmp_path / "whole"), 0, 4)[0]
    folder = str(tmp_path / "run")
    pair.run(_resumed, PLANS[before], folder, 0, 2)
    for weights in pair.run(_resumed, PLANS[after], folder, 2, 4):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # four ranks
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_checkpoints_are_resharded_between_numbers_of_expert_ranks(
    clusters, tmp_path, before, after
):
    plans = {n: fx.Plan(strategy=fx.FSDP(expert=n), clip_norm=0.5) for n in (2, 4)}
    wanted = clusters[2].run(_resumed, PLANS["sharded"], str(tmp_path / "whole"), 0, 4)[0]
    folder = str(tmp_path / "run")
    clusters[4].run(_resumed, plans[before], folder, 0, 2)
    for weights in clusters[4].run(_resumed, plans[after], folder, 2, 4):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


class _Inverse(Block):
    """Makes infinite tokens of zeros."""

    def forward(self, x):
        return super().forward(x.reciprocal())


def _rows_of(update, rank):
    rows = torch.linspace(1, 2, 4 * 3 * WIDTH).view(4, 3, WIDTH) * (update + 1)
    return rows[:0] if rank != update % 2 else rows


def _squares(out, rows):
    """NaN for a placeholder, of zeros."""
    return (out.square() * rows.abs()).sum() / rows.abs().sum()


def _with_placeholders(ctx, way, kind):
    torch.manual_seed(0)
    plan = fx.Plan(strategy=fx.FSDP(expert=2), clip_norm=0.5)
    model = fx.wrap(kind(4, 2, 0.0), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model, lambda model, batch: _squares(model(batch.data), batch.data))
    for update in range(4):
        batch = fx.batch(_rows_of(update, ctx.rank), ctx, plan)
        if way == "step":
            fx.step(ctx, batch, fns)
        else:
            fx.update(ctx, batch, model, fns.loss(model, batch))
    return dict(fx.weights(model))


@pytest.mark.parametrize(("way", "kind"), [("step", _Inverse), ("update", Block)])
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_ranks_without_rows_learn_from_the_tokens_of_others(clusters, n, way, kind):
    torch.manual_seed(0)
    net = kind(4, 2, 0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for update in range(4):
        optimizer.zero_grad()
        rows = _rows_of(update, update % 2)
        _squares(net(rows), rows).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    for weights in clusters[n].run(_with_placeholders, way, kind):
        torch.testing.assert_close(weights, dict(net.state_dict()))


def _unwrapped(ctx):
    model = _wrap(ctx, SPREAD)
    before = _net()
    with fx.gathered(model) as net:
        rows = torch.ones(2, 1, WIDTH)
        assert torch.equal(net(rows), before(rows))
    module = fx.unwrap(model)
    assert module.experts.num_experts == 4
    assert torch.equal(module(rows), before(rows))
    assert not module.experts._forward_hooks


def test_the_module_is_given_back(pair):
    pair.run(_unwrapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n", "strategy"),
    [
        ("mixtral", 2, fx.FSDP(expert=2)),
        ("mixtral", 4, fx.FSDP(expert=2)),
        ("mixtral", 4, fx.FSDP(expert=4, mode="grads_and_optimizer")),
        ("mixtral", 4, fx.FSDP(expert=2, shard=2)),
        ("qwen2_moe", 2, fx.FSDP(expert=2)),
        ("qwen3_moe", 4, fx.FSDP(expert=2)),
    ],
)
def test_models_of_transformers_train_as_in_one_process(clusters, name, n, strategy):
    plan = fx.Plan(strategy=strategy, clip_norm=0.5)
    wanted_norms, wanted_logits, wanted = by_hand(name, 0.5)
    for norms, logits, parameters in clusters[n].run(train, name, fx.Mesh(), plan):
        # Their routers compute in fp32.
        torch.testing.assert_close(norms, wanted_norms, rtol=1e-4, atol=0)
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-3, atol=1e-3)
        for key, value in wanted.items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=1e-5)


def test_gathering_experts_of_two_meshes_logs_nothing(caplog):
    """torch logs gathers of several dimensions of a mesh that it cannot make one."""

    def loop(ctx):
        model = _wrap(ctx, fx.Plan(strategy=fx.FSDP(expert=2, shard=2)))
        _update(ctx, model, 0)
        for _, value in fx.weights(model):
            assert not hasattr(value, "placements")

    logger = logging.getLogger("torch.distributed.tensor")
    logger.addHandler(caplog.handler)
    try:
        fx.dry_run(loop, world=4)
    finally:
        logger.removeHandler(caplog.handler)
    assert "all_gather" not in caplog.text


def _balanced(ctx, name, plan, mesh=None):
    """Train with the load-balancing loss; tokens of 0 are padding, more of it in some rows."""
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(MIXED[name](), placed, plan, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))

        def loss(model, batch):
            kept = batch.data != 0
            out = model(batch.data, output_router_logits=True)
            each = F.cross_entropy(
                out.logits.flatten(0, 1), batch.data.flatten(), reduction="sum", ignore_index=0
            )
            balance = fx.experts.balance_loss(out.router_logits, model, top_k=2, mask=kept)
            return fx.Weighted(each + balance * kept.sum(), kept.sum())

        fns, data = fx.StepFns(model, loss), placed.axis("data")
        tokens = torch.arange(64).view(8, 8) * 7 % 24
        rows = (tokens * (torch.arange(8) < 2 + torch.arange(8)[:, None])).chunk(plan.accumulate)
        for part in rows:
            own = part.chunk(data.world_size)[data.rank]
            fx.step(placed, fx.batch(own, placed, plan), fns)
        return {key: value.clone() for key, value in fx.weights(model)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("strategy", [fx.DDP(), fx.FSDP(), fx.FSDP(expert=2)], ids=repr)
def test_the_balance_of_models_of_transformers_is_that_of_one_process(pair, name, strategy):
    with fx.detect({}, device="cpu") as alone:
        wanted = _balanced(alone, name, fx.Plan(accumulate=2))
    for weights in pair.run(_balanced, name, fx.Plan(strategy=strategy, accumulate=2)):
        for key, value in wanted.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-5)


def _router_logits_by_stages(ctx):
    with raises_code("FX200", "stage"):
        _balanced(ctx, "mixtral", fx.Plan(strategy=fx.PP()), fx.Mesh(pipeline=2))


@pytest.mark.slow
@PIPELINES
def test_router_logits_of_other_stages_are_refused(pair):
    pair.run(_router_logits_by_stages)


def _exported(ctx, name, folder):
    model = fx.wrap(MIXED[name](), ctx, SPREAD)
    fx.export(model, folder)
    return {key: value.clone() for key, value in fx.weights(model)}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(1, MIXED))
def test_plain_transformers_reads_an_export(pair, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    weights = pair.run(_exported, name, str(tmp_path))[0]
    net, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(net) is type(MIXED[name]())
    for key, value in net.named_parameters():
        assert torch.equal(value, weights[key]), key


def test_a_dry_run_assumes_equal_shares():
    def loop(ctx):
        model = _wrap(ctx, fx.Plan(strategy=fx.FSDP(expert=4)))
        for _ in range(3):
            rows = torch.randn(2, 3, WIDTH)
            fx.update(ctx, fx.batch(rows, ctx, model.plan), model, model(rows).square().mean())

    found = fx.dry_run(loop, world=8)
    # As on real ranks; of three tokens, (2, 3) rows and two experts each: 12 rows of 16 bytes.
    (sent,) = [one for one in found.step if one.kind == "all_to_all"]
    assert (sent.count, sent.bytes) == (4, 3 * 12 * 4 * WIDTH + 4 * 8)


class _Fresh(torch.nn.Module):
    """A mixture that can start on the meta device."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 4, torch.nn.Parameter(torch.empty(4, WIDTH, 512))

    def reset_parameters(self):
        torch.nn.init.normal_(self.weight)

    def forward(self, tokens, index, weights):
        def compute(rows, product):
            return product(rows, self.weight)

        return fx.experts.mix(tokens, index, weights, self.num_experts, compute)


class _FreshRouter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = torch.nn.Linear(WIDTH, 4), _Fresh()
        self.register_buffer("bias", torch.zeros(4))

    def reset_parameters(self):
        self.bias.zero_()

    def forward(self, tokens):
        scores = self.gate(tokens).sigmoid()
        index = (scores + self.bias).topk(2).indices
        return self.experts(tokens, index, scores.gather(1, index))


def test_experts_that_start_on_the_meta_device_are_balanced():
    with torch.device("meta"):
        net = _FreshRouter()
    update = fx.experts.balance_bias(net, bias="bias", rate=0.5)
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(net, ctx, optimizer=torch.optim.AdamW)
        rows = torch.ones(6, WIDTH)  # all take the same two experts
        fx.update(ctx, fx.batch(rows, ctx), model, model(rows).square().mean())
        (load,) = update(model).values()
    assert sorted(load.tolist()) == [0, 0, 6, 6]
    assert net.bias.tolist() == [0.5 if count == 0 else -0.5 for count in load.tolist()]


def test_a_dry_run_of_experts_on_one_rank_counts_the_rows_of_all_tokens():
    def loop(ctx):
        model = fx.wrap(_FreshRouter(), ctx, optimizer=torch.optim.AdamW)
        for _ in range(3):
            rows = torch.ones(1000, WIDTH)
            fx.update(ctx, fx.batch(rows, ctx), model, model(rows).square().mean())

    found = fx.dry_run(loop, world=1)
    assert found.memory.activations > 4 * 1000 * 2 * 512  # two experts of a token, in fp32
    assert found.problems == ()


REFUSED = {
    "experts": (fx.FSDP(expert=8), {}, 8, "has 4 experts, which 8 ranks do not divide"),
    "replica": (fx.FSDP(expert=4, shard=2), {}, 4, "multiple of 4 ranks, but one has 2"),
    "mode": (fx.FSDP(expert=2, mode="none"), {}, 2, "cannot be combined with tensor or context"),
    "tensor": (
        fx.FSDP(expert=2, tensor=fx.TP(styles=(fx.Style(modules="*gate", style="rowwise"),))),
        {"mesh": fx.Mesh(shard=2, tensor=2)},
        4,
        "cannot be combined with tensor or context",
    ),
    "context": (
        fx.FSDP(expert=2),
        {"mesh": fx.Mesh(shard=2, context=2), "context": fx.CP()},
        4,
        "cannot be combined with tensor or context",
    ),
    "pipeline": (
        fx.PP(stages=fx.FSDP(expert=2)),
        {"mesh": fx.Mesh(shard=2, pipeline=2)},
        4,
        r"PP\(stages=fx.FSDP\(expert=...\)\) is not supported",
    ),
    "local": (
        fx.FSDP(expert=2, shard=2),
        {"local": fx.LocalSGD(every=2)},
        4,
        r"combined with Plan\(local",
    ),
    "rest": (fx.FSDP(expert=4), {}, 24, "the other 6 ranks of a replica divide neither"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_spread_is_refused(name):
    strategy, options, world, text = REFUSED[name]
    mesh = options.get("mesh")
    with fake_world(world, mesh=mesh) as ctx, pytest.raises(fx.PlanError, match=text):
        fx.wrap(_net(), ctx, fx.Plan(strategy=strategy, **options))


def test_a_model_without_experts_is_refused():
    with fake_world(2) as ctx, raises_code("FX202"):
        fx.wrap(torch.nn.Linear(2, 2), ctx, SPREAD)
