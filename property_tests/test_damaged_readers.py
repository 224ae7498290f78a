"""Every reader of files, given what is no such file: one error that names it, soon and small."""

import contextlib
import io
import json
import os
import signal
import socket
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.big.memory_estimates import read_weights
from fxtrain.cli import main
from fxtrain.curves import RunReader, page_of, read_curves
from fxtrain.interop import import_checkpoint
from fxtrain.launchers.config import read_launch_file
from fxtrain.profiling import summary
from fxtrain.state import read_record
from fxtrain.trackers import read_run
from fxtrain.trackers.opening import claim
from tests._damage import damaged, misshapen, only

NASTY = "\x1b[2J\x1b]0;t\x07\u202e"
DEEP = 200_000


def _deepspeed(path):
    fx.interop.deepspeed_config(fx.Plan(strategy=fx.DeepSpeed(config=str(path))))


def _load(path):
    fx.load_model(path, nn.Linear(2, 2))


def _command(*words):
    """A command as a reader: what it prints on an error is the error's text."""

    def call(path):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*words, str(path)])
        assert code in (0, 1, 2)
        if code:
            raise fx.PlanError(out.getvalue() + err.getvalue())

    return call


def _of_run(path):
    return path.parent / "run"


# name: (name of the file, what reads it); a path with a folder is one that the reader is given.
READERS = {
    "plan, json": ("a.json", fx.read_plan),
    "plan, toml": ("a.toml", fx.read_plan),
    "plan, yaml": ("a.yaml", fx.read_plan),
    "placement": ("a.toml", lambda path: read_record(path, fx.state.Placement)),
    "dry run": ("a.json", lambda path: read_record(path, fx.state.DryRun)),
    "launch file, toml": ("a.toml", read_launch_file),
    "launch file, yaml": ("a.yaml", read_launch_file),
    "launch file, checked": ("a.toml", _command("config", "check")),
    "config of Accelerate": ("a.yaml", _command("config", "convert")),
    "config of DeepSpeed": ("a.json", _deepspeed),
    "times": ("summary.json", lambda path: summary(path.parent)),
    "metrics": ("metrics.jsonl", lambda path: read_curves([path.parent])),
    "run": ("run.json", lambda path: read_run(path.parent)),
    "manifest": ("manifest.json", lambda path: fx.checkpoint.verify(path.parent)),
    "model": ("a.safetensors", _load),
    "pickled model": ("a.pt", _load),
    "index": ("a.safetensors.index.json", _load),
    "config of a model": ("config.json", lambda path: read_weights(str(path))),
    "checkpoint of torch": (".metadata", lambda path: import_checkpoint(path.parent, "out")),
    "checkpoint of DeepSpeed": ("latest", lambda path: import_checkpoint(path.parent, "out")),
}  # fmt: skip


def _link(path, target="/dev/zero"):
    path.symlink_to(target)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(path))  # whose whole path may be too long


def _sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _deep(path):
    yaml = "- " * DEEP if path.suffix == ".yaml" else "[" * DEEP
    path.write_text(f"a = {'[' * DEEP}" if path.suffix == ".toml" else yaml)


def _aliases(path):
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    path.write_text("\n".join(lines))


def _number(path):
    digits = "9" * 10_000  # Python converts 4,300
    path.write_text({".toml": f"a = {digits}", ".yaml": f"a: {digits}"}.get(path.suffix, digits))


KINDS = {
    "a pipe": os.mkfifo,
    "a device": _link,
    "a link to nothing": lambda path: _link(path, "nowhere"),
    "a socket": _socket,
    "a folder": os.mkdir,
    "a terabyte": _sparse,
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 100),
    "half a surrogate pair": lambda path: path.write_bytes(b'{"a\xed\xa0\x80": "\\ud800"}'),
    "nested deeply": _deep,
    "aliases": _aliases,
    "a long number": _number,
    "no number": lambda path: path.write_text('{"a": NaN, "b": -Infinity, "c": 1e999}'),
    "control characters": lambda path: path.write_text(
        json.dumps({NASTY: NASTY}) if path.suffix != ".toml" else json.dumps(NASTY) + " = 1"
    ),
}
FINE = {("config of DeepSpeed", "control characters")}  # an unknown key, which DeepSpeed may know
# A log may have any size: a terabyte of it is read for minutes.
CASES = [
    (name, kind) for name in READERS for kind in KINDS if (name, kind) != ("metrics", "a terabyte")
]


@pytest.fixture
def patience():
    """What is waited for ends the test, and nothing else that runs with it."""
    signal.alarm(30)
    yield
    signal.alarm(0)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_is_no_such_file_is_one_short_error(tmp_path, monkeypatch, patience, name, kind):
    monkeypatch.chdir(tmp_path)
    file, read = READERS[name]
    path = tmp_path / "folder" / file
    path.parent.mkdir()
    KINDS[kind](path)
    if only(fx.FxError, read, path):
        assert (name, kind) in FINE
        return
    tracemalloc.start()
    try:
        with pytest.raises(fx.FxError, match="folder"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", READERS)
def test_an_empty_file_is_read_or_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    file, read = READERS[name]
    path = tmp_path / "folder" / file
    path.parent.mkdir()
    path.touch()
    only(fx.FxError, read, path)


# Random damage to files that no other test damages

TIMES = {"ranks": [{"rank": 0, "steps": [{"step_ns": 9, "data_ns": 9}], "flops": 3}]}
LINES = [
    {"step": 0, "rows": 0, "time": 1.0, "start": {"name": "a", "params": {"lr": 0.1, "n": "x"}}},
    {"step": 1, "rows": 8, "time": 2.0, "values": {"loss": 1.0, "lr": 0.1, "bad": "nan"}},
    {"step": 2, "rows": 16, "time": 3.0, "values": {"loss": 0.5}},
    {"step": 2, "table": {"t": {"columns": ["a", "b"], "rows": [[1, "x"], [None, 2.5]]}}},
    {"step": 2, "artifact": {"model": "model.pt"}}, {"step": 2, "text": {"a": "b"}},
]  # fmt: skip
IDENTITY = {"format": 1, "id": "0" * 32, "identities": [{"JsonLines": "same"}]}


@st.composite
def _changed(draw, value):
    """JSON text of a value, with damaged bytes or values of another kind."""
    if draw(st.booleans()):
        return draw(damaged(json.dumps(value).encode()))
    return json.dumps(draw(misshapen(value)), default=str).encode()


@given(data=st.data())
def test_damaged_times_are_shown_or_refused(folder, data):
    path = folder / "summary.json"
    path.write_bytes(data.draw(_changed(TIMES)))
    only(fx.PlanError, lambda: summary(path).columns)
    only(fx.PlanError, _command("profile"), path)


@given(data=st.data())
def test_damaged_lines_of_a_run_are_shown_or_refused(folder, data):
    lines = [data.draw(_changed(one)) if data.draw(st.booleans()) else json.dumps(one).encode()
             for one in LINES]  # fmt: skip
    path = folder / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + data.draw(st.sampled_from([b"", b"\n"])))
    only(fx.PlanError, lambda: page_of(read_curves([folder])).encode())
    RunReader(path=path).read()
    only(fx.PlanError, _command("watch"), folder)


@given(data=st.data())
def test_a_damaged_identity_of_a_run_is_read_or_refused(folder, data):
    Path(folder, "run.json").write_bytes(data.draw(_changed(IDENTITY)))
    only(fx.PlanError, claim, folder, "folder")


PLACEMENT = fx.state.Placement(
    units=(fx.state.Unit(name="layers.0", device="disk", bytes=400),), room=800
)


@pytest.mark.parametrize("form", ["json", "toml", "yaml"])
@given(data=st.data())
def test_a_damaged_placement_is_read_or_refused(folder, form, data):
    path = folder / f"placement.{form}"
    path.write_bytes(data.draw(damaged(fx.state.dumps(PLACEMENT, form).encode())))
    only(fx.PlanError, read_record, path, fx.state.Placement)
