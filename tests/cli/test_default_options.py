"""Options that commands of other libraries have too."""

import runpy
import sys

import pytest

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.launchers.config import resolve


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


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fxtrain", "--version"])
    monkeypatch.delitem(sys.modules, "fxtrain.__main__", raising=False)  # runpy warns of it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fxtrain", run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("fxtrain ")
