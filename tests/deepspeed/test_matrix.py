"""Every operation under every stage of DeepSpeed, against one process."""

import pytest
import safetensors.torch
import torch

import fxtrain as fx
from fxtrain.testing import Terms
from tests._growth import grows_linearly
from tests.cluster._matrix import compare, compare_files, everything, write_halves
from tests.cluster._names import names
from tests.deepspeed._ranks import Ranks, on_rank

pytestmark = pytest.mark.deepspeed


@on_rank
def _everything(ctx, options, other, folder):
    return everything(ctx, options, None, other, folder, torch.float32)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The files of a model with other values."""
    return write_halves(tmp_path_factory.mktemp("other"), torch.float32)


@pytest.fixture(scope="module")
def truth(clusters, other, tmp_path_factory):
    """What one process gives."""
    options = {"strategy": fx.Single()}
    (found,) = clusters[1].run(_everything, options, other, str(tmp_path_factory.mktemp("one")))
    return found


CONFIGS = {
    "stage 0": fx.DeepSpeed(stage=0),
    "stage 1": fx.DeepSpeed(stage=1),
    "stage 2": fx.DeepSpeed(stage=2),
    "stage 3": fx.DeepSpeed(stage=3, persistence_threshold=0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stage_does_everything(pair, truth, other, tmp_path, name):
    found = pair.run(_everything, {"strategy": CONFIGS[name]}, other, str(tmp_path))
    compare(found, truth, rtol=1e-3, atol=1e-4)
    for one in found:
        assert one["generate of the module"] == truth["generate of the module"]
    compare_files(found, tmp_path)


@on_rank
def _in_bf16(ctx, stage, source, folder):
    """Fill a model that trains in bf16; what it gives at once, and after an update of nothing."""
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), precision="bf16")
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    fx.load_model(source, model)
    fx.export(model, folder)
    before = dict(fx.weights(model))
    with fx.gathered(model) as whole:
        lent = {name: value.clone() for name, value in whole.state_dict().items()}
    fx.ops.backward(model(torch.ones(2, 8)).float().sum(), model)
    fx.ops.apply(model)
    return before, lent, dict(fx.weights(model))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_are_filled_and_given_whole(pair, tmp_path, stage):
    torch.manual_seed(7)
    source = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).state_dict()
    for given in pair.run(_in_bf16, stage, source, str(tmp_path)):
        for values in (*given, safetensors.torch.load_file(tmp_path / "model.safetensors")):
            assert values.keys() == source.keys()
            for name, value in values.items():
                assert torch.equal(value, source[name]), name


@on_rank
def _names(ctx, stage, precision):
    strategy = fx.DeepSpeed(stage=stage, persistence_threshold=0)
    return names(ctx, {"strategy": strategy, "precision": precision}, None, torch.float32)


@pytest.mark.parametrize(
    ("stage", "precision", "state_dict", "generate"),
    [(1, "fp32", True, True), (1, "bf16", False, True), (3, "fp32", False, False)],
)
def test_a_stage_has_the_names_that_it_makes_right(pair, stage, precision, state_dict, generate):
    for found in pair.run(_names, stage, precision):
        assert found["parameters"] and found["modules"] and found["config"] and found["device"]
        assert (found["state_dict"] is True) == state_dict, found["state_dict"]
        assert (isinstance(found["generate"], bool)) == generate, found["generate"]
        assert state_dict or "dict(fx.weights(model))" in found["state_dict"]
        assert generate or "fx.gathered(model)" in found["generate"]
        assert found["deepcopy"].startswith("CopyError")


# DeepSpeed's engine looks for duplicates among all parameters once for each of them when it starts,
# and at stage 3 its coordinator goes through all of them at every module: these are its own.
WITHOUT = {3: ("wrap", "step")}
TERMS = Terms(dtype=torch.float32)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_costs_grow_linearly(pair, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage))
    grows_linearly(Ranks(pair), plan, terms=TERMS, without=WITHOUT.get(stage, ("wrap",)))
