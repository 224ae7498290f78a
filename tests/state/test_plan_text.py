"""Plans as text and data: formats of files, differences, kinds of strategies, short forms."""

import json

import pytest

import fxtrain as fx
from fxtrain.state.topology import Topology
from tests._errors import raises_code

TEXTS = [
    ("json", '{"seed": 1, "seed": 2}', "the key 'seed' appears twice in one table."),
    ("json", '{"seed": NaN}', "NaN is not a JSON number"),
    ("json", "[" * 100_000, "Invalid JSON: it is nested too deeply"),
    ("json", '{"seed": ' + "9" * 5000 + "}", "Invalid JSON: Exceeds the limit"),
    ("toml", "seed = 1\nseed = 2", "Invalid TOML: "),
    (
        "toml",
        "seed = 2001-01-01",
        "plan.seed: found datetime.date(2001, 1, 1); choose a whole number.",
    ),
    (
        "yaml",
        "seed: 2001-01-01",
        "plan.seed: found datetime.date(2001, 1, 1); choose a whole number.",
    ),
    ("yaml", "seed: !!int x", "Invalid YAML: "),
    ("yaml", "seed: !!float ''", "Invalid YAML: "),
    ("yaml", "seed: !!timestamp x", "Invalid YAML: a value does not fit its tag"),
    ("yaml", "flush: !!bool x", "Invalid YAML: a value does not fit its tag: 'x'"),
    (
        "yaml",
        "seed: !!python/object:os.system x",
        "Invalid YAML: could not determine a constructor",
    ),
    ("yaml", "compile: &a {blocks: *a}", "Invalid YAML: line 1: aliases (*a) are not supported."),
    ("yaml", "[" * 3000 + "]" * 3000, "Invalid YAML: it is nested too deeply"),
    ("ini", "", "format='ini': choose one of json, toml, yaml."),
]


@pytest.mark.parametrize(("form", "text", "words"), TEXTS, ids=range(len(TEXTS)))
def test_text_that_is_no_plan_is_a_plan_error(form, text, words):
    with pytest.raises(fx.PlanError) as caught:
        fx.state.loads(text, fx.Plan, form)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_yaml_merges_tables_and_later_keys_win():
    text = "compile: {<<: {backend: eager, fullgraph: true}, fullgraph: false}"
    assert fx.state.loads(text, fx.Plan, "yaml").compile == fx.Compile(backend="eager")


def test_a_plan_file_is_named_in_its_errors(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("accumulat: 2\nseed: x\n")
    with pytest.raises(fx.PlanError) as caught:
        fx.read_plan(path)
    first, second, third = str(caught.value).splitlines()
    assert first == f"{path}:" and "did you mean 'accumulate'?" in third
    assert second == "plan.seed: found 'x'; choose a whole number."
    with raises_code("FX201"):
        fx.write_plan(fx.Plan(), tmp_path / "none" / "run.toml")
    with raises_code("FX201"):
        fx.write_plan(fx.Plan(), tmp_path / "run.ini")


def test_differences_are_told_by_path():
    left = fx.Plan(strategy=fx.DDP(bucket_mib=50), seed=1)
    right = fx.Plan(strategy=fx.Single(), compile=fx.Compile())
    changes = {change.path: (change.left, change.right) for change in fx.diff(left, right)}
    assert changes["strategy.kind"] == ("ddp", "single")
    assert changes["strategy.bucket_mib"] == (50.0, None)
    assert changes["seed"] == (1, 0)
    assert changes["compile"] == (None, fx.Compile())
    assert next(iter(changes)) == "strategy.kind" and list(changes)[-1] == "compile"


def test_different_things_have_no_differences():
    for left, right in ((fx.Plan(), fx.Position()), (fx.Plan(), None), ({}, {})):
        with raises_code("FX200", "diff"):
            fx.diff(left, right)
    assert fx.diff(Topology(), Topology(rank=1))[0].path == "rank"


KINDS = {
    "single": fx.Single,
    "ddp": fx.DDP,
    "fsdp": fx.FSDP,
    "pp": fx.PP,
    "deepspeed": fx.DeepSpeed,
}


@pytest.mark.parametrize("kind", [*KINDS, "xla"])
def test_a_strategy_by_its_kind(kind):
    config = KINDS.get(kind, fx.XLA)
    assert fx.Plan(strategy=kind) == fx.Plan(strategy=config())
    assert fx.state.loads(json.dumps({"strategy": kind})) == fx.Plan(strategy=config())


@pytest.mark.parametrize("wrong", ["fdsp", "fspd", ""])
def test_an_unknown_kind_of_strategy_names_the_nearest(wrong):
    near = "Did you mean 'fsdp'?" if wrong else "'ddp'"
    for make in (
        lambda: fx.Plan(strategy=wrong),
        lambda: fx.state.loads(json.dumps({"strategy": wrong})),
    ):
        with pytest.raises(fx.PlanError) as raised:
            make()
        assert near in str(raised.value)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"compile": True}, {"compile": fx.Compile()}),
        ({"compile": False}, {"compile": None}),
        ({"recompute": "Block"}, {"recompute": ("Block",)}),
        ({"recompute": ["Block", "Head"]}, {"recompute": ("Block", "Head")}),
    ],
)
def test_short_forms(short, long):
    assert fx.Plan(**short) == fx.Plan(**long) == fx.state.loads(json.dumps(short))


@pytest.mark.parametrize("wrong", [{"compile": 1}, {"compile": "yes"}, {"recompute": 3}])
def test_other_values_are_no_short_forms(wrong):
    for make in (lambda: fx.Plan(**wrong), lambda: fx.state.loads(json.dumps(wrong))):
        with raises_code("FX200", next(iter(wrong))):
            make()
