"""Context parallelism beyond the laws: bad plans and batches, attention itself, transformers."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.data.to_device import make_splitter
from fxtrain.errors import DataError, StepError
from fxtrain.ops.opening import open_by_members
from fxtrain.ops.transport.exchange import CallState
from fxtrain.testing import Transformer, fake_world
from tests._errors import raises_code
from tests.cluster._models import llama

PAIR = fx.Mesh(context=2)


def _cp(**options):
    return fx.Plan(context=fx.CP(**options))


class _Other(nn.Module):
    """A model with an attention that no plan can reach."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)


class _Named(Transformer):
    def __init__(self):
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": "eager"})()


BAD = {
    "axis": (None, _cp(), Transformer, "which has one rank. Use more"),
    "silent": (PAIR, fx.Plan(), Transformer, "context=2, which a plan without context"),
    "table": (PAIR, _cp(tables=("positon",)), Transformer, "Did you mean position"),
    "fused": (PAIR, _cp(), _Other, "attention is nn.MultiheadAttention"),
    "eager": (PAIR, _cp(), _Named, "attention is 'eager'"),
    "size": (
        fx.Mesh(shard=2, context=2),
        fx.Plan(strategy=fx.FSDP(shard=2), context=fx.CP()),
        Transformer,
        r"Mesh\(shard=2, context=2\) disagree",
    ),
    "pieces": (
        PAIR,
        fx.Plan(context=fx.CP(), recompute=("Block",), compile=fx.Compile(backend="eager")),
        Transformer,
        "cannot recompute blocks that are compiled",
    ),
    "strategy": (
        PAIR,
        fx.Plan(strategy=fx.Single(), context=fx.CP()),
        Transformer,
        "cannot split seq",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_does_not_fit_is_refused_once_plans_are_compared(name):
    mesh, plan, model, words = BAD[name]
    for rank in (0, 3):
        with fake_world(4, rank=rank, mesh=mesh and fx.Mesh(replicate=-1, **_but_one(mesh))) as ctx:
            calls = ctx.comm.slot(CallState).count
            with pytest.raises(fx.PlanError, match=words):
                fx.wrap(model(), ctx, plan)
            assert ctx.comm.slot(CallState).count == calls + 1


def _but_one(mesh):
    return {axis: n for axis, n in mesh.sizes.items() if n > 1}


ROWS = torch.zeros(2, 8)
BATCHES = {
    "length": ({"x": torch.zeros(2, 10)}, {}, r"x \[2, 10\] has 10 tokens.*multiple of 4, or use"),
    "odd": ({"x": torch.zeros(2, 9)}, {"balance": False}, "multiple of 2"),
    "lengths": ((ROWS, torch.zeros(2, 4)), {}, r"0 \[2, 8\], 1 \[2, 4\]. Name those"),
    "nothing": ({"x": torch.zeros(2)}, {}, "has none. Name those"),
    "name": ({"ids": ROWS}, {"batch": ("id",)}, r"names 'id', but no.*It has: ids \[2, 8\]"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_cannot_be_cut_is_refused_on_every_context_rank(name):
    batch, options, words = BATCHES[name]
    for rank in (0, 1):
        with fake_world(2, rank=rank, mesh=PAIR) as ctx:
            cut = make_splitter(ctx, _cp(**options))
            with pytest.raises(DataError, match=words):
                cut(batch)


def test_named_tensors_are_cut_along_their_dimension_and_others_stay():
    rows = torch.arange(16).reshape(2, 8)
    batch = {"ids": rows, "deep": [rows.T], "label": torch.tensor([1, 2]), "text": "a"}
    with fake_world(2, rank=1, mesh=PAIR) as ctx:
        mine = make_splitter(ctx, _cp(batch=("ids",)))(batch)
        assert mine["ids"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
        assert mine["deep"][0] is batch["deep"][0] and mine["label"] is batch["label"]
        mine = make_splitter(ctx, _cp(batch=("deep.0",), dim=0, balance=False))(batch)
        assert mine["deep"][0].tolist() == rows.T[4:].tolist() and mine["ids"] is rows
        assert make_splitter(ctx, fx.Plan()) is None


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_token_is_on_one_rank(ranks, balance):
    parts = [fx.state.token_ranges(48, ranks, rank, balance=balance) for rank in range(ranks)]
    held = [[i for start, n in part for i in range(start, start + n)] for part in parts]
    assert {len(mine) for mine in held} == {48 // ranks}
    assert sorted(i for mine in held for i in mine) == list(range(48))
    if balance and ranks > 1:  # causal attention costs every rank the same
        assert len({sum(mine) for mine in held}) == 1


class _Attends(nn.Module):
    """Attention with whatever arguments a test gives."""

    def __init__(self, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.options = options

    def forward(self, x):
        x = (x.unsqueeze(-1) * self.weight)[:, None]
        x = x[0] if self.options.pop("flat", False) else x
        if self.options.pop("none", False):
            return x
        kept = x[..., :-2, :] if self.options.pop("short", False) else x
        return F.scaled_dot_product_attention(x, kept, kept, **self.options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "received a mask of shape"),
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"flat": True}, r"found queries \[1, 4, 4\]"),
        ({"short": True, "is_causal": True}, "4 queries to 2 keys"),
        ({"none": True}, "did not call F.scaled_dot_product_attention"),
    ],
)
def test_attention_that_cannot_go_over_ranks_is_refused(options, words):
    with fake_world(2, rank=1, mesh=PAIR) as ctx:
        model = fx.wrap(_Attends(**options), ctx, _cp())
        with pytest.raises(StepError, match=words):
            model(torch.ones(1, 4))


def test_positions_need_tokens_and_tables_that_are_long_enough():
    with fake_world(2, rank=1, mesh=PAIR) as ctx:
        model = fx.wrap(Transformer(), ctx, _cp(tables=("position",)))
        with raises_code("FX500", "8 rows", "16 tokens"):
            model(torch.zeros(1, 8, dtype=torch.int64))
        assert model.module.position.shape[0] == 8
        with raises_code("FX500", "3 tokens"):
            ops.token_positions(3, model)
        with raises_code("FX500", "dimension 1"):
            model(torch.zeros(8, dtype=torch.int64))


def _table():
    tokens = torch.arange(72).reshape(8, 9) * 7 % 24
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _train_llama(ctx, mesh):
    placed = ctx if mesh is None else fx.detect({}, device="cpu", mesh=mesh, timeout_s=60)
    plan = fx.Plan(strategy=fx.FSDP(), clip_norm=0.5, context=fx.CP(causal=True))
    model = fx.wrap(llama(), placed, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.3))
    loader = fx.shard(DataLoader(_table(), batch_size=4), placed, plan)

    def loss(model, batch):
        logits = model(input_ids=batch[0], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    fns = fx.StepFns(model=model, loss=loss)
    norms = [float(fx.step(placed, batch, fns).grad_norm) for batch in loader]
    refused = False
    if mesh is not None:
        try:
            model(input_ids=torch.zeros(1, 4).long(), labels=torch.zeros(1, 4).long())
        except StepError as error:
            refused = "shifts labels itself" in str(error)
    return norms, {n: p.detach() for n, p in fx.unwrap(model).named_parameters()}, refused


@pytest.mark.slow
def test_a_transformers_model_trains_as_in_one_process(clusters):
    ((wanted_norms, wanted, _),) = clusters[1].run(_train_llama, None)
    for norms, parameters, refused in clusters[2].run(_train_llama, PAIR):
        assert refused
        torch.testing.assert_close(norms, wanted_norms, rtol=1e-8, atol=0)
        for name, value in wanted.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-7, atol=1e-9)


def _two_contexts(ctx, mesh):
    """Shapes of outputs under two contexts; a group is closed between the first and the second."""
    spare = dist.new_group()
    plan = fx.Plan(strategy=fx.FSDP(mode="none"))
    first, second = (
        fx.detect({}, device="cpu", timeout_s=ctx.comm.timeout_s, mesh=mesh) for _ in range(2)
    )
    with first, second:
        one = fx.wrap(torch.nn.Linear(2, 3), first, plan)
        dist.destroy_process_group(spare)  # torch now counts as many groups as before `one`
        other = fx.wrap(torch.nn.Linear(2, 3), second, plan)
        return [tuple(model(torch.ones(1, 2)).shape) for model in (one, other)]


def test_groups_have_new_names_whatever_was_closed(pair):
    assert pair.run(_two_contexts, fx.Mesh(replicate=2)) == [[(1, 3)] * 2] * 2


def _names_of_groups(ctx):
    names = []
    for _ in range(3):
        group = open_by_members([ctx.rank])
        names.append(group.group_name)
        dist.destroy_process_group(group)
    return names


def test_a_name_of_a_closed_group_is_not_used_again(pair):
    for names in pair.run(_names_of_groups):
        assert len(set(names)) == 3
