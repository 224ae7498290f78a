"""At which addresses launchers and ranks listen: what other machines could reach."""

import json
import os
import signal
import socket
import sys

import pytest

from fxtrain import _addresses as addresses
from fxtrain.testing import free_port
from tests.launched._run import FXTRAIN, SCRIPTS, finish, run_fork, start
from tests.launched._sockets import addresses_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who listens where"),
]
RANKS = str(SCRIPTS / "ranks.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("--nodes=2", "--main-address=127.0.0.1", "--min-nodes=1", "--rendezvous=c10d")],
    ids=["one node", "c10d"],
)
def test_a_launcher_and_its_ranks_listen_on_loopback(words):
    if words:  # nodes that come and go, of which one is here
        wait = "--rendezvous-option=last_call_timeout=1"
        words = (*words, f"--main-port={free_port()}", wait, "--local-address=127.0.0.1")
    process = start(*FXTRAIN, "launch", "--cpu", "--ranks=2", *words, RANKS, "hold")
    pids = [int(process.stdout.readline()) for _ in range(2)]
    launcher, *ranks = [addresses_of(pid) for pid in (process.pid, *pids)]
    process.send_signal(signal.SIGTERM)
    assert finish(process, timeout_s=60).code == 128 + signal.SIGTERM
    assert launcher and all(ranks)  # a store, and gloo's sockets
    assert {*launcher, *ranks[0], *ranks[1]} == {"127.0.0.1"}


@pytest.mark.slow
def test_a_closed_context_leaves_no_sockets_and_threads():
    ended = run_fork(*FXTRAIN, "launch", "--cpu", "--ranks=2", str(SCRIPTS / "reopens.py"))
    assert ended.code == 0, ended
    files, threads = map(json.loads, ended.out.strip().replace("] [", "]\n[").splitlines())
    # What torch and fxtrain open once is open after the first.
    assert files[1:] == files[:1] * 3
    assert threads[1:] == threads[:1] * 3


def _addresses_here(ctx):
    return addresses_of(os.getpid())


def test_a_pool_listens_on_loopback(pair):
    main, other = pair.run(_addresses_here)
    assert set(main) == set(other) == {"127.0.0.1"}
    assert len(main) > len(other)  # the store


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "[::1]"])
def test_a_loopback_address_is_bound_alone(address):
    if "::1" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with addresses.listen(address, 0) as door:
        assert door.getsockname()[0] == ("::1" if "::1" in address else "127.0.0.1")


@pytest.mark.parametrize(
    ("found", "bound"),
    [
        (["127.0.1.1"], "every"),  # the machine's own name, by Debian's /etc/hosts
        (["10.0.0.1", "127.0.0.1"], "every"),
        (["203.0.113.9"], "every"),  # forwarded to this machine
        ([], "every"),
        (["203.0.113.9", "127.0.0.2"], "every"),
    ],
)
def test_a_name_that_does_not_tell_the_interface(found, bound, monkeypatch):
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    def look_up(*_, **__):
        if not rows:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return rows

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with addresses.listen("node7", 0) as door:
        assert door.getsockname()[0] in ("::", "0.0.0.0")


def test_a_port_in_use_is_an_error():
    with addresses.listen("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            addresses.listen("127.0.0.1", port)
