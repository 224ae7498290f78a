"""Addresses of this machine, and sockets that listen at one of them."""

import contextlib
import errno
import ipaddress
import random
import socket
import struct
import sys
from pathlib import Path

import attrs

from fxtrain.errors import ContextError

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
# Of Linux, and of macOS and the BSDs.
_LOOPBACKS = ("lo", "lo0")

# Reserved for documentation: the way there is the default route, and nothing is sent.
_ELSEWHERE = "203.0.113.1"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR, see netdevice(7)
_UNASSIGNED_PORTS = range(20_000, 32_768)
_BACKLOG = 2048  # connections not yet accepted; torch's own number


@attrs.frozen(kw_only=True)
class Route:
    """How other ranks reach this machine: its address, and the network interface that has it.

    Empty if its own name resolves correctly.
    """

    address: str = ""
    interface: str = ""

    @property
    def env(self) -> dict[str, str]:
        """Variables that make gloo and NCCL use the interface, if there is one to name.

        NCCL finds the interface to other machines by itself. On a single machine it would listen
        there too, although it only needs loopback.
        """
        if not self.interface:
            return {}
        names = (GLOO, NCCL) if is_loopback(self.address) else (GLOO,)
        return dict.fromkeys(names, self.interface)


def find_route(towards: str, port: int, *, local: str = "") -> Route:
    """The address and interface of this machine towards the main one, to which it sends nothing.

    Nodes that connect through a loopback address are all on this machine, and use loopback only.
    gloo would use the address of the host name, which /etc/hosts maps to loopback, or to another
    network, on many machines. `local` is an address of this machine that the user gave. Empty if
    `towards` is not known here. A main machine whose name is that of loopback here, and which has
    several networks, is a ContextError.
    """
    if is_loopback(towards):
        return loopback_route()
    if local:
        try:
            address = str(socket.getaddrinfo(local.strip("[]"), None)[0][4][0])
        except OSError:
            return Route()
        here = Route(address=local, interface=interface_of(address))
        return Route() if is_loopback(address) else here
    address = _towards(towards, port)
    if is_loopback(address):
        address = _own_address(towards)
        if not address:
            return loopback_route()
    return Route(address=address, interface=interface_of(address))


def _own_address(name: str) -> str:
    """The address by which others reach this machine, whose name is that of loopback here.

    Empty if it has no network.
    """
    own = {place: at for place, at in _interfaces().items() if not is_loopback(at)}
    if len(own) < 2:
        return next(iter(own.values()), "")
    default = _towards(_ELSEWHERE, 9)
    if default in own.values():
        return default
    listed = ", ".join(f"{at} ({place})" for place, at in sorted(own.items()))
    raise ContextError(
        f"The main address {name} is a loopback address on this machine, by its /etc/hosts, and "
        f"the machine has several networks: {listed}. Name the one that leads to the other "
        f"machines by --local-address, or by the variable {GLOO}.",
        code="FX701",
    )


def _towards(host: str, port: int) -> str:
    """The address from which this machine sends to another; empty if it cannot."""
    try:
        places = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = places[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # a datagram socket only chooses its own address
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def loopback_route() -> Route:
    """The route between ranks of one machine, unreachable for other machines."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    name = next((name for name in _LOOPBACKS if name in names), "")
    return Route(address="127.0.0.1", interface=name)


def interface_of(address: str) -> str:
    """The interface with an address, where Linux can be asked; empty for none."""
    if sys.platform != "linux":
        return ""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        table = Path("/proc/net/if_inet6")
        rows = table.read_text().splitlines() if table.is_file() else []
        return next((row.split()[-1] for row in rows if row.startswith(wanted)), "")
    return next((name for name, at in _interfaces().items() if at == address), "")


def addresses_of(interfaces: str) -> list[str]:
    """The addresses of interfaces between commas, where Linux can be asked."""
    addresses = _interfaces()
    return [addresses[name] for name in interfaces.split(",") if name in addresses]


def _interfaces() -> dict[str, str]:
    """IPv4 addresses by interface, where Linux can be asked."""
    if sys.platform != "linux":
        return {}
    import fcntl  # not on every system

    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            # An interface may have no address.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, asked)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def is_loopback(address: str) -> bool:
    """Whether an address, as written, always means the machine that uses it.

    A host name that happens to resolve to a loopback address here means this machine's own
    name on many systems, and resolves to another address elsewhere.

    Example:
        >>> from fxtrain._addresses import is_loopback
        >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("node7")
        (True, True, False)
    """
    name = address.strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def is_local(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        addresses = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, place in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(place)
            return True
    return False


def free_port() -> int:
    """A TCP port on loopback that is not in use, and that the system gives to no other program.

    Systems choose ports above 32,767 for connections and for programs that listen at port 0.
    Another program could therefore get such a port before the caller of this function listens at
    it.

    Raises:
        OSError: all 12,768 ports are in use.
    """
    ports = random.SystemRandom().sample(_UNASSIGNED_PORTS, len(_UNASSIGNED_PORTS))
    for port in ports[:-1]:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", ports[-1])):
        return ports[-1]


def listen(address: str, port: int) -> socket.socket:
    """Listen at the address of this machine to which others connect; port 0 chooses a free one.

    The socket is bound to `address` alone if that is an address of this machine. Otherwise (the
    name resolves to a loopback address here, or the address is forwarded to this machine) it is
    bound to every interface, since the one that others use is unknown.

    Example:
        >>> from fxtrain._addresses import listen
        >>> with listen("localhost", 0) as listener:
        ...     listener.getsockname()[0]
        '127.0.0.1'
    """
    for family, place in _candidate_addresses(address, port):
        try:
            return socket.create_server(place, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=_BACKLOG)
    return socket.create_server(
        ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
    )


def _candidate_addresses(
    address: str, port: int
) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Addresses to try; IPv4 first, which every node of a mixed network has."""
    name = "127.0.0.1" if address == "localhost" else address.strip("[]")
    try:
        entries = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    places = [(family, place) for family, _, _, _, place in entries]
    if not is_loopback(name) and any(is_loopback(str(place[0])) for _, place in places):
        return []
    return sorted(places, key=lambda pair: pair[0] != socket.AF_INET)
