"""The ready launch files: each is valid, starts, and is listed."""

import sys

import pytest

from fxtrain.cli import Exit, main
from tests.launched._run import ROOT

FILES = sorted((ROOT / "examples" / "configs").iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_is_valid_and_starts(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # which looks for a GPU when imported
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["config", "check", str(path)]) == Exit.WELL, capsys.readouterr().out
    assert main(["launch", "--config", str(path), "--dry", "train.py"]) == 0
    assert "train.py" in capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_says_how_to_start_it_and_is_listed(path):
    start = f"#     fxtrain launch --config examples/configs/{path.name} "
    assert start in path.read_text()
    assert f"](configs/{path.name})" in (ROOT / "examples" / "README.md").read_text()
    assert f"](../examples/configs/{path.name})" in (ROOT / "docs" / "launching.md").read_text()
