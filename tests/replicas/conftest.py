"""A lighthouse of torchft, which soon notices a replica that is gone."""

import os

import pytest

from tests._patience import patience


@pytest.fixture(scope="session")
def torchft():
    # Read when it is imported, and more than pytest's output of a failed test needs.
    os.environ.setdefault("RUST_LOG", "error")
    return pytest.importorskip("torchft", reason="torchft is not installed")


@pytest.fixture
def lighthouse(torchft, monkeypatch):
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=int(10_000 * patience()),
        quorum_tick_ms=10,
        heartbeat_timeout_ms=int(500 * patience()),
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()
