"""What an installed package adds: a strategy, a launcher, and a collective, which is a function."""

import importlib.util
import sys

import pytest
import torch

import fxtrain as fx
from fxtrain import cli
from fxtrain.launchers import LaunchSpec, find_launcher, known_launchers, prepare, run
from tests._errors import raises_code

THEIRS = '''
import sys

import attrs

from fxtrain import ops
import fxtrain as fx
from fxtrain.backends import built_in
from fxtrain.launchers import Invocation, Launcher


@attrs.frozen(kw_only=True)
class Mine:
    kind: str = attrs.field(default="mine", init=False)


SINGLE = built_in(fx.Single)
STRATEGY = attrs.evolve(SINGLE, name="Mine", config=Mine)


@attrs.frozen(kw_only=True)
class QueueOptions:
    slots: int = 1


def _invocation(spec, machine):
    words = ("print('queued', *sys.argv[1:])", f"slots={spec.options.slots}", spec.target)
    return Invocation(argv=(machine.python, "-c", f"import sys; {words[0]}", *words[1:]))


LAUNCHER = Launcher(
    name="queue",
    help="the queue of the third floor",
    invocation=_invocation,
    options=QueueOptions,
    uses=["log_dir"],
)


def spread_of(values, ctx):
    """Largest minus smallest value over the ranks."""
    low, high = ops.reduce(values, ctx, op="min"), ops.reduce(values, ctx, op="max")
    return high - low
'''
ENTRIES = """
[fxtrain.strategies]
mine = theirs_installed:STRATEGY

[fxtrain.launchers]
queue = theirs_installed:LAUNCHER
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch, installed):
    """The module of a package that is installed for one test."""
    (tmp_path / "theirs_installed.py").write_text(THEIRS)
    installed(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("theirs_installed")
    del sys.modules["theirs_installed"]


def test_a_strategy_is_found_by_its_config(theirs):
    plan = fx.Plan(strategy=theirs.Mine())
    assert fx.state.loads(fx.state.dumps(plan)) == plan
    with fx.detect({}, device="cpu") as ctx:
        assert fx.wrap(torch.nn.Linear(2, 1), ctx, plan).strategy.name == "Mine"


def test_a_launcher_is_found_by_its_name_and_started(theirs, tmp_path, capfd):
    (tmp_path / "train.py").write_text("")
    target = str(tmp_path / "train.py")
    spec = LaunchSpec(target=target, launcher="queue", options={"slots": "3"})
    assert find_launcher(spec) is theirs.LAUNCHER
    assert prepare(spec).argv[-2:] == ("slots=3", target)
    assert run(spec).code == 0
    assert capfd.readouterr().out == f"queued slots=3 {target}\n"
    with raises_code("FX700", "'slot'"):
        prepare(LaunchSpec(target=target, launcher="queue", options={"slot": "3"}))
    with raises_code("FX700", "restarts=2"):
        prepare(LaunchSpec(target=target, launcher="queue", restarts=2))


def test_the_command_line_knows_the_launcher(theirs, tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    words = ["launch", "--launcher", "queue", "-o", "slots=2", "--dry", str(tmp_path / "train.py")]
    assert cli.main(words) == 0
    assert "slots=2" in capsys.readouterr().out
    assert cli.main(["launch", "--launcher", "quee", str(tmp_path / "train.py")]) == 2
    assert "Did you mean 'queue'?" in capsys.readouterr().err


def _spread(ctx, path, rows):
    found = importlib.util.spec_from_file_location("theirs_installed", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.spread_of(torch.tensor(rows[ctx.rank]), ctx).tolist()


def test_a_collective_is_a_function_of_public_ones(theirs, pair):
    assert pair.run(_spread, theirs.__file__, [[1, 5], [4, 3]]) == [[3, 2]] * 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "sys:path",
            r"should load a Launcher, found list. Report this to the author of its package",
        ),
        ("fxtrain.launchers.built_in.mpi:MPI", r"adds a second launcher for mpi. Uninstall one"),
    ],
)
def test_a_wrong_launcher_is_named(installed, value, words):
    installed(f"[fxtrain.launchers]\nmine = {value}\n")
    with pytest.raises(fx.errors.LaunchError, match=words):
        known_launchers()
    with pytest.raises(fx.errors.LaunchError, match=words):
        find_launcher(LaunchSpec(target="train.py", launcher="unknown"))
    assert find_launcher(LaunchSpec(target="train.py", launcher="mpi")).name == "mpi"
