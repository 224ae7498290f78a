"""What properties share; `conftest.py` in the root has the profiles of Hypothesis."""

import pytest
from hypothesis import Phase

# Calls on real ranks cost milliseconds and shrinking would repeat them by the hundred.
NO_SHRINK = tuple(phase for phase in Phase if phase is not Phase.shrink)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place for one damaged file after another, shared by the tests of a module."""
    return tmp_path_factory.mktemp("damaged")
