"""Files that a user names: what is opened, how much is read, and what of it is printed."""

import json
import os
import pickle
import signal
import socket
import tracemalloc

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain._reading import open_file, read_file, read_text
from fxtrain.big.memory_estimates import read_weights
from fxtrain.cli import main
from fxtrain.errors import escape_unprintable
from fxtrain.interop import read_checkpoint
from tests._errors import raises_code

NOT_FILES = {
    **dict.fromkeys(("fifo", "socket", "device"), "a device, not a regular file"),
    "folder": "a folder, not a file",
}


def _made(kind, path):
    """Something at a path that is no regular file."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.fixture(autouse=True)
def patience():
    """A pipe that is waited for ends the test, and nothing else that runs with it."""
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("kind", NOT_FILES)
def test_only_regular_files_are_opened(tmp_path, kind):
    with pytest.raises(OSError, match=NOT_FILES[kind]) as caught:
        open_file(_made(kind, tmp_path / kind))
    assert caught.value.filename == str(tmp_path / kind)


def test_no_more_is_read_than_is_allowed(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes; the limit is 4"):
        read_file(path, 4)
    with pytest.raises(OSError, match="the limit is 3"):  # it says that it has none
        read_file("/proc/self/status", 3)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(OSError, match="the limit is 1000"):
        read_file(path, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_text_is_read_as_python_reads_it(tmp_path):
    path = tmp_path / "a"
    path.write_bytes("a\r\nb\rc\nä".encode())
    assert read_text(path) == path.read_text(encoding="utf-8") == "a\nb\nc\nä"
    path.write_bytes(b"a\xff")
    with pytest.raises(OSError, match="not UTF-8 text"):
        read_text(path)
    with pytest.raises(OSError, match="not a path"):
        read_text("a\0b")


CALLS = {
    "read_plan": (".yaml", fx.PlanError, fx.read_plan),
    "deepspeed": (
        ".json",
        fx.PlanError,
        lambda path: fx.interop.deepspeed_config(fx.Plan(strategy=fx.DeepSpeed(config=str(path)))),
    ),
    "load_model": (".safetensors", fx.CheckpointError, lambda p: fx.load_model(p, nn.Linear(2, 2))),
    "load_model, pickle": (".pt", fx.CheckpointError, lambda p: fx.load_model(p, nn.Linear(2, 2))),
    "load_model, index": (".json", fx.CheckpointError, lambda p: fx.load_model(p, nn.Linear(2, 2))),
    "estimate": (".json", fx.PlanError, lambda path: read_weights(str(path))),
}


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_refuses_what_is_no_regular_file(tmp_path, name, kind):
    suffix, error, call = CALLS[name]
    path = _made(kind, tmp_path / f"x{suffix}")
    with pytest.raises(error, match="regular file"):
        call(path)


COMMANDS = [
    ["config", "check"], ["config", "show", "-c"], ["config", "convert"], ["launch", "-c"],
    ["plan", "--world", "2", "--against"],
]  # fmt: skip


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_refuses_what_is_no_regular_file(tmp_path, capsys, words, kind):
    path = _made(kind, tmp_path / "x.yaml")
    assert main([*words, str(path), __file__][: None if words[0] in ("launch", "plan") else -1])
    told = capsys.readouterr()
    assert "regular file" in told.out + told.err


# What is printed

NASTY = "\x1b[31m\x9b2J\u202e[/red]\r\x07"


def test_control_characters_are_escaped_and_nothing_else():
    assert escape_unprintable("a\tb\nä → 模型 😀") == "a\tb\nä → 模型 😀"
    assert escape_unprintable("\x1b[31m\x9b\u202e\u2066\ud800\r") == (
        r"\x1b[31m\x9b\u202e\u2066\ud800\r"
    )


@pytest.mark.parametrize("kind", [getattr(fx, n) for n in fx.__all__ if n.endswith("Error")])
def test_no_error_prints_control_characters(kind):
    error = kind(f"a {NASTY}")
    assert error.message == f"a {escape_unprintable(NASTY)}" and "\x1b" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def _tensor_file(path, name):
    header = json.dumps({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    return path


def test_commands_show_control_characters_of_files(tmp_path, capsys):
    _tensor_file(tmp_path / "m.safetensors", NASTY)
    assert main(["estimate-memory", str(tmp_path / "m.safetensors")]) == 0
    (tmp_path / "l.yaml").write_text(json.dumps({"launch": {"args": [NASTY]}}))
    assert main(["config", "show", "--said", "-c", str(tmp_path / "l.yaml")]) == 0
    (tmp_path / "l.yaml").write_text(json.dumps({"launch": {NASTY: 1}}))
    assert main(["config", "check", str(tmp_path / "l.yaml")]) == 1
    assert main(["config", "show", "-c", str(tmp_path / "l.yaml")]) == 2
    told = capsys.readouterr()
    assert "\\x1b[31m" in told.out and "[/red]" in told.out and "\\x1b[31m" in told.err
    assert all(one.isprintable() or one == "\n" for one in told.out + told.err)


def test_a_launch_shows_arguments_that_a_shell_reads(tmp_path, capsys):
    assert main(["launch", "--dry", "--ranks", "1", "--cpu", __file__, "\x1b[31m'\\"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(r"$'\u001b[31m\'\\'")


# Numbers that are believed too early


def test_a_memo_of_dcp_takes_no_more_memory_than_its_file(tmp_path):
    put = b"\x80\x02Nr" + (0x04000000).to_bytes(4, "little") + b"."
    array = b"\x80\x05\x96" + (1 << 32).to_bytes(8, "little") + b"."
    for raw in (put, array):
        (tmp_path / ".metadata").write_bytes(raw)
        tracemalloc.start()
        with raises_code("FX602"):
            read_checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
        tracemalloc.stop()


def test_an_archive_that_claims_more_than_it_has_is_refused(tmp_path):
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "m.pt")
    raw = (tmp_path / "m.pt").read_bytes()
    entry = raw.rindex(b"PK\x01\x02")  # of the last file: its size is at 24
    claimed = raw[: entry + 24] + b"\xff\xff\xff\x7f" + raw[entry + 28 :]
    (tmp_path / "m.pt").write_bytes(claimed)
    with raises_code("FX600", "entries"):
        fx.load_model(tmp_path / "m.pt", nn.Linear(2, 2))


@pytest.mark.parametrize("word", ["1e999", "NaN", "-Infinity", "9" * 40])
def test_a_header_holds_no_number_that_is_none(tmp_path, word):
    header = f'{{"w":{{"dtype":"U8","shape":[4],"data_offsets":[{word},4]}}}}'.encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with raises_code("FX602"):
        fx.load_model(path, nn.Linear(2, 2))
    with pytest.raises(fx.CheckpointError):
        read_weights(str(path))


def test_half_a_surrogate_pair_is_no_name(tmp_path):
    path = _tensor_file(tmp_path / "m.safetensors", "\ud800")
    with raises_code("FX602"):
        fx.load_model(path, nn.Linear(2, 2))
