"""Several nodes with a network of their own each: namespaces, where this machine lets us."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from tests.launched._run import FXTRAIN, SCRIPTS, finish, start
from tests.launched._sockets import addresses_of

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(120)]
RANKS = str(SCRIPTS / "ranks.py")
NAMES = ("fxtrain-a", "fxtrain-b")
ADDRESSES = ("10.77.31.1", "10.77.31.2")


def _ip(*words):
    return subprocess.run(("ip", *words), capture_output=True, text=True, check=False, timeout=20)


def _well(*words):
    done = _ip(*words)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def network():
    """Two namespaces, and a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("namespaces need root and iproute2")
    if (made := _ip("netns", "add", NAMES[0])).returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        _well("netns", "add", NAMES[1])
        _well(
            *("link", "add", "fxa", "netns", NAMES[0], "type", "veth"),
            *("peer", "name", "fxb", "netns", NAMES[1]),
        )
        for name, address, link in zip(NAMES, ADDRESSES, ("fxa", "fxb"), strict=True):
            _well("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _well("-n", name, "link", "set", "lo", "up")
            _well("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in NAMES:
            _ip("netns", "delete", name)


def _node(number, *words, wait_s=60):
    """The launcher of one node with two ranks, in its namespace."""
    return start(
        "ip", "netns", "exec", NAMES[number], *FXTRAIN, "launch", "--cpu", "--ranks=2",
        "--nodes=2", f"--node-rank={number}", f"--main-address={ADDRESSES[0]}",
        f"--connect-timeout={wait_s}", *words,
    )  # fmt: skip


def test_nodes_meet_over_their_network(network):
    """Whatever /etc/hosts says of the machine's own name."""
    nodes = [_node(number, RANKS, "meet", "GLOO_SOCKET_IFNAME") for number in (1, 0)]
    late, first = (finish(node, timeout_s=100) for node in nodes)
    assert (first.code, late.code) == (0, 0), first.err + late.err
    told = json.loads(first.out)
    assert told["places"] == [[0, 0, 0, 2], [1, 1, 0, 2], [2, 0, 1, 2], [3, 1, 1, 2]]
    assert told["total"] == 10.0


def _held(process, ranks):
    """Where a launcher and its ranks listen, once the ranks are connected."""
    pids = [process.pid, *(int(process.stdout.readline()) for _ in range(ranks))]
    return [addresses_of(pid) for pid in pids]


def _stop(*processes):
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        finish(process, timeout_s=60)


def test_nodes_listen_at_the_addresses_of_their_network_only(network):
    nodes = [_node(number, RANKS, "hold") for number in (0, 1)]
    found = [_held(node, 2) for node in nodes]
    _stop(*nodes)
    for (launcher, *ranks), address, number in zip(found, ADDRESSES, (0, 1), strict=True):
        assert set(launcher) == ({address} if number == 0 else set())  # the store
        assert [set(rank) for rank in ranks] == [{address}] * 2


def test_one_machine_listens_on_loopback_whatever_its_name_is(network):
    """gloo listens at the address of the machine's name, unless it is told."""
    named = ("unshare", "--uts", "sh", "-c", f'hostname {ADDRESSES[0]} && exec "$@"', "sh")
    words = ("launch", "--cpu", "--ranks=2", RANKS, "hold")
    process = start(*named, "ip", "netns", "exec", NAMES[0], *FXTRAIN, *words)
    found = _held(process, 2)
    _stop(process)
    assert [set(addresses) for addresses in found] == [{"127.0.0.1"}] * 3


def test_a_cut_cable_is_told_with_what_was_tried(network):
    _well("-n", NAMES[0], "link", "set", "fxa", "down")
    try:
        ended = finish(_node(1, RANKS, "meet", "A", wait_s=2), timeout_s=60)
    finally:
        _well("-n", NAMES[0], "link", "set", "fxa", "up")
    assert ended.code == 2
    assert ended.err.startswith(
        "fxtrain launch: LaunchError: Node 1 of 2 could not reach the main address "
        f"{ADDRESSES[0]}:29500 (attempts: "
    )
    assert ended.err.count("\n") == 1
