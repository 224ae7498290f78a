"""Recipes of float8 on one rank: which layers they convert, what they refuse, how they train."""

import sys

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.precision.recipe_layers import convert_layers, recipe_targets
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._float8 import RECIPES, batches, kinds, net, plan_of, train, wrapped
from tests.precision._records import mlp

CPU = torch.device("cpu")


@pytest.fixture
def _torchao():
    pytest.importorskip("torchao", reason="needs fxtrain[quant]")


needs_torchao = pytest.mark.usefixtures("_torchao")


@pytest.fixture(scope="module")
def curve():
    """The losses in bf16."""
    with fx.detect(env={}, device="cpu") as made:
        plan = plan_of(None, fx.Single())
        return train(made, wrapped(made, plan), batches(made, plan))


@needs_torchao
@pytest.mark.parametrize("name", slow_after(1, RECIPES))
def test_training_follows_bf16(ctx, curve, name):
    plan = plan_of(RECIPES[name], fx.Single())
    model = wrapped(ctx, plan)
    losses = train(ctx, model, batches(ctx, plan))
    assert curve[-1] < 0.9 * curve[0]
    # Four bits differed by 2.2 to 3.5 % on CPUs with and without bf16 products; eight by 1.2 %.
    bound = 0.06 if name == "mxfp4" else 0.03
    assert all(abs(one / other - 1) < bound for one, other in zip(losses, curve, strict=True))
    assert losses != curve
    assert list(model.module.state_dict()) == list(net().state_dict())
    assert model(torch.zeros(4, 8, dtype=torch.int64)).dtype == torch.bfloat16
    assert kinds(fx.unwrap(model)) == kinds(net())


@needs_torchao
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # in tracing
def test_compiled_blocks_train_alike(ctx):
    """Traced and differentiated by torch's compiler, without its code generation."""
    losses = []
    for compiled in (None, fx.Compile(backend="aot_eager", blocks=("Block",))):
        plan = plan_of(RECIPES["rowwise"], fx.Single(), compile=compiled)
        losses.append(train(ctx, wrapped(ctx, plan), batches(ctx, plan, 3)))
    assert losses[0] == losses[1]


@needs_torchao
def test_a_model_keeps_its_layers_hooks_and_parameters(ctx):
    module, seen = net(), []
    layer = module.blocks[0].up
    layer.register_forward_hook(lambda *_: seen.append("called"))
    before = [id(one) for one in (*module.modules(), *module.parameters())]
    model = fx.wrap(module, ctx, plan_of(RECIPES["rowwise"], fx.Single()))
    model(torch.zeros(2, 8, dtype=torch.int64))
    assert seen == ["called"] and isinstance(layer, nn.Linear) and type(layer) is not nn.Linear
    fx.unwrap(model)
    assert before == [id(one) for one in (*module.modules(), *module.parameters())]
    assert type(layer) is nn.Linear


@needs_torchao
def test_an_exported_model_is_the_unconverted_one(ctx, tmp_path):
    model = wrapped(ctx, plan_of(RECIPES["mxfp8"], fx.Single()))
    fx.export(model, tmp_path / "here")
    other = net(seed=3)
    fx.load_model(tmp_path / "here", other)
    wanted = model.module.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())


def test_layers_are_skipped_for_a_reason():
    module = nn.Sequential(
        nn.Linear(64, 48), nn.Linear(48, 40), nn.Linear(40, 16), nn.Linear(16, 64), nn.Linear(64, 8)
    )
    assert recipe_targets(module, fx.Float8(min_features=20))[1] == {
        "1": "its size (48, 40) is not divisible by 16",
        "2": "its size (40, 16) is below min_features=20",
        "3": "its size (16, 64) is below min_features=20",
        "4": "the output head",
    }
    names, skipped = recipe_targets(module, fx.Float8(skip=("0",)))
    assert names == ("3",) and skipped["0"] == "named in the plan"


@pytest.mark.parametrize("recipe", [fx.Float8(), fx.MX(), fx.MX(format="nvfp4")], ids=repr)
@needs_torchao
def test_a_device_without_the_format_is_named(ctx, recipe):
    module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 3))
    before = kinds(module)
    with pytest.raises(fx.PlanError) as found:
        fx.wrap(module, ctx, plan_of(recipe, fx.Single()))
    text = str(found.value)
    assert "needs a GPU" in text and "this device is cpu" in text and "precision='bf16'" in text
    assert ("CUDA 8.9" if isinstance(recipe, fx.Float8) else "CUDA 10.0") in text
    assert ("emulate=True" in text) == (recipe != fx.MX(format="nvfp4"))
    assert kinds(module) == before


def test_a_missing_package_names_its_pip_command(ctx, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with raises_code("FX800", "'fxtrain[quant]'") as found:
        fx.wrap(mlp(), ctx, plan_of(RECIPES["rowwise"], fx.Single()))
    assert "precision=fx.Precision(compute='fp8'" in str(found.value)


REFUSED = {
    "nothing fits": (fx.Float8(min_features=512), {}, "skips every linear layer of Sequential"),
    "unknown name": (fx.Float8(skip=("nothing",)), {}, "no module of the model matches"),
    "unknown class": (fx.MX(skip_classes=("Gone",)), {}, "no class of the model matches"),
    "quantized": (fx.Float8(emulate=True), {"quantize": "torchao"}, "compute in their own format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(ctx, name):
    recipe, fields, words = REFUSED[name]
    module = mlp()
    before = kinds(module)
    with pytest.raises(fx.PlanError, match=words):
        fx.wrap(module, ctx, plan_of(recipe, fx.Single(), **fields))
    assert kinds(module) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compute": "bf16", "recipe": "rowwise"}, "a recipe says how layers compute in fp8"),
        ({"compute": "fp8", "recipe": None}, "a recipe says how layers compute in fp8"),
        ({"compute": "fp8", "recipe": "rowwize"}, "recipe='rowwize'"),
    ],
)
def test_a_recipe_belongs_to_fp8(fields, words):
    with pytest.raises(fx.PlanError, match=words):
        fx.Precision(**fields)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fx.Float8(scaling="rowwise", gather="fp8"), "one scale per tensor only"),
        (lambda: fx.MX(format="nvfp4", emulate=True), "cannot emulate"),
        (lambda: fx.MX(format="nvfp4", grad_weight="bf16"), "all three products"),
    ],
)
def test_recipes_that_the_library_lacks_are_refused(make, words):
    with pytest.raises(fx.PlanError, match=words):
        make()


def test_short_forms_and_files():
    assert fx.Plan(precision="fp8").precision.recipe == fx.Float8()
    assert fx.Precision(compute="fp8", recipe="mxfp4").recipe == fx.MX(format="mxfp4")
    assert fx.Precision(compute="fp8", recipe="rowwise").recipe == fx.Float8(scaling="rowwise")
    for recipe in ("tensorwise", "nvfp4", "te"):
        plan = fx.Plan(precision=fx.Precision(compute="fp8", recipe=recipe))
        assert fx.state.loads(fx.state.dumps(plan)) == plan


@needs_torchao
def test_rows_that_mx_cannot_scale_are_an_error(ctx):
    model = fx.wrap(mlp(), ctx, plan_of(RECIPES["mxfp8"], fx.Single()))
    with raises_code("FX500", "32 rows"):
        model(torch.randn(7, 64))
    with torch.no_grad():
        assert model(torch.randn(7, 64)).shape == (7, 3)


@needs_torchao
def test_conversion_is_undone_after_an_error_in_the_library(monkeypatch):
    from fxtrain.precision import torchao_modules

    module = mlp()
    before, made = kinds(module), []

    def fails_later(part, config):
        made.append(part)
        if len(made) > 1:
            raise RuntimeError("out of memory")
        return part

    monkeypatch.setattr(torchao_modules, "convert_to_float8_training", fails_later)
    with pytest.raises(RuntimeError, match="out of memory"):
        convert_layers(module, RECIPES["rowwise"], CPU)
    assert kinds(module) == before and len(made) == 2
