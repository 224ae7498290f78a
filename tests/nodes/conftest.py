"""A lab of three machines for the tests of this folder."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.nodes import _lab

collect_ignore = ["scripts"]


@contextlib.contextmanager
def _fresh_folder():
    """A folder for a lab, not in TMPDIR: that may be in /dev/shm, which each machine has."""
    folder = Path(tempfile.mkdtemp(prefix="fxtrain-lab-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder():
    """A folder for another lab."""
    with _fresh_folder() as folder:
        yield folder


def _lab_or_skip(network):
    if problem := _lab.problem():
        # Where continuous integration gives root, a lab that cannot be had is a mistake.
        (pytest.fail if os.environ.get("LAB_REQUIRED") == "1" else pytest.skip)(problem)
    with _fresh_folder() as folder, _lab.opened(folder, 3, network) as lab:
        yield lab


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
