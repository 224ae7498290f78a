"""Records to plain data, text and back: what is refused, and in which words."""

import json
import math
from typing import Literal

import attrs
import pytest

import fxtrain as fx
from fxtrain.state import structure, unstructure
from fxtrain.state.converters import converter_for
from tests._errors import raises_code


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
    return caught.value.message.splitlines()


def test_every_problem_of_every_field_is_told_with_its_path():
    data = {
        "accumulat": 2,
        "clip_norm": 0,
        "data": {"source": "dispach", "to_device": 1},
        "precision": {"compute": "x", "scale": {"backoff": 1.5}},
        "strategy": {"kind": "ddp", "hook": {"power_sgd": {"rank": "1"}}},
    }
    lines = _problems(data)
    start = "plan: unknown key 'accumulat' (did you mean 'accumulate'?); Plan has "
    last = attrs.fields(fx.Plan)[-1].name
    assert lines[-1].startswith(start) and lines[-1].endswith(f", {last}.")
    assert lines[:-1] == [
        "plan.strategy.hook.power_sgd.rank: found '1'; choose a whole number.",
        "plan.precision.compute: found 'x'; choose one of 'fp32', 'bf16', 'fp16', 'fp8'.",
        "plan.precision.scale.backoff: found 1.5; choose a number above 0 and below 1.",
        "plan.clip_norm: found 0; choose a number above 0.",
        "plan.data.source: found 'dispach'; choose one of 'shard', 'dispatch', 'sharded'. "
        "Did you mean 'dispatch'?",
        "plan.data.to_device: found 1; choose true or false.",
    ]


WRONG = {
    "no table": ([1], "found [1]; choose a table of strategy, precision, accumulate"),
    "no kind": (
        {"strategy": {}},
        "plan.strategy: `kind` is missing in this table; choose one of 'ddp', ",
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
        "found 'abc'; choose a list or tuple, each a string.",
    ),
    "half a letter": (
        {"recompute": ["\ud800"]},
        "choose the class names of modules, such as ['Block'].",
    ),
    "number as table": ({"data": 4}, "plan.data: found 4; choose an fx.Data(...)."),
    "number as text": ({"accumulate": "4"}, "choose a whole number."),
    "YAML's 1e-3": ({"clip_norm": "1e-3"}, "or None."),
    "yes": ({"flush": "yes"}, "choose true or false."),
    "with a unit": (
        {"strategy": {"kind": "ddp", "bucket_mib": "25 MB"}},
        "choose a finite number.",
    ),
    "capitals": ({"strategy": "FSDP"}, "Did you mean 'fsdp'?"),
    "a capital key": ({"Precision": "bf16"}, "unknown key 'Precision' (did you mean 'precision'?)"),
    "a stage too many": (
        {"strategy": {"kind": "deepspeed", "stage": 4}},
        "plan.strategy.stage: found 4; choose a number from 0 to 3.",
    ),
    "several tables": ({"local": 8}, "choose an fx.LocalSGD(...) or an fx.DiLoCo(...) or None."),
    "a short form exists": ({"precision": "bf16-mixed"}, 'Use precision="bf16".'),
    "compile as text": ({"compile": "true"}, "choose true, an fx.Compile(...) or None."),
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
    many = {f"key{n}" * 50: "x" * 10**6 for n in range(100)}
    for data in (cycle, deep, {"data": cycle}, {"strategy": deep}, "x" * 10**6):
        (line,) = _problems(data)
        assert len(line) < 500
    lines = _problems(many)
    assert len(lines) == 21 and lines[-1] == "and 80 more problems."
    assert max(map(len, lines)) < 500


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fx.Plan(accumulate=0), "Plan(accumulate=0): choose a number of at least 1."),
        (lambda: fx.Plan(seed=10**6000), "Plan(seed=<a number of 19932 bits, more than 64>): "),
        (
            lambda: fx.Plan(precision="bf6"),
            "'bf16', 'fp16', 'fp8', or an fx.Prec",
        ),
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

    with raises_code("FX200", "Mutable"):
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
        "plan.strategy.names: found ['a', 4]; choose a list or tuple, each a string.",
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
        "many.betas: found [0.5]; choose a list or tuple, a finite number, a finite number.",
        "many.stage: found True; choose one of 1, 2, 3.",
        "many.either: found 0.5; choose a whole number or a string.",
        "many.groups[1].size: found '2'; choose a whole number.",
        "many.groups[2]: found 3; choose a table of size.",
        "many.weights: found ['x']; choose a list or tuple, each a finite number or None.",
    ]


def test_configs_that_cannot_be_told_apart_are_refused():
    @attrs.frozen
    class Nameless:
        rate: float = 1.0

    @attrs.frozen
    class Twin:
        kind: str = "ddp"

    for config in (Nameless, Twin, int):
        with raises_code("FX200", config.__name__):
            converter_for((config,))


def test_a_field_of_a_type_that_files_do_not_know_is_a_plan_error():
    @attrs.frozen
    class Odd:
        device: bytes = b""
        kind: str = "odd"

    with raises_code("FX200", "JSON"):
        fx.state.dumps(fx.Plan(strategy=Odd()))
    with raises_code("FX200", "JSON"):
        fx.fingerprint(fx.Plan(strategy=Odd()))
    assert unstructure(Odd(b"x")) == {"device": b"x", "kind": "odd"}
    (line,) = _problems({"strategy": {"kind": "odd", "device": object()}}, configs=(Odd,))
    assert "choose a bytes." in line and line.startswith("plan.strategy.device: ")


@pytest.mark.parametrize("value", [3, None, fx.Plan, {"seed": 1}])
def test_only_records_become_data(value):
    with raises_code("FX200", "fx.Plan"):
        unstructure(value)


def test_the_data_of_a_record_is_plain():
    data = unstructure(fx.Plan(compile=fx.Compile(blocks=("Block",))))
    assert json.loads(json.dumps(data)) == data
    assert data["compile"]["blocks"] == ["Block"] and data["strategy"]["kind"] == "ddp"
