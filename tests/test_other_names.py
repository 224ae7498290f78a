"""Names of other libraries: each is answered with what exists here, wherever it is typed."""

import ast
import inspect
import re
from types import SimpleNamespace

import attrs
import click
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain._other_names import OTHER_ARGUMENTS, OTHER_CALLS, OTHER_NAMES, OTHER_VALUES, hint
from fxtrain.cli import main
from fxtrain.cli.launch_command import LAUNCH
from fxtrain.launch import FLAGS, LaunchSpec
from fxtrain.launch.config import put
from fxtrain.launch.config.launch_file import parse
from fxtrain.state import structure, unstructure

RECORDS = (
    fx.Plan, fx.DDP, fx.FSDP, fx.DeepSpeed, fx.PP, fx.Data, fx.Compile, fx.Precision, fx.LossScale,
    fx.LocalSGD, fx.CP, fx.TP, fx.CommHook, fx.EarlyStopping, LaunchSpec,
)  # fmt: skip
USES = sorted({(other.use, other.path) for other in OTHER_NAMES.values()})
VALUES = [(field, value) for field, known in OTHER_VALUES.items() for value in known]


def _at(data, path):
    for name in path.split("."):
        data = data[name]
    return data


def _function(node):
    """What a dotted name of an expression is."""
    if isinstance(node, ast.Name):
        return {"fx": fx, "torch": torch, "loader": fx.Sharded, "run": fx.Run}[node.id]
    if isinstance(node, ast.Call):  # fx.log(ctx): every level takes the keywords of `log`
        return SimpleNamespace(info=inspect.signature(_function(node.func)).return_annotation.log)
    return getattr(_function(node.value), node.attr)


def _check_launch(use, path):
    words = use.split()
    assert words[:2] == ["fxtrain", "launch"]
    given = LAUNCH.make_context("launch", words[2:]).params
    assert given["program"][:1] == (words[-1],)
    if path:
        field = path.removeprefix("launch.")
        default = attrs.fields_dict(LaunchSpec)[field].default
        assert given[field] not in (None, (), "", False, default)
        assert words[2] in [flag.flag for flag in FLAGS if flag.field == field]


@pytest.mark.parametrize(("use", "path"), USES, ids=[use for use, _ in USES])
def test_what_a_hint_names_exists(use, path):
    if use.startswith("fxtrain "):
        return _check_launch(use, path)
    if use.startswith("fx.Plan("):
        plan = eval(use, {"fx": fx})
        value = _at(unstructure(plan), path.removeprefix("plan."))
        changed = [change.path for change in fx.diff(plan, fx.Plan())]
        inner = path.removeprefix("plan.")
        assert any(inner.startswith(one) or one.startswith(inner) for one in changed)
        kind = {"strategy": {"kind": plan.strategy.kind}} if inner.startswith("strategy.") else {}
        base = unstructure(plan) if "." in inner and not kind else kind
        assert _at(unstructure(structure(put(dict(base), inner, value), fx.Plan)), inner) == value
        return None
    call = ast.parse(use, mode="eval").body
    parameters = inspect.signature(_function(call.func)).parameters
    assert {word.arg for word in call.keywords} <= parameters.keys()
    assert len(call.args) <= len(parameters)
    assert path == ""


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_a_name_is_answered_wherever_it_is_typed(name, capsys):
    use, path = OTHER_NAMES[name]
    known = attrs.fields_dict(fx.Plan)
    if name in known:
        pytest.fail(f"{name} is a field of a plan, so that nobody reads the hint")
    with pytest.raises(fx.PlanError) as caught:
        fx.Plan(**{name: 1})
    assert isinstance(caught.value, TypeError)
    assert caught.value.message == f"Plan({name}=...): no such argument. Use {use}."
    with pytest.raises(fx.PlanError) as caught:
        parse(f"[plan]\n{name} = 1\n", "toml")
    assert caught.value.message == f"plan: unknown key {name!r}.{hint(name, at='file')}"
    assert (path or use) in str(caught.value)
    flags = {word for parameter in LAUNCH.params for word in parameter.opts}
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        if flag in flags or any(known.startswith(f"{flag}-") for known in flags):
            continue  # torchrun's own word
        assert main(["launch", flag, "1", "train.py"]) == 2
        assert f"No such option '{flag}'. Use {use}" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("field", "value"), VALUES)
def test_a_value_is_answered(field, value):
    said = OTHER_VALUES[field][value]
    assert eval(f"fx.Plan({field}={said})", {"fx": fx})
    with pytest.raises(fx.PlanError, match="Use ") as caught:
        fx.Plan(**{field: value})
    assert caught.value.message.endswith(f"Use {field}={said}.")
    with pytest.raises(fx.PlanError) as caught:
        structure({field: value}, fx.Plan)
    assert f"Use {field}={said}." in str(caught.value)


def test_a_record_prefers_its_own_field():
    with pytest.raises(fx.PlanError, match=r"Use DDP\(unused_parameters=\.\.\.\)\."):
        fx.DDP(find_unused_parameters=True)
    with pytest.raises(fx.LaunchError, match=r"Use LaunchSpec\(ranks=\.\.\.\)\."):
        LaunchSpec(target="train.py", nproc_per_node=2)
    with pytest.raises(fx.PlanError, match=r"Use fx\.Plan\(clip_norm=1\.0\)\."):
        fx.FSDP(max_grad_norm=1.0)


@given(data=st.data())
def test_a_misspelt_argument_suggests_the_nearest(data):
    record = data.draw(st.sampled_from(RECORDS))
    names = [field.alias for field in attrs.fields(record) if field.init]
    name = data.draw(st.sampled_from([name for name in names if len(name) > 4]))
    cut = data.draw(st.integers(1, len(name) - 1))
    word = name[:cut] + name[cut + 1 :]
    assume(word not in names and not hint(word))
    with pytest.raises(TypeError, match="Did you mean") as caught:
        record(**{word: 1})
    assert isinstance(caught.value, fx.FxError)
    assert str(caught.value).startswith(f"{record.__name__}({word}=...): no such argument.")


def _calls():
    net = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader([1, 2])
    with fx.detect(env={}, device="cpu") as ctx:
        yield fx.PlanError, lambda: fx.wrap(net, ctx, lr_scheduler=None), "scheduler=..."
        yield fx.PlanError, lambda: fx.wrap(net, ctx, None, None), "wrap(optimizer=...)"
        yield fx.PlanError, lambda: fx.wrap(net, ctx, optimiser=None), "'optimizer'"
        yield fx.DataError, lambda: fx.shard(loader, ctx, num_workers=2), "DataLoader("
        yield fx.ContextError, lambda: fx.detect(devise="cpu"), "'device'"
        yield fx.ContextError, lambda: fx.detect(mixed_precision="no"), "fx.Plan(precision="
        yield fx.LaunchError, lambda: fx.launch(divmod, (7, 2), num_processes=1), "(ranks=...)"
        yield fx.StepError, lambda: fx.StepFns(modle=1, loss=2), "'model'"
        yield fx.PlanError, lambda: fx.Plan("fsdp"), "Plan(strategy=...)"
        yield fx.PlanError, lambda: fx.DDP(purple=1), "It has bucket_mib"


def test_functions_answer_too():
    for error, call, text in _calls():
        with pytest.raises(error) as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert text in str(caught.value)


def test_a_launch_file_that_is_another_librarys(tmp_path):
    with pytest.raises(fx.PlanError) as caught:
        parse("num_processes = 2\nmixed_precision = 'bf16'\nprofile = 1\n", "toml")
    assert caught.value.message.splitlines() == [
        "the file: unknown key 'num_processes'. Use launch.ranks.",
        "the file: unknown key 'mixed_precision'. Use plan.precision.",
        "the file: unknown key 'profile' (did you mean 'profiles'?); known are default, launch, "
        "plan, profiles",
    ]


def test_an_option_of_a_launcher(capsys):
    assert main(["launch", "-o", "num_machines=2", __file__]) == 2
    assert "Use fxtrain launch --nodes 2 train.py." in capsys.readouterr().err


def test_options_and_commands_suggest_the_nearest(capsys):
    groups = [([], "launch", "lanch"), (["config"], "convert", "convrt")]
    for words, name, typed in groups:
        assert main([*words, typed]) == 2
        told = capsys.readouterr().err
        assert name in told or not hasattr(click, "NoSuchCommand")
    assert main(["launch", "--rank", "2", "train.py"]) == 2
    assert "'--ranks'" in capsys.readouterr().err


CALLS = sorted(set(OTHER_CALLS.values()))


@pytest.mark.parametrize("use", CALLS)
def test_a_function_that_a_hint_names_exists(use):
    for part in use.split(" and "):
        node = ast.parse(part, mode="eval").body
        if not isinstance(node, ast.Call):
            record = {"ctx": fx.DistContext, "report": fx.Report}[node.value.id]
            assert hasattr(record, node.attr) or node.attr in attrs.fields_dict(record)
            continue
        inspect.signature(_function(node.func)).bind_partial(
            *node.args, **{word.arg: 0 for word in node.keywords}
        )


@pytest.mark.parametrize("name", sorted(OTHER_CALLS))
def test_a_function_of_another_library_is_answered(name):
    assert name not in fx.__all__
    with pytest.raises(AttributeError) as caught:
        getattr(fx, name)
    assert str(caught.value).endswith(f"no attribute {name!r}. Use {OTHER_CALLS[name]}.")
    if name != "rank":
        with fx.detect(env={}, device="cpu") as ctx, pytest.raises(AttributeError) as caught:
            getattr(ctx, name)
        assert str(caught.value).endswith(f"no attribute {name!r}. Use {OTHER_CALLS[name]}.")


def test_names_of_ops_and_misspelt_names_are_answered():
    for name, text in {"gather": " Use fx.ops.gather.", "rap": " Did you mean 'wrap'?"}.items():
        with pytest.raises(AttributeError) as caught:
            getattr(fx, name)
        assert str(caught.value) == f"module 'fxtrain' has no attribute {name!r}.{text}"
    assert not hasattr(fx, "purple") and not hasattr(fx, "__wrapped__")


def test_aliases_are_the_functions_and_a_star_import_keeps_print():
    assert fx.ops.gather_for_metrics is fx.ops.gather_valid
    assert fx.ops.print is fx.ops.say
    for module in (fx, fx.ops):
        assert "print" not in module.__all__


def _callable(name):
    return getattr(fx.ops, name, None) or getattr(fx, name)


@pytest.mark.parametrize(("call", "name"), sorted(OTHER_ARGUMENTS))
def test_an_argument_of_another_library_is_answered_with_the_one_here(call, name):
    function = getattr(_callable(call), call, _callable(call))  # a package may be the function
    use = OTHER_ARGUMENTS[call, name]
    parameters = inspect.signature(function).parameters
    assert name not in parameters
    (given,) = ast.parse(f"f({use})", mode="eval").body.keywords
    assert given.arg in parameters
    with pytest.raises(fx.FxError, match=f"^{re.escape(call)}\\({name}=") as caught:
        function(**{name: 1})
    assert isinstance(caught.value, TypeError)
    assert caught.value.message.endswith(f" Use {call}({use}).")


HINTED = (
    "agree all_ranks any_rank barrier broadcast broadcast_object clip_norm clip_value duplicate "
    "fork_rng gather gather_objects gather_valid join_tokens log main_first map on_main on_rank "
    "pad preemption reduce say scatter seed split unpad evaluate export fit load_model merge "
    "restore save shard track wrap"
)


@pytest.mark.parametrize("call", HINTED.split())
def test_a_misspelt_argument_is_answered_with_the_nearest(call):
    function = getattr(_callable(call), call, _callable(call))
    name = list(inspect.signature(function).parameters)[-1]
    wrong = f"{name}x"
    with pytest.raises(fx.FxError) as caught:
        function(**{wrong: 1})
    assert isinstance(caught.value, TypeError)
    assert caught.value.message == f"{call}({wrong}=...): no such argument. Did you mean {name!r}?"
