"""The names of a module on a wrapped model, under every strategy."""

import attrs
import pytest
import torch

import fxtrain as fx
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import PIPELINES
from tests.cluster._names import names

BLOCKS = ("LlamaDecoderLayer",)
FOUND = {
    "training": (True, False, True),
    "device": True,
    "dtype": True,
    "config": True,
    "parameters": True,
    "modules": True,
    "lacks": [False, False, False],
    "advice": True,
}


@attrs.frozen(kw_only=True)
class Row:
    """One strategy: ranks, fields of the plan, a mesh, and which of its answers are refusals."""

    n: int = 2
    options: dict
    mesh: fx.Mesh | None = None
    state_dict: bool = True
    generate: bool = True


COMPILED = {"compile": fx.Compile(backend="eager", blocks=BLOCKS), "recompute": BLOCKS}
ROWS = {
    "Single": Row(n=1, options={"strategy": fx.Single(), **COMPILED}),
    "DDP": Row(options={"strategy": fx.DDP()}),
    "DDP, compiled": Row(options={"strategy": fx.DDP(), **COMPILED}),
    "DDP, bf16": Row(options={"strategy": fx.DDP(), "precision": "bf16"}),
    "DDP, sharded optimizer": Row(options={"strategy": fx.DDP(shard_optimizer=True)}),
    "DDP, replicas": Row(options={"local": fx.LocalSGD(every=2)}, state_dict=False),
    "FSDP": Row(options={"strategy": fx.FSDP()}, state_dict=False),
    "TP": Row(
        options={"strategy": fx.FSDP(mode="none", tensor=fx.TP())},
        mesh=fx.Mesh(tensor=2),
        state_dict=False,
    ),
    "CP": Row(
        options={"strategy": fx.DDP(), "context": fx.CP(causal=True)},
        mesh=fx.Mesh(context=2),
        generate=False,
    ),
    "PP": Row(options={"strategy": fx.PP()}, mesh=fx.Mesh(pipeline=2), state_dict=False),
}


# Whose answers are those of "DDP" by the same code.
REPEATED = ("DDP, compiled", "DDP, bf16", "DDP, sharded optimizer", "DDP, replicas")
MARKS = {"PP": PIPELINES} | dict.fromkeys(REPEATED, pytest.mark.slow)


@pytest.mark.parametrize(
    "name", slow_after(4, [pytest.param(name, marks=MARKS.get(name, ())) for name in ROWS])
)
def test_a_strategy_has_the_names_that_it_makes_right(clusters, name):
    row = ROWS[name]
    answers = clusters[row.n].run(names, row.options, row.mesh, torch.float64)
    assert all(one == answers[0] for one in answers)
    found = answers[0]
    assert {key: found[key] for key in FOUND} == FOUND
    for key, given in {"state_dict": row.state_dict, "generate": row.generate}.items():
        if given:
            assert found[key] is True, found[key]
        else:
            assert "StepError" in found[key] if key == "state_dict" else "Attribute" in found[key]
            assert "fx.weights(model)" in found[key] or "fx.gathered(model)" in found[key]
    assert found["deepcopy"] == found["AveragedModel"]
    assert found["deepcopy"].startswith("CopyError: copy.deepcopy(model): a wrapped model has")
    assert found["pickle"].startswith("CopyError: copying or pickling a model")


def test_a_missing_name_says_what_to_use():
    net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(net, ctx)
        for name, text in {
            "config": "Use model.module.config, if the module has it.",
            "append": "Use model.module.append, if the module has it.",
            "zero_grad": "fx.step and fx.ops.apply(model) zero gradients.",
        }.items():
            with pytest.raises(AttributeError) as caught:
                getattr(model, name)
            assert str(caught.value) == f"A wrapped model has no attribute {name!r}. {text}"


def test_a_compiled_handle_can_be_called_and_not_trained():
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        compiled = torch.compile(model, backend="eager")
        rows = torch.ones(3, 2)
        assert torch.equal(compiled(rows), model(rows))
        with raises_code("FX500", "fx.Plan(compile=True)"):
            fx.StepFns(compiled, lambda model, batch: model(batch).sum())


def test_a_handle_of_a_module_that_was_given_back_refuses_calls():
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        fx.unwrap(model)
        for call in (model.named_parameters, model.named_modules, model.state_dict):
            with raises_code("FX500", "handle"):
                call()
