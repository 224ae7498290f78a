"""Checks that the nodes of a launch can connect, before torch waits for that."""

import errno
import socket
import time

from fxtrain._addresses import listen
from fxtrain.errors import LaunchError

FAREWELL = "fxtrain farewell"  # the thread in which a launcher tells other nodes of its end
FAREWELL_S = 3.0  # for other nodes to ask the store why a rank has failed
_ONE_TRY_S = 5.0
_PAUSE_S = 0.5


def reach(address: str, port: int, *, who: str, timeout_s: float) -> None:
    """Wait until a process listens at the main address.

    The node that listens may start later than this one.

    Args:
        address: Host name or address.
        port: TCP port.
        who: This node, for the message.
        timeout_s: Maximum wait.

    Effects:
        Opens connections, and closes the first successful one.

    Raises:
        LaunchError: none listens; the message has the number of attempts and the time.
    """
    start, tries, last = time.monotonic(), 0, ""
    while True:
        left = timeout_s - (time.monotonic() - start)
        tries += 1
        try:
            with socket.create_connection((address, port), max(0.1, min(left, _ONE_TRY_S))):
                return
        except OSError as error:
            last = _why(address, error)
        if time.monotonic() - start + _PAUSE_S >= timeout_s:
            raise LaunchError(
                f"{who} could not reach the main address {address}:{port} (attempts: {tries}, over "
                f"{time.monotonic() - start:.0f} s; last error: {last}). Check that node 0 was "
                f"started with the same main address and port, and that no firewall blocks it, or "
                f"allow more time with connect_timeout_s.",
                code="FX701",
            )
        time.sleep(_PAUSE_S)


def serve(address: str, port: int) -> socket.socket:
    """Listen at the address to which ranks or nodes connect.

    Args:
        address: The host name or address.
        port: TCP port; 0 for one that the system chooses.

    Raises:
        LaunchError: the port is in use, or not permitted.
    """
    try:
        return listen(address.strip("[]"), port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"Port {port} of this machine is in use by another program, so the ranks cannot "
                f"connect through it. Choose another main_port, the same on every node, or find "
                f"that program with: ss -ltnp 'sport = :{port}'",
                code="FX701",
            ) from error
        raise LaunchError(
            f"Cannot listen on port {port}: {error.strerror}. Choose another main_port.",
            code="FX701",
        ) from error


def serve_nodes(address: str, port: int, *, who: str) -> socket.socket:
    """Listen at the main address of several nodes, as node 0.

    Args:
        address: Host name or address.
        port: TCP port.
        who: This node, for the message.

    Effects:
        Connects to the address once if this machine does not have it: it may be forwarded here.

    Raises:
        LaunchError: as `serve`, or the main address is another machine's.
    """
    door = serve(address, port)
    if is_local(address):
        return door
    try:
        socket.create_connection((address, port), _ONE_TRY_S).close()
    except OSError as error:
        door.close()
        raise LaunchError(
            f"{who} serves the main address {address}:{port}, which is none of this machine and "
            f"does not lead to it ({_why(address, error)}). Start node 0 on the machine that has "
            f"this address, or set the main address to one of this machine.",
            code="FX701",
        ) from error
    return door


def is_local(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        addresses = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in addresses)


def _can_bind(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


def _why(address: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {address} could not be resolved ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "no answer"
    return "the connection failed: " + (error.strerror or str(error)).lower()
