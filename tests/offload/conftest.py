"""A model in files, and the threads of a test."""

import threading

import pytest

import fxtrain as fx
from fxtrain.testing import Transformer


@pytest.fixture
def folder(tmp_path):
    fx.export(Transformer(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def threads():
    """A function that lists the threads that were started since."""
    before = threading.enumerate()
    return lambda: [one for one in threading.enumerate() if one not in before]
