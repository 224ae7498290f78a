"""FSDP beyond the laws: bad plans, starts from the meta device, precision, what is sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.backends.fsdp.apply_fully_shard import units
from fxtrain.ops.transport.exchange import CallState
from fxtrain.testing import Transformer, count_collectives, fake_world
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import is_block

FSDP = fx.Plan(strategy=fx.FSDP())


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


BAD = {
    "size": (
        6,
        None,
        fx.FSDP(shard=4),
        r"multiple of 4 ranks.*has 6. Use shard=2 or 3 or 6.*launch 8",
    ),
    "mode": (4, None, fx.FSDP(mode="none", shard=2), "Remove one"),
    "mesh": (8, fx.Mesh(shard=4), fx.FSDP(shard=2), "disagree"),
    "axis": (4, fx.Mesh(context=2), fx.FSDP(), "context=2, which a plan without context does not"),
    "class": (4, None, fx.FSDP(wrap=("Blok",)), "Did you mean Block"),
    "both": (4, None, fx.FSDP(wrap=("Block",), min_params=10), "chooses blocks in several ways"),
    "ways": (4, None, fx.FSDP(min_params=10, wrap_by=is_block), "min_params, wrap_by\\) chooses"),
    "module": (4, None, fx.FSDP(wrap_by="tests.clusters:is_block"), "No module named 'tests.clus"),
    "ignored": (4, None, fx.FSDP(ignore=("gian",)), "Did you mean gain"),
    "replicas": (4, fx.Mesh(tensor=2), fx.DDP(), r"tensor=2, which DDP does not.*FSDP\(tensor"),
    "stages": (4, fx.Mesh(pipeline=2), fx.DDP(), r"pipeline=2, which DDP does not use.*Use PP\(\)"),
    "pipeline": (4, fx.Mesh(pipeline=2), fx.FSDP(), r"Use PP\(\), with stages=fx.FSDP"),
    "recompute": (4, None, fx.FSDP(), "Plan.recompute names the class 'Nothing'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_does_not_fit_is_refused_once_plans_are_compared(name):
    n, mesh, config, words = BAD[name]
    recompute = ("Nothing",) if name == "recompute" else ()
    for rank in (0, n - 1):
        with fake_world(n, rank=rank, mesh=mesh) as ctx:
            calls = ctx.comm.slot(CallState).count
            with pytest.raises(fx.PlanError, match=words):
                fx.wrap(Transformer(), ctx, fx.Plan(strategy=config, recompute=recompute))
            assert ctx.comm.slot(CallState).count == calls + 1


def test_a_function_chooses_blocks_and_the_plan_keeps_its_path():
    config = fx.FSDP(wrap_by=is_block)
    assert config.wrap_by == "tests.cluster._models:is_block"
    assert config == fx.FSDP(wrap_by="tests.cluster._models:is_block")
    assert fx.state.loads(fx.state.dumps(fx.Plan(strategy=config)), fx.Plan).strategy == config
    net = Transformer()
    assert units(net, config) == [net.blocks[1], net.blocks[0]]
    for wrong in (lambda name, part: True, "is_block", "tests.cluster:", 3):
        with raises_code("FX200", "wrap_by"):
            fx.FSDP(wrap_by=wrong)


def test_blocks_are_gathered_ahead_as_the_plan_says():
    with fake_world(4) as ctx:
        config = fx.FSDP(forward_prefetch=2, backward_prefetch=1)
        net = fx.wrap(Transformer(), ctx, fx.Plan(strategy=config)).module
        root, first, second = (one._get_fsdp_state() for one in (net, *net.blocks))
        forward = [list(one._states_to_forward_prefetch) for one in (root, first, second)]
        backward = [list(one._states_to_backward_prefetch) for one in (root, first, second)]
    assert forward == [[first, second], [second], []]
    assert backward == [[], [root], [first]]


def test_offload_on_one_rank_is_refused():
    net = Transformer()
    with fx.detect({}, device="cpu") as ctx:
        plan = fx.Plan(strategy=fx.FSDP(offload=True))
        with raises_code("FX202"):
            fx.wrap(net, ctx, plan)


@pytest.mark.parametrize("rank", slow_after(1, [13, 0, 63]))
@pytest.mark.parametrize(
    ("mesh", "config", "over"),
    [
        (None, fx.FSDP(), 64),
        (None, fx.FSDP(shard=8), 8),
        (fx.Mesh(replicate=-1, shard=4), fx.FSDP(), 4),
        (None, fx.FSDP(mode="none"), 1),
    ],
)
def test_a_rank_holds_its_part(rank, mesh, config, over):
    with fake_world(64, rank=rank, mesh=mesh) as ctx:
        net = Transformer()
        rows = {name: p.shape for name, p in net.named_parameters()}
        model = fx.wrap(net, ctx, fx.Plan(strategy=config), optimizer=_sgd)
        for name, parameter in model.module.named_parameters():
            most = -(-rows[name][0] // over)
            assert parameter.to_local().shape[0] <= most
            assert parameter.shape == rows[name]
            mesh = parameter.device_mesh
            assert dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))["shard"] == over
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        fx.ops.clip_norm(model, 1.0)
        assert fx.ops.apply(model).applied


def _halves(ctx, compute, reduce):
    config = fx.FSDP(reduce_dtype=reduce)
    seen = {}
    net = Transformer(dtype=torch.float32)
    net.blocks[0].up.register_forward_hook(lambda m, a, out: seen.update(w=m.weight.dtype))
    plan = fx.Plan(strategy=config, precision=compute, clip_norm=1.0)
    model = fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW)
    tokens = torch.arange(32).reshape(4, 8) % 24
    loader = fx.shard(DataLoader(TensorDataset(tokens), batch_size=1), ctx, plan)

    def loss(model, batch):
        logits = model(batch[0])
        seen["out"] = logits.dtype
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[0].flatten())

    fns = fx.StepFns(model=model, loss=loss)
    reports = [fx.step(ctx, batch, fns) for epoch in loader.epochs(6) for batch in epoch]
    parameters = {p.dtype for p in model.parameters()} | {p.grad for p in model.parameters()}
    losses = [float(fx.ops.reduce(r.loss, ctx, op="mean")) for r in reports if r.applied]
    return losses, seen, parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "reduce"), slow_after(1, [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")])
)
def test_parameters_are_gathered_in_the_plans_precision(pair, compute, reduce):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    for losses, seen, parameters in pair.run(_halves, compute, reduce):
        assert seen == {"w": dtype, "out": dtype}
        assert parameters == {torch.float32, None}  # the optimizer's stay; no gradient is left
        assert sum(losses[-4:]) < sum(losses[:4])


def _branches(ctx):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))

        def forward(self, x, index):
            return self.parts[2](self.parts[index](x))

    torch.manual_seed(0)
    plan = fx.Plan(strategy=fx.FSDP(unused_parameters=True, min_params=1000))
    model = fx.wrap(Net(), ctx, plan, optimizer=_sgd)
    fx.ops.backward(model(torch.ones(1, 3), ctx.rank).sum() * 1.0, model)
    return [p.grad.full_tensor() for p in model.parameters()]


def test_ranks_may_leave_out_different_parameters(pair):
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        with raises_code("FX202", "unused_parameters"):
            pair.run(_branches)
        return
    torch.manual_seed(0)
    parts = [nn.Linear(3, 3, bias=False) for _ in range(3)]
    for index in range(2):
        (parts[2](parts[index](torch.ones(1, 3))).sum() / 2).backward()
    for grads in pair.run(_branches):
        for grad, part in zip(grads, parts, strict=True):
            torch.testing.assert_close(grad, part.weight.grad)


def _stopped(ctx):
    model = fx.wrap(Transformer(), ctx, FSDP, optimizer=_sgd)
    with pytest.raises(KeyError), fx.ops.sync(model, enabled=False):
        raise KeyError
    fx.ops.backward(model(torch.zeros(1, 8, dtype=torch.int64)).sum(), model)
    return all(p.grad is not None for p in model.parameters())


def test_an_error_inside_a_window_leaves_gradients_reduced_later(pair):
    assert pair.run(_stopped) == [True, True]


class _Scaled(nn.Module):
    """Has parameters that torch does not shard: one without a dimension, one without values."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.last(self.first(x)) * self.scale + self.empty.sum()


def _by_hand(ctx):
    torch.manual_seed(ctx.rank)
    plan = fx.Plan(strategy=fx.FSDP(ignore=("last.*",)))
    model = fx.wrap(_Scaled(), ctx, plan, optimizer=_sgd)
    before = {name: value.clone() for name, value in fx.weights(model)}
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model(rows[ctx.rank :: ctx.world_size]).square().mean().backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    return before, dict(fx.weights(model)), rows


def test_parameters_that_are_not_sharded_train_in_a_loop_by_hand(pair):
    for before, after, rows in pair.run(_by_hand):
        net = _Scaled()
        net.load_state_dict(before)
        optimizer = _sgd(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(after, dict(net.state_dict()))


def _optimizers(ctx):
    other = _sgd(Transformer().parameters())
    with raises_code("FX200", "Transformer"):
        fx.wrap(Transformer(), ctx, FSDP, optimizer=other)
    plan = fx.Plan(strategy=fx.FSDP(ignore=("gain",)))
    model = fx.wrap(Transformer(), ctx, plan, optimizer=torch.optim.AdamW)
    alike = fx.wrap(Transformer(), ctx, FSDP, optimizer=torch.optim.AdamW)
    return [m.optimizer.param_groups[0]["foreach"] for m in (model, alike)]


def test_optimizers_take_parameters_of_several_layouts_one_by_one(pair):
    assert pair.run(_optimizers) == [[False, None]] * 2


def _traffic(ctx, by_hand):
    """What one update sends, once the model has warmed up."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    net = Transformer()
    if by_hand:
        mesh = init_device_mesh("cpu", (2,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = _sgd(net.parameters())

        def update():
            net(tokens).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
    else:
        plan = fx.Plan(strategy=fx.FSDP(), clip_norm=1.0)
        model = fx.wrap(net, ctx, plan, optimizer=_sgd)
        rows = fx.shard(DataLoader(TensorDataset(tokens.repeat(2, 1)), batch_size=2), ctx, plan)
        batch = next(iter(rows))
        fns = fx.StepFns(model=model, loss=lambda model, b: model(b[0]).sum())

        def update():
            fx.step(ctx, batch, fns)

    update()
    with count_collectives() as counted:
        update()
    return counted.counts, counted.bytes


def test_an_update_sends_what_torch_by_hand_sends(pair):
    (counts, sent), _ = pair.run(_traffic, False)
    (wanted, by_hand), _ = pair.run(_traffic, True)
    # Of the norm, torch reduces one number per parameter, or per block, and fxtrain one.
    assert counts.pop("all_reduce") <= wanted.pop("all_reduce")
    assert counts == wanted
    assert sent.pop("all_reduce") <= by_hand.pop("all_reduce")
    assert sent == by_hand


def _refused(module, **config):
    with fake_world(2) as ctx, pytest.raises(fx.PlanError) as caught:
        fx.wrap(module, ctx, fx.Plan(strategy=fx.FSDP(**config)))
    return str(caught.value)


def test_sparse_gradients_are_refused():
    told = _refused(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    assert "sparse gradients, which 0 compute with sparse=True. Set sparse=False, or" in told


@pytest.mark.parametrize("way", ["frozen", "ignored", "units"])
def test_two_dtypes_are_accepted_where_one_buffer_has_one(way):
    module = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    config = {"ignored": {"ignore": ("0.*",)}, "units": {"min_params": 1}}.get(way, {})
    if way == "frozen":
        module[0].requires_grad_(False)
    with fake_world(2) as ctx:
        model = fx.wrap(module, ctx, fx.Plan(strategy=fx.FSDP(**config)))
        assert isinstance(model, fx.Wrapped)
