"""Whatever is on the command line: an exit code that is documented, and never a traceback."""

import contextlib
import io

import click
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.cli.app import COMMANDS, load

ODD = (
    *("", ".", "..", "/", ".foo", "a..b", "--", "=", "a=b", "os.path:join", "%s", "{}", "1,2", "["),
    *("-1", "0", "1e999", "inf", "nan", "9" * 5000, "9" * 4000, "9" * 5000 + ",1", "x" * 5000),
    *("\0", "a\0b", "/dev/null/x", "!!int ''", "\ud800", "é", "٣", "\x1b[31m", "https://", "s3://"),
)
# What asks questions, opens a shell, starts ranks or reads the whole machine is not tried out.
LEFT_OUT = ("config", "test", "tpu-config", "env", "plan", "verify-resume", "replay")


def _commands(command, words):
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from _commands(part, (*words, name))
    else:
        yield words, command


FOUND = {
    words: command
    for name in COMMANDS
    if name not in LEFT_OUT
    for words, command in _commands(load(name), (name,))
}


def _said(words):
    """The exit code, and what was written."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        code = main(words)
    return code, written.getvalue()


def _options(command):
    return [one for one in command.params if isinstance(one, click.Option) and not one.is_flag]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_word_ends_in_a_traceback(data, tmp_path_factory):
    texts = st.sampled_from(ODD) | st.text(max_size=20)
    words = data.draw(st.sampled_from(sorted(FOUND)))
    command = FOUND[words]
    given_ = [
        part
        for option in data.draw(st.lists(st.sampled_from(_options(command) or [None]), max_size=3))
        if option is not None
        for part in (option.opts[-1], data.draw(texts))
    ]
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    rest = [data.draw(texts) for _ in arguments]
    dry = ["--dry"] if words == ("launch",) else []
    with contextlib.chdir(tmp_path_factory.mktemp("here")):
        code, written = _said([*words, *dry, *given_, *rest])
    assert code in (Exit.WELL, Exit.FOUND, Exit.WRONG), written
    assert "Traceback" not in written


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages whose import fails, each in its way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    bodies = {
        "fails": "raise RuntimeError('no')",
        "quits": "raise SystemExit(7)",
        "parses": "def (",
    }
    for name, body in bodies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(body + "\n")
        (tmp_path / name / "part.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".foo", "-m .foo: importing"),
        ("a..b", "-m a..b: importing"),
        ("fails.part", "RuntimeError: no"),
        ("quits.part", "SystemExit: 7"),
        ("parses.part", "SyntaxError"),
        ("fails.part.more", "RuntimeError: no"),
    ],
)
def test_a_module_that_cannot_be_found(packages, name, says):
    code, written = _said(["launch", "--ranks=1", "-m", name])
    assert code == Exit.WRONG and says in written


@pytest.mark.parametrize("factory", ["os.path:join", "os:getcwd", "os", "fails:make", "os:nothing"])
def test_a_model_that_cannot_be_made(packages, factory):
    code, written = _said(["import", "--model", factory, ".", "out"])
    assert code == Exit.WRONG and f"{factory}" in written


def test_an_address_of_another_machine_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    code, written = _said(["launch", "--ranks=1", "--local-address=192.0.2.1", "train.py"])
    assert code == Exit.WRONG and "this machine has no such address" in written


PATHS = ["\0", "a\0b", "", b"bytes", 3, None]


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_what_is_no_path_is_an_error_of_ours(path):
    with fx.detect(env={}, device="cpu") as ctx:
        net = fx.wrap(torch.nn.Linear(2, 1), ctx)
        for call in (
            lambda: fx.save(path, ctx, net),
            lambda: fx.restore(path, ctx, net),
            lambda: fx.latest(path),
            lambda: fx.checkpoint.verify(path),
            lambda: fx.export(net, path),
            lambda: fx.load_model(path, net),
            lambda: fx.checkpoint.merge(path, "out"),
            lambda: fx.read_plan(path),
            lambda: fx.write_plan(fx.Plan(), path),
        ):
            with pytest.raises(fx.FxError):
                call()


TIMES = {
    "inf": float("inf"),
    "nan": float("nan"),
    "zero": 0,
    "negative": -1,
    "1e300": 1e300,
    "a string": "5",
    "a bool": True,
    "5000 digits": 10**5000,
}


@pytest.mark.parametrize("name", TIMES)
def test_what_is_no_time_is_an_error_of_ours(name):
    with pytest.raises(fx.FxError, match="number of seconds"):
        fx.detect(env={}, device="cpu", timeout_s=TIMES[name])
    with pytest.raises(fx.FxError, match="number of seconds"):
        fx.launch(divmod, (7, 2), ranks=1, timeout_s=TIMES[name])
    with pytest.raises(fx.FxError, match="whole number"):
        fx.launch(divmod, (7, 2), ranks=TIMES[name], timeout_s=5)
