"""A lab of three machines for the tests of this folder."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.nodes import _lab

collect_ignore = ["scripts"]


def _lab_or_skip(network):
    if problem := _lab.problem():
        # Where continuous integration gives root, a lab that cannot be had is a mistake.
        (pytest.fail if os.environ.get("LAB_REQUIRED") == "1" else pytest.skip)(problem)
    folder = Path(tempfile.mkdtemp(prefix="fxtrain-lab-"))
    try:
        with _lab.opened(folder, 3, network) as lab:
            yield lab
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _machines():
    yield from _lab_or_skip("10.91.7")


@pytest.fixture
def lab(_machines):
    """Three machines as new, joined by a network."""
    _machines.reset()
    return _machines


@pytest.fixture
def high_lab():
    """Machines whose addresses sort after 127.0.0.1."""
    for lab in _lab_or_skip("192.168.77"):
        lab.reset()
        yield lab
