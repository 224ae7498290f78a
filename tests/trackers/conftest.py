"""What tests of trackers share."""

import logging

import pytest


@pytest.fixture
def told(caplog):
    """What the trackers warned of."""
    caplog.set_level(logging.WARNING, logger="fxtrain.trackers")
    return lambda: [record.getMessage() for record in caplog.records]
