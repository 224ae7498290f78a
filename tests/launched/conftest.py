"""Ranks of `fx.launch` that start within a fraction of a second."""

import multiprocessing
import sys

import pytest

from fxtrain.testing.cluster import starter


@pytest.fixture
def forked_ranks(monkeypatch):
    """Functions run in forks of a server that has torch loaded, not in fresh processes."""
    if sys.platform != "linux":
        return
    contexts = multiprocessing.get_context

    def get_context(method=None):
        return starter() if method == "spawn" else contexts(method)

    monkeypatch.setattr(multiprocessing, "get_context", get_context)
