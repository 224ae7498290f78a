"""`fx.tuning.choose`, with dry runs of a small GPT."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing import Transformer
from tests._errors import raises_code
from tests.profiling._dry_runs import DRY_DDP


def train_gpt(ctx, size, plan):
    """Endless training of four blocks."""
    sys.stdout.write("not shown\n")
    net = Transformer(blocks=4, width=32, dtype=torch.float32)
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    loader = DataLoader(torch.zeros(100_000, 8, dtype=torch.int64), batch_size=size)
    while True:
        for batch in fx.shard(loader, ctx, plan):
            fx.step(ctx, batch, fns)


@DRY_DDP
@pytest.mark.slow
def test_a_small_gpt_on_eight_ranks(tmp_path, capfd):
    def ask():
        return fx.tuning.choose(
            train_gpt,
            world=8,
            device="H100",
            rows=256,
            plan=fx.Plan(clip_norm=1.0),
            processes=2,
            cache=str(tmp_path),
            minutes=60.0,
        )

    choice = ask()
    assert "not shown" not in capfd.readouterr().out
    assert not any(text.startswith("not tried") for text, _ in choice.dropped)
    assert 3 <= choice.tried <= 8  # a model that fits has one dry run for each strategy and mesh
    assert choice.plan.clip_norm == 1.0 and choice.best.memory < 10_000_000
    stored = len(list(tmp_path.iterdir()))
    assert ask() == choice
    assert len(list(tmp_path.iterdir())) == stored


@DRY_DDP
@pytest.mark.slow
def test_layers_that_the_first_dry_run_converted_are_those_of_the_model():
    pytest.importorskip("torchao")
    choice = fx.tuning.choose(
        train_gpt, world=2, device="H100", rows=32, plan=fx.Plan(precision="fp8"), processes=1,
        minutes=60.0,
    )  # fmt: skip
    assert choice.tried and choice.plan.precision.compute == "fp8"
    assert not any("skips every linear layer" in text for text, _ in choice.dropped)


@DRY_DDP
@pytest.mark.slow
def test_a_search_that_has_no_time_says_so():
    with raises_code("FX200", "0.0001 minutes"):
        fx.tuning.choose(train_gpt, world=8, device="H100", rows=256, minutes=1e-4, processes=2)


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("is no known device", {"device": "abacus"}),
        (r"rows=0", {"rows": 0}),
        (r"keep=\['strateg'\]", {"keep": ["strateg"]}),
        ("minutes=0", {"minutes": 0}),
        ("describes 3 ranks", {"plan": fx.Plan(mesh=fx.Mesh(replicate=3))}),
        ("world=0", {"world": 0}),
        (r"called as train\(ctx, size, plan\)", {"train": lambda ctx: None}),
    ],
)
def test_wrong_arguments_are_named(words, how):
    given = {"train": train_gpt, "world": 8, "device": "H100", "rows": 8} | how
    with pytest.raises(fx.FxError, match=words):
        fx.tuning.choose(given.pop("train"), **given)


def test_a_function_that_never_updates_is_an_error():
    with raises_code("FX500", "update"):
        fx.tuning.choose(lambda ctx, size, plan: None, world=8, device="H100", rows=8, processes=1)


@DRY_DDP
def test_data_that_ends_is_an_error():
    def train(ctx, size, plan):
        model = fx.wrap(torch.nn.Linear(4, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p))
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        for batch in fx.shard(DataLoader(torch.ones(8, 4), batch_size=size), ctx, plan):
            fx.step(ctx, batch, fns)

    choice = fx.tuning.choose(train, world=2, device="H100", rows=64, keep=["strategy"])
    assert choice.table == () and "fewer rows or updates than asked" in choice.advice
