"""Can the nodes of a launch meet? Asked before torch waits for it, to say what was tried."""

import errno
import socket
import time

from fxtrain._errors import LaunchError
from fxtrain._listen import listen

__all__ = ["is_local", "reach", "serve"]

_ONE_TRY_S = 5.0
_PAUSE_S = 0.5


def reach(address: str, port: int, *, who: str, timeout_s: float) -> None:
    """Wait until somebody listens at the main address.

    The node that serves it may start later than this one.

    Args:
        address: Host name or address.
        port: TCP port.
        who: This node, for the message.
        timeout_s: How long to try.

    Effects:
        Opens connections, and closes the first that stands.

    Raises:
        LaunchError: nobody did; says what was tried, how often and for how long.
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
                f"{who} could not reach the main address {address}:{port}: tried {tries} times "
                f"in {time.monotonic() - start:.0f} s, and at last {last}. Check that node 0 "
                f"was started with the same main address and port, and that no firewall is "
                f"between; or allow more time with connect_timeout_s."
            )
        time.sleep(_PAUSE_S)


def serve(address: str, port: int) -> socket.socket:
    """Listen at the address where the ranks or nodes meet.

    Args:
        address: Host name or address that they connect to.
        port: TCP port; 0 for one that the system picks.

    Raises:
        LaunchError: another program has the port, or the user may not.
    """
    try:
        return listen(address.strip("[]"), port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"Port {port} of this machine is taken by another program, so the ranks "
                f"cannot meet there. Choose another main_port, the same on every node, or "
                f"see who has it with: ss -ltnp 'sport = :{port}'"
            ) from error
        raise LaunchError(f"Port {port} cannot be served here: {error.strerror}.") from error


def is_local(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in found)


def _can_bind(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


def _why(address: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {address} was not known ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "nothing answered"
    return "the connection failed: " + (error.strerror or str(error)).lower()
