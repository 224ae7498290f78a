"""What tests of trackers share."""

import logging

import pytest

import fxtrain as fx


@pytest.fixture
def ctx():
    with fx.detect(env={}, device="cpu") as found:
        yield found


@pytest.fixture
def told(caplog):
    """What the trackers warned of."""
    caplog.set_level(logging.WARNING, logger="fxtrain.trackers")
    return lambda: [record.getMessage() for record in caplog.records]
