"""`fx.quality`: errors that are known in advance, ranks, curves, tables and pictures."""

import json
import math

import attrs
import pytest
import torch
from rich.console import Console
from torch import nn

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.cli.compare_command import RECIPES, WEIGHTS, plan_of
from fxtrain.quality import innermost
from tests.precision._records import RECORDS, frozen_mlp, marked, mlp

FP32 = {"same": fx.Plan()}
BF16 = {"bf16": fx.Plan(precision="bf16")}


def _batches(count=3):
    torch.manual_seed(1)
    return [torch.randn(4, 64) for _ in range(count)]


def _loss(model, x):
    return model(x).square().mean()


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _dropping():
    return nn.Sequential(nn.Linear(64, 8), nn.Dropout(), nn.Linear(8, 3))


def example():
    """What the command is given."""
    return fx.quality.Case(build=mlp, batches=_batches(), outputs="logits", loss=_loss,
                           optimizer=_sgd)  # fmt: skip


CASE = example()


def test_a_plan_equals_itself_in_every_bit(ctx):
    case = attrs.evolve(CASE, build=_dropping)
    state = torch.get_rng_state()
    found = fx.quality.compare(case, FP32, ctx, updates=2)
    assert torch.equal(torch.get_rng_state(), state)
    (plan,) = found.plans
    assert [one.name for one in plan.layers] == ["0", "1", "2"]
    assert all(one.relative == one.largest == 0 for one in (*plan.layers, plan.outputs))
    assert plan.outputs.snr_db == math.inf and plan.agreement == 1
    assert plan.losses == found.losses and len(plan.losses) == 2
    assert plan.weight_bytes == found.weight_bytes == (64 * 8 + 8 + 8 * 3 + 3) * 4


def test_errors_are_those_computed_by_hand(ctx):
    (plan,) = fx.quality.compare(CASE, BF16, ctx).plans
    rows, net = torch.cat(CASE.batches), mlp()
    with torch.no_grad():
        first, wanted = net[0](rows), net(rows)
        with torch.autocast("cpu", torch.bfloat16):
            first16, got = net[0](rows).float(), net(rows).float()
    for one, reference, value in ((plan.layers[0], first, first16), (plan.outputs, wanted, got)):
        relative = ((reference - value).norm() / reference.norm()).item()
        assert one.relative == pytest.approx(relative, rel=1e-3)
        assert one.snr_db == pytest.approx(-20 * math.log10(relative), rel=1e-3)
        assert one.largest == pytest.approx((reference - value).abs().max().item(), rel=1e-3)
    assert plan.agreement == (wanted.argmax(-1) == got.argmax(-1)).float().mean().item()


@pytest.mark.parametrize("name", marked(RECORDS))
def test_quantised_layers_have_the_names_of_plain_ones(ctx, name):
    case = attrs.evolve(CASE, outputs="embeddings")
    found = fx.quality.compare(case, {name: fx.Plan(quantize=RECORDS[name])}, ctx)
    (plan,) = found.plans
    assert [one.name for one in plan.layers] == ["0", "1", "2", "3"]
    assert 0 < plan.layers[0].relative < (0.5 if name == "int2" else 0.2)
    assert 0.7 < plan.cosine < 1 and plan.agreement is None
    assert plan.weight_bytes < 0.5 * found.weight_bytes


@pytest.mark.parametrize("name", marked(["nf4"]))
def test_a_curve_trains_what_stays_unquantised(ctx, name):
    case = attrs.evolve(CASE, build=frozen_mlp)
    found = fx.quality.compare(case, {name: fx.Plan(quantize=RECORDS[name])}, ctx, updates=4)
    curve = found.plans[0].losses  # four updates of three batches: the second epoch begins
    assert len(curve) == len(found.losses) == 4 and curve[-1] < curve[0]
    assert curve != found.losses and curve == pytest.approx(found.losses, rel=0.3)


def _on_ranks(ctx):
    case = attrs.evolve(CASE, batches=_batches(4))
    return fx.quality.compare(case, {"bf16": fx.Plan(strategy=fx.DDP(), precision="bf16")}, ctx,
                              reference=fx.Plan(strategy=fx.DDP()), updates=2)  # fmt: skip


def test_ranks_share_the_batches_and_agree(pair, ctx):
    first, second = pair.run(_on_ranks)
    assert first == second
    alone = fx.quality.compare(attrs.evolve(CASE, batches=_batches(4)), BF16, ctx)
    assert first.plans[0].outputs.relative == pytest.approx(alone.plans[0].outputs.relative)
    assert first.plans[0].agreement == alone.plans[0].agreement


class _Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 3)

    def forward(self, x):
        return self.linear(x) * (math.inf if torch.is_autocast_enabled("cpu") else 1)


def test_values_that_overflow_are_shown(ctx):
    found = fx.quality.compare(attrs.evolve(CASE, build=_Overflowing), BF16, ctx)
    assert found.plans[0].outputs.relative == math.inf
    assert found.plans[0].outputs.snr_db == -math.inf


def test_the_case_says_what_to_compare(ctx):
    batch = {"input": torch.ones(2, 64)}
    case = fx.quality.Case(build=lambda: nn.Linear(64, 2), batches=[batch])
    assert fx.quality.compare(case, FP32, ctx).plans[0].outputs.relative == 0
    pair = attrs.evolve(case, forward=lambda model, batch: (model(**batch),))
    with pytest.raises(fx.PlanError, match=r"returned a tuple, not a tensor.*forward="):
        fx.quality.compare(pair, FP32, ctx)


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ({"outputs": "best"}, {}, "choose one of 'values', 'logits', 'embeddings'"),
        ({"loss": None}, {"updates": 1}, "needs Case"),
        ({"optimizer": None}, {"updates": 1}, "needs Case"),
    ],
)
def test_what_cannot_be_compared(ctx, change, more, words):
    with pytest.raises(fx.PlanError, match=words):
        fx.quality.compare(attrs.evolve(CASE, **change), BF16, ctx, **more)


def test_no_batch_is_an_error(ctx):
    with pytest.raises(fx.errors.DataError, match=r"0 batches for 1 data rank\."):
        fx.quality.compare(attrs.evolve(CASE, batches=[]), BF16, ctx)


def test_modules_inside_others_are_shown_once():
    assert innermost(["a.b", "a", "ab", "c.d.e"]) == ["a.b", "ab", "c.d.e"]


def test_the_command(tmp_path, capsys):
    plan, picture = str(tmp_path / "a.yaml"), tmp_path / "a.svg"
    fx.write_plan(fx.Plan(precision="bf16"), plan)
    words = ["compare-precision", "tests.quality.test_compare:example", "--plan", plan]
    assert main([*words, "--updates", "2", "--picture", str(picture)]) == Exit.WELL
    out = capsys.readouterr().out
    assert "best agrees" in out and "last loss" in out and "largest errors" in out
    assert "training loss" in picture.read_text()
    assert main([*words, "--json", "--reference", plan]) == Exit.WELL
    found = json.loads(capsys.readouterr().out)
    assert found["reference"] == "bf16" and found["plans"][0]["outputs"]["snr_db"] is None
    assert main([*words, "--picture", "a.txt"]) == Exit.WRONG
    words[1] = "tests.quality.test_compare:FP32"
    assert main(words) == Exit.WRONG
    assert "that returns an fx.quality.Case" in capsys.readouterr().err


def test_the_command_knows_names_of_formats_and_recipes(capsys):
    pytest.importorskip("torchao", reason="needs fxtrain[quant]")
    words = ["compare-precision", "tests.quality.test_compare:example", "--json"]
    names = ("bf16", "torchao", "rowwise", "mxfp8")
    assert main([*words, "--emulate", *(w for n in names for w in ("--plan", n))]) == Exit.WELL
    found = json.loads(capsys.readouterr().out)
    errors = {one["name"]: one["outputs"]["relative"] for one in found["plans"]}
    assert set(errors) == set(names) and all(0 < error < 0.1 for error in errors.values())
    assert main([*words, "--plan", "rowwise"]) == Exit.WRONG
    assert "Float8(emulate=True)" in capsys.readouterr().err
    assert main([*words, "--plan", "te", "--emulate"]) == Exit.WRONG


def test_the_command_names_what_a_plan_may_be(capsys):
    words = ["compare-precision", "tests.quality.test_compare:example"]
    assert main([*words, "--plan", "bf17"]) == Exit.WRONG
    told = capsys.readouterr().err
    assert "--plan bf17: neither a name nor a file. Did you mean 'bf16'? Names are fp32, " in told
    assert main([*words, "--plan", "nowhere.yaml"]) == Exit.WRONG
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err
    assert all(plan_of(name).precision.recipe is not None for name in RECIPES)
    assert all(plan_of(name).quantize is not None for name in WEIGHTS)


def test_the_table_shows_the_largest_errors(ctx):
    found = fx.quality.compare(CASE, BF16, ctx)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(fx.quality.table(found, layers=2))
    lines = shown.get().splitlines()
    start = next(n for n, line in enumerate(lines) if "largest errors" in line)
    worst = sorted(found.plans[0].layers, key=lambda one: -one.relative)[:2]
    named = [line.split()[0] for line in lines[start + 1 :] if line.strip()]
    assert named == [one.name for one in worst]
