"""The command line: words to records to exit codes, without starting a rank."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import pytest

import fxtrain as fx
from fxtrain.cli import COMMANDS, Exit, main
from fxtrain.cli.app import load
from fxtrain.cli.launch_command import LAUNCH, spec_of
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.config import resolve


def _options(*words: str) -> dict:
    """What the `launch` command makes of its words."""
    return LAUNCH.make_context("launch", list(words)).params


@attrs.frozen(kw_only=True)
class Line:
    """A command line that is understood, and the spec that it means."""

    words: str
    spec: LaunchSpec


LINES = [
    Line(words="train.py", spec=LaunchSpec(target="train.py")),
    Line(words="--ranks 4 train.py", spec=LaunchSpec(target="train.py", ranks=4)),
    Line(words="-n 4 train.py", spec=LaunchSpec(target="train.py", ranks=4)),
    Line(
        words="--ranks 2 train.py --ranks 9 -m --help x",
        spec=LaunchSpec(target="train.py", ranks=2, args=("--ranks", "9", "-m", "--help", "x")),
    ),
    Line(
        words="--restarts 3 train.py -- a --",
        spec=LaunchSpec(target="train.py", restarts=3, args=("--", "a", "--")),
    ),
    Line(
        words="--launcher deepspeed -o hostfile=hosts -o include=a@b:0 -o runner=slurm train.py",
        spec=LaunchSpec(
            target="train.py",
            launcher="deepspeed",
            options={"hostfile": "hosts", "include": "a@b:0", "runner": "slurm"},
        ),
    ),
    Line(
        words="-n 2 -m json.tool in.json",
        spec=LaunchSpec(target="json.tool", ranks=2, module=True, args=("in.json",)),
    ),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.words)
def test_a_line_becomes_a_spec(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert spec_of(_options(*line.words.split())) == line.spec


@attrs.frozen(kw_only=True)
class Mistake:
    """A command line that is refused, and words that its message must hold."""

    words: str
    says: str


MISTAKES = [
    Mistake(words="launch --ranks 0 train.py", says="whole number of at least 1"),
    Mistake(words="launch --ranks -2 train.py", says="whole number of at least 1"),
    Mistake(words="launch --restarts -1 train.py", says="choose a number from 0"),
    Mistake(words="launch trian.py", says="Did you mean 'train.py'?"),
    Mistake(words="launch nowhere/train.py", says="no such script"),
    Mistake(words="launch .", says="a folder without a __main__.py"),
    Mistake(words="launch -m json.toool", says="no such module on the path"),
    Mistake(words="launch -m train.py", says="Omit -m"),
    Mistake(words="launch -m no_such_package.part", says="No module named 'no_such_package'"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.words)
def test_a_mistake_is_told_in_one_line(mistake, tmp_path, monkeypatch, capsys, process_state):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(mistake.words.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert mistake.says in told.err
    assert re.match(r"fxtrain launch: (LaunchError|PlanError: launch\.)", told.err)
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    "words", ["launch", "launch --ranks", "launch --ranks two train.py", "train", "--frobnicate"]
)
def test_a_line_that_cannot_be_read_is_a_mistake(words, capsys):
    assert main(words.split()) == Exit.WRONG
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(("Usage: fxtrain", "Error: Option"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run train.py", "Use fxtrain launch --ranks 2 train.py."),
        (
            "launch --seed 4 train.py",
            "Use --set plan.seed=..., or plan.seed in a launch file.",
        ),
        ("launch --plan.clip-norm 1 train.py", "or plan.clip_norm in a launch file."),
        ("launch --partition gpu train.py", "--launcher slurm --option partition=gpu train.py."),
    ],
)
def test_what_belongs_elsewhere_is_told_with_its_place(words, says, capsys):
    assert main(words.split()) == Exit.WRONG
    assert says in capsys.readouterr().err.replace("\n", " ")


def test_a_misspelled_command_is_told_with_the_closest(capsys):
    assert main(["lanuch", "train.py"]) == Exit.WRONG
    assert "launch" in capsys.readouterr().err


def test_nothing_at_all_shows_the_help(capsys):
    assert main([]) == Exit.WRONG
    assert "launch" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--help", "--version", *(f"{name} --help" for name in COMMANDS)])
def test_questions_are_answered_on_standard_output(words, capsys):
    assert main(words.split()) == Exit.WELL
    told = capsys.readouterr()
    assert told.err == ""
    assert (fx.__version__ if words == "--version" else "Usage: fxtrain") in told.out


def test_commands_have_names_of_their_own_and_help():
    names = [*COMMANDS]
    assert len(set(names)) == len(names)
    assert all(help for _, help in COMMANDS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_name_leads_to_its_command(name):
    assert load(name).name == name


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the launcher sets it here
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["launch", "-n", "1", "--log-dir", "train.py", "train.py"]) == Exit.WRONG
    assert capsys.readouterr().err == "fxtrain launch: train.py: File exists.\n"


def test_a_reader_that_left_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "fxtrain", "--help"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("fxtrain la", "plain,launch"),
        ("fxtrain launch --ra", "plain,--ranks"),
        ("fxtrain launch tr", "file,tr"),
    ],
)
def test_a_shell_is_told_how_to_complete(words, offers):
    asked = {
        "_FXTRAIN_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fxtrain"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert offers in done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_a_shell_calls_this_program(shell, capsys):
    assert main(["completion", shell]) == Exit.WELL
    assert f"_FXTRAIN_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [
        "from fxtrain.state import *; loads(dumps(Plan(precision='bf16', context=CP())))",
        "from fxtrain.state import topology; topology.read_topology({})",
        "from fxtrain.cli import main; main('launch -c run.toml -n2 --dry train.py'.split())",
    ],
)
def test_plans_and_launch_files_need_no_torch(code, tmp_path):
    (tmp_path / "run.toml").write_text("[plan]\naccumulate = 2\n[launch]\nlog_dir = 'logs'\n")
    (tmp_path / "train.py").write_text("")
    check = f"{code}\nimport sys; sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", check]
    done = subprocess.run(words, capture_output=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


SLOW = ("torch", "cattrs", "importlib.metadata", "asyncio")


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        ("import fxtrain.cli", SLOW),
        ("import fxtrain.launchers", ("torch",)),
        ("from fxtrain.cli import main; main(['--help'])", SLOW),
        ("from fxtrain.cli import main; main(['launch', 'nowhere.py'])", ("torch",)),
        (
            "from fxtrain.cli import main\nfrom fxtrain.cli.app import COMMANDS\n"
            "for name in COMMANDS: main([name, '--help'])",
            ("torch",),
        ),
    ],
)
def test_nothing_slow_is_loaded_before_it_is_needed(code, slow):
    check = f"{code}\nimport sys; sys.exit(any(name in sys.modules for name in {slow}))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "program", [["-m", "fxtrain"], ["-c", "import fxtrain.cli as c; c.main()"]]
)
def test_it_runs_as_a_program(program):
    words = [sys.executable, *program, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith(f"fxtrain {fx.__version__} ")


def _tree(group: click.Group, at: str) -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"{at} {name}"
        if isinstance(command, click.Group):
            yield from _tree(command, f"{at} {name}")


def test_the_page_lists_every_command():
    """docs/command_line.md and click's own tree, the loaded one."""
    loaded = click.Group(commands={name: load(name) for name in COMMANDS})
    page = (Path(__file__).parents[1] / "docs" / "command_line.md").read_text()
    table = page.partition("| Command | Does |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(fxtrain [a-z-]+(?: [a-z]+)?)[^`]*`", table, re.MULTILINE)
    found = [line.removesuffix(" bash") for line in listed]
    assert sorted(found) == sorted(_tree(loaded, "fxtrain"))


def test_the_precision_of_a_default_file(tmp_path, capsys):
    path = str(tmp_path / "fxtrain.toml")
    assert main(["config", "default", path, "--precision", "fp16"]) == 0
    assert resolve(file=path).plan.precision == fx.Precision(compute="fp16")
    assert main(["config", "default", path, "--precision", "bf17", "--force"]) == Exit.WRONG
    assert "found 'bf17'; choose" in capsys.readouterr().err


def test_env_shows_another_launch_file(tmp_path, capsys):
    path = tmp_path / "other.toml"
    path.write_text("[launch]\nranks = 3\n")
    assert main(["env", "--config", str(path)]) == 0
    assert "launch.ranks: 3" in capsys.readouterr().out


def test_the_package_is_the_command(monkeypatch, capsys, process_state):
    sys.argv[:] = ["fxtrain", "--version"]
    monkeypatch.delitem(sys.modules, "fxtrain.__main__", raising=False)  # runpy warns of it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fxtrain", run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("fxtrain ")


PATHS = {"absent": "nowhere/at/all", "null": "a\0b", "half a pair": "x\ud800"}
READING = (
    "watch", "report", "verify", "diagnose", "stacks", "profile", "estimate-memory", "place",
    "config check", "config update", "config show -c", "config convert", "launch",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("command", READING)
def test_a_path_that_is_not_there_or_no_path_is_one_message(
    command, path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), PATHS[path]]) in (Exit.FOUND, Exit.WRONG)
    told = capsys.readouterr().err
    assert told and "Errno" not in told and "Traceback" not in told
