"""A plan for DeepSpeed where the package is missing or too old."""

import importlib
import sys
import types

import pytest
import torch

import fxtrain as fx


def _wrap():
    with fx.detect({}, device="cpu") as ctx:
        fx.wrap(torch.nn.Linear(2, 2), ctx, fx.Plan(strategy=fx.DeepSpeed()))


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    usual = importlib.import_module

    def absent(name, *rest):
        if name == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
        return usual(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(fx.errors.MissingPackageError, match=r"pip install 'fxtrain\[deepspeed\]'"):
        _wrap()


def test_an_old_package_names_the_command(monkeypatch):
    old = types.ModuleType("deepspeed")
    old.__version__ = "0.14.4"
    monkeypatch.setitem(sys.modules, "deepspeed", old)
    with pytest.raises(fx.errors.MissingPackageError, match=r"0\.14\.4 is installed.*--upgrade"):
        _wrap()
