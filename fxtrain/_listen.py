"""Sockets that listen at one address of this machine, not at all of them."""

import errno
import ipaddress
import socket

_BACKLOG = 2048  # connections not yet accepted; torch's own number


def is_loopback(address: str) -> bool:
    """Whether an address, as written, always means the machine that uses it.

    A host name that happens to resolve to a loopback address here means this machine's own
    name on many systems, and resolves to another address elsewhere.

    Example:
        >>> from fxtrain._listen import is_loopback
        >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("node7")
        (True, True, False)
    """
    name = address.strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def free_port() -> int:
    """A TCP port on loopback that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listen(address: str, port: int) -> socket.socket:
    """Listen at the address by which others reach this machine.

    Args:
        address: Host name or address that the others connect to.
        port: TCP port; 0 for one that the system chooses.

    Returns:
        A listening socket. It is bound to `address` alone if that is an address of this machine.
        Otherwise (the name resolves to a loopback address here, or the address is forwarded to this
        machine) it is bound to every interface, since the one that others use is unknown.

    Raises:
        OSError: the port is in use, or not permitted.

    Example:
        >>> from fxtrain._listen import listen
        >>> with listen("localhost", 0) as door:
        ...     door.getsockname()[0]
        '127.0.0.1'
    """
    for family, place in _candidate_addresses(address, port):
        try:
            return _bound_socket(family, place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return _bound_socket(socket.AF_INET6, ("::", port))
    return _bound_socket(socket.AF_INET, ("", port))


def _candidate_addresses(
    address: str, port: int
) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Addresses to try; IPv4 first, which every node of a mixed network has."""
    name = "127.0.0.1" if address == "localhost" else address.strip("[]")
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    places = [(family, place) for family, _, _, _, place in found]
    if not is_loopback(name) and any(is_loopback(str(place[0])) for _, place in places):
        return []
    return sorted(places, key=lambda pair: pair[0] != socket.AF_INET)


def _bound_socket(family: int, place: tuple[object, ...]) -> socket.socket:
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and place[0] == "::":
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.bind(place)
        door.listen(_BACKLOG)
    except BaseException:
        door.close()
        raise
    return door
