"""Hypothesis profiles: the same examples every time in continuous integration."""

import os

from hypothesis import HealthCheck, Phase, settings

# Calls on real ranks cost milliseconds and shrinking would repeat them by the hundred.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
# For a search by hand: python -m pytest property_tests/test_topology.py --hypothesis-profile=long
settings.register_profile("long", settings.get_profile("default"), max_examples=5_000)
settings.load_profile("ci" if os.environ.get("CI") else "default")

NO_SHRINK = tuple(phase for phase in Phase if phase is not Phase.shrink)
settings.register_profile("ranks", settings.get_profile("default"), phases=NO_SHRINK)
