"""Training in float8 on several ranks: it follows bf16, resumes bit for bit, and can be undone."""

import importlib.util

import attrs
import pytest
import torch
from torch import nn

import fxtrain as fx
from tests._slow import slow_after
from tests.cluster._float8 import RECIPES, batches, kinds, net, plan_of, train, wrapped
from tests.cluster._models import ATTENTION, DOWN, UP

NEEDS = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs fxtrain[quant]"
)
pytestmark = NEEDS
GATHERED = attrs.evolve(RECIPES["tensorwise"], gather="fp8")
CASES = {
    "ddp": (RECIPES["tensorwise"], fx.DDP()),
    "fsdp": (RECIPES["rowwise"], fx.FSDP()),
    "fsdp gathers float8": (GATHERED, fx.FSDP()),
    "fsdp mx": (RECIPES["mxfp8"], fx.FSDP()),
}


def _resumed(ctx, plan, folder):
    """Losses, whether a restored model continues alike, and the module that unwrapping returns."""
    model, some = wrapped(ctx, plan), list(batches(ctx, plan, 5))
    losses = train(ctx, model, some[:3])
    fx.save(folder, ctx, model, position=fx.Position())
    rest = train(ctx, model, some[3:])
    other = wrapped(ctx, plan, seed=4)
    fx.restore(folder, ctx, other)
    same = train(ctx, other, some[3:]) == rest
    module = fx.unwrap(model)
    plain = all(type(one) is nn.Parameter for one in module.parameters())
    return losses + rest, same, plain and kinds(module) == kinds(net())


def _curve(ctx, plan):
    return train(ctx, wrapped(ctx, plan), batches(ctx, plan, 5))


def _near(losses, wanted):
    assert wanted[-1] < 0.97 * wanted[0]
    assert all(abs(one / other - 1) < 0.03 for one, other in zip(losses, wanted, strict=True))


@pytest.mark.parametrize("name", slow_after(1, CASES))
def test_ranks_follow_bf16_and_resume_bit_for_bit(pair, name, tmp_path):
    recipe, strategy = CASES[name]
    folder = str(tmp_path / "checkpoint")
    wanted = pair.run(_curve, plan_of(None, strategy))[0]
    one, other = pair.run(_resumed, plan_of(recipe, strategy), folder)
    assert one == other
    losses, same, undone = one
    _near(losses, wanted)
    assert same and undone
    with fx.detect(env={}, device="cpu") as ctx:  # the checkpoint is that of an unconverted model
        alone = wrapped(ctx, plan_of(None, fx.Single()), seed=7)
        fx.restore(folder, ctx, alone)


@pytest.mark.slow
def test_compiled_shards_train_alike(pair):
    """Hooks of FSDP, layers of torchao and torch's compiler together."""
    compiled = fx.Compile(backend="aot_eager", blocks=("Block",))
    plans = [plan_of(GATHERED, fx.FSDP(), compile=one) for one in (None, compiled)]
    plain, other = [pair.run(_curve, plan)[0] for plan in plans]
    assert other == pytest.approx(plain, rel=1e-3)


def _gathered(ctx):
    """For each converted weight: the values that FSDP gathers, and those cast after gathering."""
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    plan = plan_of(GATHERED, fx.FSDP())
    model = wrapped(ctx, plan)
    train(ctx, model, batches(ctx, plan, 1))
    with torch.no_grad():  # computes the scales of the weights as they are now
        model(torch.zeros(4, 8, dtype=torch.int64))
    found = []
    for part in model.module.modules():
        local = getattr(getattr(part, "weight", None), "_local_tensor", None)
        if not hasattr(local, "fsdp_pre_all_gather"):
            continue
        mesh = part.weight.device_mesh
        (data,), (scale,) = local.fsdp_pre_all_gather(mesh)
        full = part.weight.detach().full_tensor()
        whole = hp_tensor_to_float8_dynamic(
            full, e4m3_dtype, part.linear_mm_config, gemm_input_role=GemmInputRole.WEIGHT
        )
        rows = data.shape[0]
        mine = whole._data[ctx.rank * rows : (ctx.rank + 1) * rows]
        found.append(
            torch.equal(data.view(torch.uint8), mine.view(torch.uint8))
            and torch.equal(scale, whole._scale)
        )
    return found


@pytest.mark.slow
def test_gathering_float8_shards_equals_casting_the_gathered_weight(pair):
    one, other = pair.run(_gathered)
    assert one == other == [True] * 12  # six layers in each of two blocks


def _split(ctx, plan):
    with fx.detect({}, device="cpu", mesh=fx.Mesh(tensor=2), timeout_s=60) as placed:
        model = wrapped(placed, plan)
        losses = train(placed, model, batches(placed, plan, 5))
        return losses, kinds(fx.unwrap(model)) == kinds(net())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_layers_split_over_the_tensor_axis(pair, name):
    tensor = fx.FSDP(mode="none", tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))
    with fx.detect(env={}, device="cpu") as ctx:
        wanted = train(ctx, wrapped(ctx, (plan := plan_of(None))), batches(ctx, plan, 5))
    losses, undone = pair.run(_split, plan_of(RECIPES[name], tensor))[0]
    _near(losses, wanted)
    assert undone


@pytest.mark.slow
def test_compiled_layers_split_over_the_tensor_axis(pair):
    """DTensors, layers of torchao and torch's compiler together."""
    tensor = fx.FSDP(mode="none", tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))
    compiled = fx.Compile(backend="aot_eager", blocks=("Block",))
    plans = [plan_of(RECIPES["tensorwise"], tensor, compile=one) for one in (None, compiled)]
    plain, other = [pair.run(_split, plan)[0] for plan in plans]
    assert other[1] and other[0] == pytest.approx(plain[0], rel=1e-3)


def _split_twice(ctx, plan, shape):
    """Losses of layers that both axes split, and whether unwrapping undoes it."""
    mesh = fx.Mesh(shard=shape[0], tensor=shape[1])
    with fx.detect({}, device="cpu", mesh=mesh, timeout_s=60) as placed:
        model = wrapped(placed, plan)
        losses = train(placed, model, batches(placed, plan, 5))
        return losses, kinds(fx.unwrap(model)) == kinds(net())


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [RECIPES["tensorwise"], RECIPES["rowwise"], GATHERED, RECIPES["mxfp8"]],
    ids=["tensorwise", "rowwise", "gathers float8", "mxfp8"],
)
def test_compiled_layers_split_by_fsdp_and_over_the_tensor_axis(clusters, recipe):
    """FSDP and tensor parallelism on one mesh, layers of torchao and torch's compiler together."""
    tensor = fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))
    compiled = fx.Compile(backend="aot_eager", blocks=("Block",))
    with fx.detect(env={}, device="cpu") as ctx:
        wanted = train(ctx, wrapped(ctx, (plan := plan_of(None))), batches(ctx, plan, 5))
    plans = [plan_of(recipe, tensor, compile=one) for one in (None, compiled)]
    plain, other = [clusters[4].run(_split_twice, plan, (2, 2))[0] for plan in plans]
    _near(plain[0], wanted)
    assert plain[1] and other[1] and other[0] == pytest.approx(plain[0], rel=1e-3)


def _failed(ctx):
    """An optimizer that cannot be made leaves the model as it was."""
    module = net()
    before = kinds(module), [id(one) for one in module.parameters()]

    def refuse(params):
        raise RuntimeError("no optimizer")

    with pytest.raises(RuntimeError, match="no optimizer"):
        fx.wrap(module, ctx, plan_of(RECIPES["rowwise"]), optimizer=refuse)
    return before == (kinds(module), [id(one) for one in module.parameters()])


def test_an_error_leaves_nothing_half_converted(pair):
    assert pair.run(_failed) == [True, True]


def _told(ctx, plan):
    module = net()
    before = kinds(module)
    try:
        fx.wrap(module, ctx, plan)
    except fx.PlanError as error:
        return str(error), kinds(module) == before
    return "no error", False


def test_gathering_in_float8_needs_fsdp(pair):
    one, other = pair.run(_told, plan_of(GATHERED, fx.DDP()))
    assert one == other
    assert "Float8(gather='fp8'): DDP gathers no weights" in one[0] and one[1]


def test_pipelines_refuse(pair):
    one, _ = pair.run(_told, plan_of(RECIPES["rowwise"], fx.PP()))
    assert "PP does not support precision='fp8'" in one[0] and one[1]
