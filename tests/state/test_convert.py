"""Records to plain data, text and back: what is refused, and in which words."""

import json
import math
from typing import Literal

import attrs
import pytest

import fxtrain as fx
from fxtrain import state
from fxtrain.state import converter_for, structure, unstructure


@attrs.frozen
class Mine:
    """A third party's config, which checks nothing itself."""

    rate: float
    mode: Literal["fast", "slow"] = "fast"
    names: tuple[str, ...] = ()
    kind: str = "mine"
    _hidden: int = 1
    derived: int = attrs.field(init=False, default=4)

    def __attrs_post_init__(self):
        if self.rate > 1:
            raise ValueError(f"rate={self.rate} is above 1.")


def _problems(data, kind=fx.Plan, configs=()):
    with pytest.raises(fx.PlanError) as caught:
        structure(data, kind, configs)
    return str(caught.value).splitlines()


def test_every_problem_of_every_field_is_told_with_its_path():
    data = {
        "accumulat": 2,
        "clip_norm": 0,
        "data": {"source": "dispach", "to_device": 1},
        "precision": {"compute": "fp8", "scale": {"backoff": 1.5}},
        "strategy": {"kind": "ddp", "hook": {"power_sgd": {"rank": "1"}}},
    }
    lines = _problems(data)
    start = "plan: unknown key 'accumulat' (did you mean 'accumulate'?); Plan has "
    last = attrs.fields(fx.Plan)[-1].name
    assert lines[-1].startswith(start) and lines[-1].endswith(f", {last}.")
    assert lines[:-1] == [
        "plan.clip_norm: found 0; choose a number above 0.",
        "plan.data.source: found 'dispach'; choose one of 'shard', 'dispatch', 'sharded'. "
        "Did you mean 'dispatch'?",
        "plan.data.to_device: found 1; choose true or false.",
        "plan.precision.compute: found 'fp8'; choose one of 'fp32', 'bf16', 'fp16'.",
        "plan.precision.scale.backoff: found 1.5; choose a number above 0 and below 1.",
        "plan.strategy.hook.power_sgd.rank: found '1'; choose a whole number.",
    ]


WRONG = {
    "no table": ([1], "found [1]; choose a table of strategy, precision, accumulate"),
    "no kind": (
        {"strategy": {}},
        "found None; choose one of 'ddp', ",
    ),
    "other kind": ({"strategy": {"kind": "ddpp"}}, "Did you mean 'ddp'?"),
    "bare kind": ({"strategy": "dpp"}, "found 'dpp'; choose one of 'ddp', 'deepspeed', 'fsdp'"),
    "bool as int": ({"seed": True}, "plan.seed: found True; choose a whole number."),
    "float as int": ({"seed": 1.0}, "plan.seed: found 1.0; choose a whole number."),
    "int as bool": ({"flush": 0}, "plan.flush: found 0; choose true or false."),
    "bool as float": ({"clip_norm": True}, "found True; choose a finite number or None."),
    "nan": ({"clip_norm": math.nan}, "found nan; choose a finite number or None."),
    "text as list": (
        {"strategy": {"kind": "fsdp", "ignore": "abc"}},
        "found 'abc'; choose a tuple",
    ),
    "half a letter": ({"recompute": ["\ud800"]}, "choose a tuple or list, each a string."),
    "number as table": ({"data": 4}, "found 4; choose an fx.Data(...). In a file, use a table."),
    "many bits": ({"seed": 10**6000}, "found <a number of 19932 bits, more than 64>; choose a"),
    "no exact float": ({"clip_norm": 2**53 + 1}, "found 9007199254740993; choose a finite number"),
    "key of another type": ({1: 2}, "unknown key 1; Plan has strategy"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_value_is_told_in_one_line(name):
    data, words = WRONG[name]
    (line,) = _problems(data)
    assert words in line


def test_a_message_is_short_whatever_the_data():
    cycle = []
    cycle.append(cycle)
    deep = []
    for _ in range(5000):
        deep = [deep]
    many = {f"key{n}" * 50: "x" * 10**6 for n in range(1000)}
    for data in (cycle, deep, {"data": cycle}, {"strategy": deep}, "x" * 10**6):
        (line,) = _problems(data)
        assert len(line) < 500
    lines = _problems(many)
    assert len(lines) == 21 and lines[-1] == "and 980 more problems."
    assert max(map(len, lines)) < 500


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fx.Plan(accumulate=0), "Plan(accumulate=0): choose a number of at least 1."),
        (lambda: fx.Plan(seed=10**6000), "Plan(seed=<a number of 19932 bits, more than 64>): "),
        (lambda: fx.Plan(precision="bf6"), "choose one of 'fp32', 'bf16', 'fp16', or an fx.Prec"),
        (lambda: fx.Plan(data={}), "Plan(data={}): choose an fx.Data(...)."),
        (lambda: fx.Plan(strategy=fx.DDP), "choose a strategy config, such as fx.DDP()"),
        (lambda: fx.CommHook(name="fp61"), "Did you mean 'fp16'?"),
        (lambda: fx.LossScale(backoff=0), "choose a number above 0 and below 1."),
        (lambda: fx.LossScale(initial=math.inf), "choose a finite number."),
    ],
)
def test_values_made_in_python_are_checked_in_the_same_words(make, words):
    with pytest.raises(fx.PlanError) as caught:
        make()
    assert words in str(caught.value)


def test_a_strategy_has_to_be_hashable():
    @attrs.define(eq=True)
    class Mutable:
        kind: str = "mutable"

    with pytest.raises(fx.PlanError, match="Mutable has to be frozen"):
        fx.Plan(strategy=Mutable())


def test_equal_numbers_are_one_value():
    zero, minus = (fx.PowerSGD(orthogonalization_epsilon=x) for x in (0, -0.0))
    assert zero == minus and fx.fingerprint(zero) == fx.fingerprint(minus)
    assert math.copysign(1, minus.orthogonalization_epsilon) == 1
    assert type(zero.orthogonalization_epsilon) is float


def test_a_third_party_s_config_is_checked_and_round_trips():
    plan = fx.Plan(strategy=Mine(0.5, names=("a",), hidden=3))
    data = unstructure(plan)
    assert data["strategy"] == {
        "rate": 0.5,
        "mode": "fast",
        "names": ["a"],
        "kind": "mine",
        "hidden": 3,
    }
    again = structure(data, fx.Plan, (Mine,))
    assert again == plan and fx.fingerprint(again) == fx.fingerprint(plan)
    wrong = {"strategy": {"kind": "mine", "rate": "a", "mode": "fst", "names": ["a", 4], "x": 1}}
    assert _problems(wrong, configs=(Mine,))[:3] == [
        "plan.strategy.rate: found 'a'; choose a finite number.",
        "plan.strategy.mode: found 'fst'; choose one of 'fast', 'slow'. Did you mean 'fast'?",
        "plan.strategy.names: found ['a', 4]; choose a tuple or list, each a string.",
    ]
    assert _problems({"strategy": {"kind": "mine"}}, configs=(Mine,)) == [
        "plan.strategy.rate: is missing."
    ]
    assert _problems({"strategy": {"kind": "mine", "rate": 2}}, configs=(Mine,)) == [
        "plan.strategy: rate=2.0 is above 1."
    ]


@attrs.frozen
class Group:
    size: int = 1


@attrs.frozen
class Many:
    """Fields of every kind that files can hold."""

    kind: str = "many"
    betas: tuple[float, float] = (0.9, 0.999)
    stage: Literal[1, 2, 3] = 1
    either: int | str = 0
    groups: tuple[Group, ...] = ()
    weights: tuple[float, ...] | None = None


def test_fields_of_every_kind_that_files_hold():
    table = {
        "betas": [0, 1],
        "stage": 2,
        "either": "auto",
        "groups": [{"size": 2}, {}],
        "weights": [1],
    }
    many = structure({"strategy": {"kind": "many", **table}}, fx.Plan, (Many,)).strategy
    assert many == Many(
        betas=(0.0, 1.0), stage=2, either="auto", groups=(Group(2), Group()), weights=(1.0,)
    )
    assert [type(one) for one in (*many.betas, *many.weights)] == [float] * 3
    assert structure(unstructure(many), Many) == many
    wrong = {"betas": [0.5], "stage": True, "either": 0.5, "weights": ["x"]}
    assert _problems({**wrong, "groups": [{}, {"size": "2"}, 3]}, Many) == [
        "many.betas: found [0.5]; choose a tuple or list, a finite number, a finite number.",
        "many.stage: found True; choose one of 1, 2, 3.",
        "many.either: found 0.5; choose a whole number or a string.",
        "many.weights: found ['x']; choose a tuple or list, each a finite number or None.",
        "many.groups[1].size: found '2'; choose a whole number.",
        "many.groups[2]: found 3; choose a table of size.",
    ]


def test_the_converter_itself_is_strict():
    converter = converter_for()
    assert converter.structure(3, float) == 3.0
    for value, kind in (("3", int), (1, bool), (1.5, int), ("slw", Literal["slow"])):
        with pytest.raises(ValueError, match=f"found {value!r}; choose"):
            converter.structure(value, kind)


def test_configs_that_cannot_be_told_apart_are_refused():
    @attrs.frozen
    class Nameless:
        rate: float = 1.0

    @attrs.frozen
    class Twin:
        kind: str = "ddp"

    for config in (Nameless, Twin, int):
        with pytest.raises(
            fx.PlanError, match=f"{config.__name__} cannot be distinguished from other"
        ):
            converter_for((config,))


def test_a_field_of_a_type_that_files_do_not_know_is_a_plan_error():
    @attrs.frozen
    class Odd:
        device: bytes = b""
        kind: str = "odd"

    with pytest.raises(fx.PlanError, match=r"Plan contains b'', which cannot be written"):
        fx.dumps(fx.Plan(strategy=Odd()))
    with pytest.raises(fx.PlanError, match=r"Plan contains b'', which cannot be written"):
        fx.fingerprint(fx.Plan(strategy=Odd()))
    assert unstructure(Odd(b"x")) == {"device": b"x", "kind": "odd"}
    (line,) = _problems({"strategy": {"kind": "odd", "device": object()}}, configs=(Odd,))
    assert "choose a bytes." in line and line.startswith("plan.strategy.device: ")


@pytest.mark.parametrize("value", [3, None, fx.Plan, {"seed": 1}])
def test_only_records_become_data(value):
    with pytest.raises(fx.PlanError, match=r"such as an fx\.Plan; found"):
        unstructure(value)
    with pytest.raises(fx.PlanError, match="structure creates records"):
        structure({}, int)


def test_a_record_that_holds_itself_is_no_data():
    @attrs.define
    class Loop:
        inner: object = None

    loop = Loop()
    loop.inner = [{"loop": loop}]
    with pytest.raises(fx.PlanError, match="Loop is nested too deeply, or contains itself"):
        unstructure(loop)


def test_the_data_of_a_record_is_plain():
    data = unstructure(fx.Plan(compile=fx.Compile(blocks=("Block",))))
    assert json.loads(json.dumps(data)) == data
    assert data["compile"]["blocks"] == ["Block"] and data["strategy"]["kind"] == "ddp"


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
    ("yaml", "seed: 1\nseed: 2", "the key 'seed' appears twice in one table."),
    ("yaml", "flush: yes", "plan.flush: found 'yes'; choose true or false."),
    ("yaml", "seed: 010", "plan.seed: found '010'; choose a whole number."),
    ("yaml", "seed: !!int x", "Invalid YAML: "),
    ("yaml", "seed: !!float ''", "line 1, column 7: '' is not a valid !!float."),
    ("yaml", "seed: !!timestamp x", "the tag '!!timestamp' of a scalar is not supported"),
    ("yaml", "flush: !!bool x", "line 1, column 8: 'x' is not a valid !!bool."),
    ("yaml", "seed: !!python/object:os.system x", "the tag '!!python/object:os.system' of"),
    ("yaml", "compile: &a {blocks: *a}", "line 1, column 10: a value contains itself"),
    ("yaml", "[" * 3000, "Invalid YAML: it is nested too deeply"),
    ("ini", "", "format='ini': choose one of json, toml, yaml."),
]


@pytest.mark.parametrize(("form", "text", "words"), TEXTS, ids=range(len(TEXTS)))
def test_text_that_is_no_plan_is_a_plan_error(form, text, words):
    with pytest.raises(fx.PlanError) as caught:
        fx.loads(text, fx.Plan, form)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_yaml_merges_tables_and_later_keys_win():
    text = "compile: {<<: {backend: eager, fullgraph: true}, fullgraph: false}"
    assert fx.loads(text, fx.Plan, "yaml").compile == fx.Compile(backend="eager")


def test_a_plan_file_is_named_in_its_errors(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("accumulat: 2\nseed: x\n")
    with pytest.raises(fx.PlanError) as caught:
        fx.read_plan(path)
    first, second, third = str(caught.value).splitlines()
    assert first == f"{path}:" and "did you mean 'accumulate'?" in third
    assert second == "plan.seed: found 'x'; choose a whole number."
    with pytest.raises(fx.PlanError, match="No such file"):
        fx.write_plan(fx.Plan(), tmp_path / "none" / "run.toml")
    with pytest.raises(fx.PlanError, match=r"ends in \.json, \.toml"):
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
        with pytest.raises(fx.PlanError, match="diff compares two records of one kind"):
            fx.diff(left, right)
    assert fx.diff(state.Topology(), state.Topology(rank=1))[0].path == "rank"


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
    assert fx.loads(json.dumps({"strategy": kind})) == fx.Plan(strategy=config())


@pytest.mark.parametrize("wrong", ["fdsp", "fspd", ""])
def test_an_unknown_kind_of_strategy_names_the_nearest(wrong):
    near = "Did you mean 'fsdp'?" if wrong else "'ddp'"
    for make in (
        lambda: fx.Plan(strategy=wrong),
        lambda: fx.loads(json.dumps({"strategy": wrong})),
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
    assert fx.Plan(**short) == fx.Plan(**long) == fx.loads(json.dumps(short))


@pytest.mark.parametrize("wrong", [{"compile": 1}, {"compile": "yes"}, {"recompute": 3}])
def test_other_values_are_no_short_forms(wrong):
    for make in (lambda: fx.Plan(**wrong), lambda: fx.loads(json.dumps(wrong))):
        with pytest.raises(fx.PlanError, match=next(iter(wrong))):
            make()
