"""Names of other libraries: each is answered with what exists here, wherever it is typed."""

import inspect

import attrs
import click
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain._other_names import hint, other_names, setting
from fxtrain.cli import main
from fxtrain.cli.launch_command import LAUNCH
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.config import launch_config
from fxtrain.state import structure
from tests._errors import raises_code
from tests.names._answers import check_answer
from tests.names._library_names import snapshot

RECORDS = (
    fx.Plan, fx.DDP, fx.FSDP, fx.DeepSpeed, fx.PP, fx.Data, fx.Compile, fx.Precision, fx.LossScale,
    fx.LocalSGD, fx.CP, fx.TP, fx.CommHook, fx.EarlyStopping, LaunchSpec,
)  # fmt: skip
ROWS = other_names()
SETTINGS = {
    row.name: row
    for row in reversed(ROWS)
    for kinds in [("argument", "flag", "key")]
    if row.kind in kinds and "." not in row.name
}
OWNED = [row for row in ROWS if row.kind == "argument" and "." in row.name]
VALUES = {row.name: row.use for row in reversed(ROWS) if row.kind == "value"}


def test_a_name_has_one_answer():
    answers = {}
    for row in ROWS:
        assert bool(row.use) != bool(row.none), row
        assert row.none == "" or row.none.endswith("."), row
        assert (row.library, row.kind, row.name) not in answers, row
        answers[row.library, row.kind, row.name] = row
    for name in {row.name for row in ROWS}:
        said = {(row.use, row.path, row.none) for row in ROWS if row[1:3] == ("argument", name)}
        assert len(said) <= 1, said


def test_what_an_answer_names_exists():
    uses = {(row.use, row.path) for row in ROWS if row.use and row.kind != "value"}
    for use, path in uses - {(row.use, row.path) for row in OWNED}:
        check_answer(use, path)


def test_an_answer_that_saves_passes_the_position():
    """Without it, `fx.save` refuses a model that has been trained."""
    saving = [row for row in ROWS if "fx.save(" in row.use]
    assert saving
    assert [row for row in saving if "position=" not in row.use] == []


def test_a_function_of_tuning_is_named_by_its_place():
    with pytest.raises(AttributeError, match=r"fx\.tuning\.find_batch_size finds"):
        fx.find_batch_size


COLLECTIVES = {
    "all_reduce": "Use fx.ops.reduce(tree, ctx).",
    "all_gather": "Use fx.ops.gather(tree, ctx).",
    "all_to_all": "Use that of torch.distributed, with group=ctx.comm.group.",
    "wait_for_everyone": "Use fx.ops.barrier(ctx).",
    "clip": "Use fx.Plan(clip_norm=1.0), or fx.ops.clip_norm(model, 1.0).",
    "gather_object": "Use fx.ops.gather_objects(value, ctx).",
    "brodcast": "Did you mean 'broadcast'?",
}


def test_a_name_is_answered_by_ops_too():
    for name, answer in COLLECTIVES.items():
        with pytest.raises(AttributeError) as caught:
            getattr(fx.ops, name)
        assert str(caught.value) == f"module 'fxtrain.ops' has no attribute {name!r}. {answer}"
    assert not hasattr(fx.ops, "__wrapped__")


def _unexpected(record, name):
    return f"{record.__name__}() got an unexpected keyword argument {name!r}."


def _own_flag(name):
    """Whether `launch` takes it, or an option of which it is the beginning."""
    flag = f"--{name.replace('_', '-')}"
    flags = {word for parameter in LAUNCH.params for word in parameter.opts}
    return flag in {*flags, "--help"} or any(known.startswith(f"{flag}-") for known in flags)


def test_a_name_is_answered_wherever_it_is_typed():
    for name in sorted(SETTINGS.keys() - attrs.fields_dict(fx.Plan).keys()):
        row = SETTINGS[name]
        answer = row.none or f"Use {row.use}."
        with pytest.raises(TypeError) as caught:
            fx.Plan(**{name: 1})
        assert str(caught.value) == f"{_unexpected(fx.Plan, name)} {answer}"
        with pytest.raises(fx.PlanError) as caught:
            launch_config({"plan": {name: 1}})
        assert caught.value.message == f"plan: unknown key {name!r}.{hint(name, at='file')}"
        assert (row.none or row.path or row.use) in str(caught.value)


FLAGS = {row.name for row in ROWS if row.kind == "flag"}
FLAGS |= {flag.replace("-", "_") for flag in snapshot("accelerate")["flag"]}


def test_a_flag_is_answered_on_the_command_line(capsys):
    for name in sorted(name for name in FLAGS if not _own_flag(name)):
        flag = f"--{name.replace('_', '-')}"
        assert main(["launch", flag, "1", "train.py"]) == 2
        said = capsys.readouterr().err.replace("\n", " ")
        row = setting(name)
        answer = row.none or f"Use {row.use}"
        assert f"No such option '{flag}'. {answer}" in said
        assert hint(f"--{name}", at="command") == hint(flag, at="command")


def test_a_value_is_answered():
    for name, said in VALUES.items():
        field, _, value = name.partition(".")
        assert eval(f"fx.Plan({field}={said})", {"fx": fx})
        with raises_code("FX200", "Use ") as caught:
            fx.Plan(**{field: value})
        assert caught.value.message.endswith(f"Use {field}={said}.")
        with pytest.raises(fx.PlanError) as caught:
            structure({field: value}, fx.Plan)
        assert f"Use {field}={said}." in str(caught.value)


def test_a_record_prefers_its_own_field():
    with pytest.raises(TypeError, match=r"Use DDP\(unused_parameters=\.\.\.\)\."):
        fx.DDP(find_unused_parameters=True)
    with pytest.raises(TypeError, match=r"Use LaunchSpec\(ranks=\.\.\.\)\."):
        LaunchSpec(target="train.py", nproc_per_node=2)
    with pytest.raises(TypeError, match=r"Use fx\.Plan\(clip_norm=1\.0\)\."):
        fx.FSDP(max_grad_norm=1.0)


@given(data=st.data())
def test_a_misspelled_argument_suggests_the_nearest(data):
    record = data.draw(st.sampled_from(RECORDS))
    names = [field.alias for field in attrs.fields(record) if field.init]
    name = data.draw(st.sampled_from([name for name in names if len(name) > 4]))
    cut = data.draw(st.integers(1, len(name) - 1))
    word = name[:cut] + name[cut + 1 :]
    assume(word not in names and not hint(word))
    with pytest.raises(TypeError, match="Did you mean") as caught:
        record(**{word: 1})
    assert str(caught.value).startswith(_unexpected(record, word))


def test_a_launch_file_that_is_another_librarys(tmp_path):
    with pytest.raises(fx.PlanError) as caught:
        launch_config({"mixed_precision": "bf16", "num_processes": 2, "plans": 1})
    assert caught.value.message.splitlines() == [
        "the file: unknown key 'mixed_precision'. Use plan.precision.",
        "the file: unknown key 'num_processes'. Use launch.ranks.",
        "the file: unknown key 'plans' (did you mean 'plan'?); a launch file has launch and plan.",
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


CALLS = {
    row.name: row
    for kind in ("method", "class")
    for row in reversed(ROWS)
    if row.kind == kind and not {".", "*"} & {*row.name}
}


def test_a_function_of_another_library_is_answered():
    for name in sorted(name for name in CALLS if not hasattr(fx, name)):
        answer = CALLS[name].none or f"Use {CALLS[name].use}."
        with pytest.raises(AttributeError) as caught:
            getattr(fx, name)
        assert str(caught.value).endswith(f"no attribute {name!r}. {answer}")


WRONG_BEFORE = {
    "fx.FSDP(use_orig_params=True)": "FSDP2 always does this.",
    "fx.Trainer": "Use fx.fit(ctx, fns, loader, path, epochs=3).",
    "fx.Linear": "has no attribute 'Linear'",
    "fx.Plan(even_batches=False)": 'Use fx.Plan(even="uneven").',
    "fx.Precision(compute='fp8', backend='te')": "Use Precision(recipe='te').",
}


@pytest.mark.parametrize("call", WRONG_BEFORE)
def test_an_answer_is_not_a_guess(call):
    with pytest.raises((AttributeError, TypeError)) as caught:
        eval(call, {"fx": fx})
    assert str(caught.value).endswith(WRONG_BEFORE[call])


def test_names_of_ops_and_misspelled_names_are_answered():
    for name, text in {"unpad": " Use fx.ops.unpad.", "rap": " Did you mean 'wrap'?"}.items():
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
    return getattr(fx, name, None) or getattr(fx.ops, name)


def test_an_argument_of_another_library_is_answered_with_the_one_here():
    for row in OWNED:
        call, _, name = row.name.partition(".")
        function = getattr(_callable(call), call, _callable(call))  # a package may be the function
        parameters = inspect.signature(function).parameters
        assert name not in parameters, row
        if inspect.isclass(function):
            with pytest.raises(TypeError) as caught:
                function(**{name: 1})
            answer = row.none or f"Use {call}({row.use})."
            assert str(caught.value) == f"{_unexpected(function, name)} {answer}"
        if row.use:
            assert row.use.partition("=")[0] in parameters, row
