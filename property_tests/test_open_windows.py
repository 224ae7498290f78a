"""A law: a checkpoint inside any window continues under any strategy, at any world size."""

import tempfile

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing.training import on_mesh

EPOCHS, GLOBAL = 2, 4  # rows of a batch over all ranks
STYLES = (
    fx.Style(modules="blocks.*.up", style="colwise"),
    fx.Style(modules="blocks.*.down", style="rowwise"),
)
TOKENS = fx.Style(modules="tokens", style="rowwise")
HEAD = fx.Style(modules="head", style="colwise_gather")
TENSOR = fx.TP(styles=STYLES)
WORDS, WIDTH, LENGTH = 12, 8, 4
# By name: the world size, the strategy and its mesh.
PLACES = {
    "single": (1, fx.Single(), None),
    "one shard": (1, fx.FSDP(), None),
    "ddp": (2, fx.DDP(), None),
    "unused": (2, fx.DDP(unused_parameters=True), None),
    "zero-1": (2, fx.DDP(shard_optimizer=True), None),
    "fsdp": (2, fx.FSDP(min_params=100), None),
    "kept full": (2, fx.FSDP(min_params=100, mode="grads_and_optimizer"), None),
    "replicated": (2, fx.FSDP(mode="none"), None),
    "ignored": (2, fx.FSDP(ignore=("head.weight", "tokens.weight")), None),
}
WIDE = {
    "ddp of four": (4, fx.DDP(), None),
    "fsdp of four": (4, fx.FSDP(min_params=100), None),
    "hybrid": (4, fx.FSDP(shard=2), None),
    "tensor": (2, fx.FSDP(tensor=TENSOR), fx.Mesh(tensor=2)),
    "embedding": (2, fx.FSDP(tensor=fx.TP(styles=(*STYLES, TOKENS))), fx.Mesh(tensor=2)),
    "embedding, head": (2, fx.FSDP(tensor=fx.TP(styles=(TOKENS, HEAD))), fx.Mesh(tensor=2)),
    "split logits": (
        2,
        fx.FSDP(tensor=fx.TP(styles=(*STYLES, TOKENS, HEAD), loss=True)),
        fx.Mesh(tensor=2),
    ),
    "sequence": (
        2,
        fx.FSDP(tensor=fx.TP(styles=(*STYLES, TOKENS), sequence=True)),
        fx.Mesh(tensor=2),
    ),
    "tensor and shards": (4, fx.FSDP(min_params=100, tensor=TENSOR), fx.Mesh(shard=2, tensor=2)),
    "embedding and shards": (
        4,
        fx.FSDP(min_params=100, tensor=fx.TP(styles=(*STYLES, TOKENS, HEAD))),
        fx.Mesh(shard=2, tensor=2),
    ),
    "sequence and replicas": (
        4,
        fx.FSDP(mode="none", tensor=fx.TP(styles=(*STYLES, TOKENS, HEAD), sequence=True)),
        fx.Mesh(replicate=2, tensor=2),
    ),
    "stages": (2, fx.PP(split=("blocks.1",), microbatches=2), fx.Mesh(pipeline=2)),
    "stages twice": (
        4,
        fx.PP(split=("blocks.1",), microbatches=2),
        fx.Mesh(pipeline=2, replicate=2),
    ),
    "stages of shards": (
        4,
        fx.PP(split=("blocks.1",), microbatches=2, stages=fx.FSDP(min_params=100)),
        fx.Mesh(pipeline=2, shard=2),
    ),
}


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _table(rows):
    return TensorDataset(
        torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(3))
    )


def _net(*, frozen):
    torch.manual_seed(0)
    net = _Net().double()
    net.blocks[0].down.weight.requires_grad_(not frozen)
    return net


def _loss(model, batch, *, weighted):
    logits = model(batch[0])
    each = F.cross_entropy(logits.flatten(0, 1), batch[0].flatten(), reduction="none")
    return fx.Weighted(each.sum(), each.numel()) if weighted else each.mean()


def _run(ctx, folder, place, case, *, stop=None, resume=False, accumulate=None):
    """Train to the end, or to a micro-batch at which the state is saved; the weights."""
    _, strategy, mesh = place
    rows, window, flush, sync_each, weighted, frozen = case
    plan = fx.Plan(
        strategy=strategy,
        accumulate=accumulate or window,
        flush=flush,
        sync_each=sync_each,
        batch="global",
        clip_norm=0.5,
    )
    with on_mesh(ctx, mesh) as placed:
        adam = lambda params: torch.optim.Adam(params, lr=0.05)  # noqa: E731
        model = fx.wrap(_net(frozen=frozen), placed, plan, optimizer=adam)
        loader = fx.shard(DataLoader(_table(rows), batch_size=GLOBAL), placed, plan)
        fns = fx.StepFns(model=model, loss=lambda m, b: _loss(m, b, weighted=weighted))
        position, count = fx.Position(), 0
        if resume:
            position = fx.restore(folder, placed, model).position
        for epoch in loader.at(position).epochs(EPOCHS):
            for batch in epoch:
                fx.step(placed, batch, fns)
                count += 1
                if count == stop:
                    fx.save(folder, placed, model, position=batch.position)
                    return None
        weights = fx.unwrap(model).state_dict()
    return {name: value.detach().clone() for name, value in weights.items()}


def _left_alone(ctx, place, case):
    return _run(ctx, "", place, case)


def _first(ctx, folder, place, case, stop):
    return _run(ctx, folder, place, case, stop=stop)


def _second(ctx, folder, place, case):
    return _run(ctx, folder, place, case, resume=True)


@st.composite
def _cases(draw):
    rows = draw(st.integers(3, 10)) * GLOBAL
    window = draw(st.integers(2, 4))
    flags = [draw(st.booleans()) for _ in range(4)]
    stop = draw(st.integers(1, 2 * rows // GLOBAL - 1))
    return (rows, window, *flags), stop


def _check(clusters, places, before, after, case, stop):
    first, second = places[before], places[after]
    with tempfile.TemporaryDirectory() as folder:
        wanted = clusters[second[0]].run(_left_alone, second, case)[0]
        clusters[first[0]].run(_first, folder, first, case, stop)
        got = clusters[second[0]].run(_second, folder, second, case)[0]
    for name, value in wanted.items():
        if before == after:
            assert torch.equal(got[name], value), name
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-7, atol=1e-9)


DRAWN = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@settings(DRAWN, max_examples=3)
@given(st.sampled_from(sorted(PLACES)), st.sampled_from(sorted(PLACES)), _cases())
def test_an_open_window_continues_anywhere(clusters, before, after, drawn):
    _check(clusters, PLACES, before, after, *drawn)


# Of others here, or the same on two ranks.
PARTS = ("embedding", "embedding, head", "tensor and shards", "ddp of four", "fsdp of four")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("single", "ddp", "fsdp") else pytest.mark.slow)
        for name in (*PLACES, *WIDE)
        if name not in PARTS
    ],
)
@settings(DRAWN, max_examples=2)
@given(drawn=_cases())
def test_an_open_window_continues_bit_for_bit(clusters, name, drawn):
    _check(clusters, PLACES | WIDE, name, name, *drawn)


@pytest.mark.slow
@settings(DRAWN, max_examples=20)
@given(st.data(), _cases())
def test_an_open_window_continues_anywhere_on_four_ranks(clusters, data, drawn):
    places = PLACES | WIDE
    before = data.draw(st.sampled_from(sorted(places)))
    after = data.draw(st.sampled_from(sorted(WIDE) if before in PLACES else sorted(places)))
    _check(clusters, places, before, after, *drawn)
