"""Hypothesis profiles: the same examples every time in continuous integration."""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

# Failures are kept for the next run, but not where the checkout is read-only.
_KEPT = {} if os.access(".", os.W_OK) else {"database": None}

# Calls on real ranks cost milliseconds and shrinking would repeat them by the hundred.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
    **_KEPT,
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
# For a search by hand: python -m pytest property_tests/test_topology.py --hypothesis-profile=long
settings.register_profile("long", settings.get_profile("default"), max_examples=5_000)
settings.load_profile("ci" if os.environ.get("CI") else "default")

NO_SHRINK = tuple(phase for phase in Phase if phase is not Phase.shrink)
settings.register_profile("ranks", settings.get_profile("default"), phases=NO_SHRINK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place for one damaged file after another, shared by the tests of a module."""
    return tmp_path_factory.mktemp("damaged")
