"""Blends of files of tokens: checkpoints of changed blends, sources that end, wrong blends."""

import collections
import itertools

import pytest
import torch

import fxtrain as fx
from fxtrain.token_files.records import weight_at
from tests._errors import raises_code
from tests.data._loaders import world
from tests.data._token_files import write_megatron, write_nanogpt


@pytest.fixture
def parts(tmp_path):
    """Sources of 8 and 24 rows of one token."""
    web = write_megatron(tmp_path, [list(range(1, 9))], name="web")
    code = write_megatron(tmp_path, [list(range(1, 25))], name="code")
    return [
        fx.data.BlendPart(name="web", source=web, weight=1),
        fx.data.BlendPart(name="code", source=code, weight=3),
    ]


def _load(blend, plan=fx.Plan(), **settings):  # noqa: B008
    return fx.tokens(blend, world(1)[0], plan, **{"length": 1, "batch_size": 4, **settings})


def test_fit_resumes_a_blend_with_another_source_and_more_updates(tmp_path, parts):
    third = fx.data.BlendPart(name="books", source=write_nanogpt(tmp_path, [list(range(1, 40))]))
    seen = collections.defaultdict(list)

    def loss(model, batch):
        for source, token in zip(batch["source"].tolist(), batch["tokens"][:, 0], strict=True):
            seen[source].append(int(token))
        return model(torch.ones(1, 1)).sum()

    with fx.detect({}, device="cpu") as ctx:

        def train(blend, updates):
            model = fx.wrap(
                torch.nn.Linear(1, 1),
                ctx,
                fx.Plan(),
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            )
            loader = fx.tokens(blend, ctx, length=1, batch_size=4)
            fns = fx.StepFns(model=model, loss=loss)
            return [*fx.fit(ctx, fns, loader, updates=updates, path=tmp_path / "run", resume=True)]

        train(fx.data.Blend(parts=parts), 4)
        train(fx.data.Blend(parts=[*parts, third]), 7)
    assert [len(seen[source]) for source in range(3)] == [4 + 3, 12 + 7, 2]
    for source, rows in ((0, range(1, 9)), (1, range(1, 25)), (2, [0, *range(1, 40)])):
        assert len(set(seen[source])) == len(seen[source]) and set(seen[source]) <= set(rows)


def test_a_source_that_ends_is_repeated_in_another_order_or_an_error(parts):
    (web, _) = parts
    rows = [
        batch.data["tokens"][:, 0].tolist()
        for batch in itertools.islice(_load(fx.data.Blend(parts=[web]), batch_size=8), 3)
    ]
    assert all(sorted(lap) == list(range(1, 9)) for lap in rows)
    assert len({tuple(lap) for lap in rows}) == 3
    with raises_code("FX400", '"code"'):
        list(_load(fx.data.Blend(parts=parts, ends="error")))
    with raises_code("FX400", "epochs"):
        _load(fx.data.Blend(parts=parts)).epochs(2)
    stops = _load(fx.data.Blend(parts=parts, ends="stop"))
    epochs = [[batch.data["tokens"] for batch in epoch] for epoch in stops.epochs(2)]
    assert [len(torch.cat(epoch)) for epoch in epochs] == [32, 32]
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_documents_of_a_blend(parts, workers):
    loader = _load(fx.data.Blend(parts=parts), workers=workers, documents=True, shuffle=False)
    first = next(iter(loader))
    assert first.data["source"].tolist() == [1, 0, 1, 1]
    assert first.data["tokens"].tolist() == [[1], [1], [2], [3]]
    assert first.data["documents"].tolist() == [[0]] * 4


def test_a_position_without_cursors_is_an_error(parts):
    loader = _load(fx.data.Blend(parts=parts))
    assert loader.state() is None
    batch = next(iter(loader))
    with raises_code("FX401"):
        next(iter(loader.at(batch.position)))
    for changed, message in (
        (_load(fx.data.Blend(parts=parts), fx.Plan(seed=1)), "in the order of seed 1"),
        (_load(fx.data.Blend(parts=parts), length=2), 'source "web" .* had 8 rows'),
    ):
        with pytest.raises(fx.errors.DataError, match=message):
            next(iter(changed.at(batch.position, loader.state())))


def test_a_blend_without_an_end_is_not_evaluated(parts):
    loader, model = _load(fx.data.Blend(parts=parts)), torch.nn.Linear(1, 1)
    with (
        fx.detect({}, device="cpu") as ctx,
        raises_code("FX400", "evaluate"),
    ):
        wrapped = fx.wrap(model, ctx, fx.Plan())
        fx.evaluate(ctx, wrapped, loader, lambda model, batch: {"n": batch["tokens"]})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([-1.0], "a weight is negative"),
        ([((5, 1.0), (5, 2.0))], "updates grow"),
        ([()], "points of"),
        ([0.0, 0.0], "all weights are 0 at update 0"),
        ([((0, 1.0), (9, 0.0))], "all weights are 0 at update 9"),
        (["much"], "choose"),
        ([], "names"),
    ],
)
def test_wrong_weights_are_errors(weights, message):
    source = fx.data.NanoGPTTokens(path="a.bin")
    with pytest.raises(fx.PlanError, match=message):
        fx.data.Blend(
            parts=[
                fx.data.BlendPart(name=f"{n}", source=source, weight=weight)
                for n, weight in enumerate(weights)
            ]
        )


def test_a_weight_is_linear_between_its_points():
    weights = [weight_at(((2, 0.0), (4, 1.0)), update) for update in range(6)]
    assert weights == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0] and weight_at(3.0, 7) == 3.0
