"""The address and interface by which other machines reach this one."""

import collections
import socket
import sys

import attrs
import pytest

from fxtrain import _addresses
from fxtrain._addresses import (
    Route,
    find_route,
    free_port,
    interface_of,
    loopback_route,
)
from fxtrain.launchers import LaunchSpec, Machine
from fxtrain.launchers.built_in.native.elastic import native
from tests._errors import raises_code

FAR = Route(address="10.0.0.2", interface="eth3")
NODE = LaunchSpec(target="t.py", nodes=2, node_rank=1, main_address="10.0.0.1")


@pytest.fixture
def machine(monkeypatch):
    """`machine(name=..., towards=..., own=...)`: another machine than this one."""

    def be(name=None, *, towards=None, own=None):
        if name is not None:
            monkeypatch.setattr(socket, "gethostname", lambda: name)
        if towards is not None:  # which address of its own it has towards a host
            monkeypatch.setattr(_addresses, "_towards", lambda host, port: towards[host])
            interfaces = {"lo": "127.0.0.1", **own}
            monkeypatch.setattr(_addresses, "_interfaces", lambda: interfaces)

    return be


def test_the_way_to_the_main_address_counts(machine):
    """Not the host name."""
    machine("203.0.113.9", towards={"10.0.0.1": "10.0.0.2"}, own={"eth3": "10.0.0.2"})
    assert find_route("10.0.0.1", 29500) == FAR


@pytest.mark.parametrize(
    ("own", "default", "expected"),
    [
        ({"eth3": "10.0.0.2"}, "", FAR),
        ({"eth3": "10.0.0.2", "docker0": "172.17.0.1"}, "10.0.0.2", FAR),
        ({}, "", loopback_route()),
    ],
)
def test_a_main_name_of_loopback(machine, own, default, expected):
    """As Debian's /etc/hosts has it on the main machine itself."""
    machine(towards={"203.0.113.1": default, "n0": "127.0.1.1"}, own=own)
    assert find_route("n0", 29500) == expected


def test_several_networks_behind_a_main_name_of_loopback(machine):
    own = {"eth0": "10.0.0.2", "ib0": "10.1.0.2"}
    machine(towards=collections.defaultdict(lambda: "127.0.1.1"), own=own)
    with raises_code("FX701", "eth0", "ib0"):
        find_route("n0", 29500)


@pytest.mark.parametrize("towards", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("name", ["203.0.113.9", "localhost"])
def test_nodes_that_meet_on_loopback_use_it_alone(towards, name, machine):
    machine(name)
    found = find_route(towards, 29500)
    assert found == loopback_route()
    assert set(found.env) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


def test_a_machine_without_a_way_needs_nothing(machine):
    machine("localhost")
    assert find_route("no-such-host.invalid", 29500) == Route()
    assert find_route("10.0.0.1", 29500, local="127.0.0.1") == Route()


def test_an_address_that_is_given_counts(machine):
    machine("localhost")
    found = find_route("no-such-host.invalid", 29500, local="203.0.113.9")
    assert found == Route(address="203.0.113.9")  # no interface of this machine has it


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked")
def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == interface_of("2001:db8::9") == ""


def test_torch_and_gloo_are_told():
    found = native(NODE, Machine(threads_chosen=True, route=FAR))
    assert found.env == {"GLOO_SOCKET_IFNAME": "eth3"}
    assert "--local-addr=10.0.0.2" in found.argv


def test_what_the_user_chose_stays():
    chosen = Machine(threads_chosen=True, chosen=("GLOO_SOCKET_IFNAME",), route=FAR)
    assert native(NODE, chosen).env == {}
    said = attrs.evolve(NODE, env=("GLOO_SOCKET_IFNAME=ib0",), local_address="n1")
    found = native(said, Machine(threads_chosen=True, route=FAR))
    assert found.env == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert "--local-addr=n1" in found.argv


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces have other names")
@pytest.mark.parametrize("chosen", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_ranks_of_one_machine_stay_on_loopback(chosen):
    here = LaunchSpec(target="t.py", ranks=2, threads=1)
    found = native(here, Machine(route=loopback_route()))
    assert found.env["GLOO_SOCKET_IFNAME"] == found.env["NCCL_SOCKET_IFNAME"] == "lo"
    assert chosen not in native(here, Machine(route=loopback_route(), chosen=(chosen,))).env


def test_a_free_port_is_in_use_by_nobody(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        free = free_port()
        monkeypatch.setattr(_addresses, "_UNASSIGNED_PORTS", [taken.getsockname()[1], free])
        assert {free_port() for _ in range(20)} == {free}
        with socket.create_server(("127.0.0.1", free)), pytest.raises(OSError):
            free_port()
