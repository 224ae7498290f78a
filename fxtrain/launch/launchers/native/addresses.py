"""The address and interface by which other machines reach this one."""

import socket
import struct
import sys
from pathlib import Path

import attrs

from fxtrain._listen import is_loopback

__all__ = ["GLOO", "NCCL", "Route", "find_route", "interface_of", "loopback_route"]

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
# Of Linux, and of macOS and the BSDs.
_LOOPBACKS = ("lo", "lo0")

_ADDRESS_OF = 0x8915  # SIOCGIFADDR, see netdevice(7)


@attrs.frozen(kw_only=True)
class Route:
    """How other ranks reach this machine; empty if its own name resolves correctly.

    Attributes:
        address: An address of this machine.
        interface: The name of the network interface that has it.
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
    """The address of this machine, if its own name does not resolve to it.

    Nodes that connect through a loopback address are all on this machine, and use loopback only.
    Otherwise torch and gloo send other machines the address of the host name, which /etc/hosts maps
    to a loopback address on many machines.

    Args:
        towards: Host name or address of the main machine, which may be this one.
        port: TCP port there.
        local: Address of this machine, if the user gave one.

    Effects:
        Resolves names; sends nothing to `towards`.
    """
    if is_loopback(towards):
        return loopback_route()
    if not local and not _leads_nowhere(_first_address(socket.gethostname())):
        return Route()
    address = _first_address(local) if local else _towards(towards, port)
    if _leads_nowhere(address):
        return Route()
    return Route(address=local or address, interface=interface_of(address))


def _towards(host: str, port: int) -> str:
    """The address from which this machine sends to another; empty if it cannot."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # a datagram socket only chooses its own address
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _first_address(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name.strip("[]"), None)[0][4][0])
    except OSError:
        return ""


def loopback_route() -> Route:
    """The route between ranks of one machine, unreachable for other machines."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    found = next((name for name in _LOOPBACKS if name in names), "")
    return Route(address="127.0.0.1", interface=found)


def _leads_nowhere(address: str) -> bool:
    """Whether it is empty, or an address that other machines resolve to themselves."""
    return not address or is_loopback(address)


def interface_of(address: str) -> str:
    """The interface with an address, where Linux can be asked; empty for none."""
    if sys.platform != "linux":
        return ""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        table = Path("/proc/net/if_inet6")
        rows = table.read_text().splitlines() if table.is_file() else []
        return next((row.split()[-1] for row in rows if row.startswith(wanted)), "")
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                told = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, asked)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    return ""
