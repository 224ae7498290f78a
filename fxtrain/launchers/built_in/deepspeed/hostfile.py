"""DeepSpeed's launcher: from a hostfile and its filters to a command line."""

import base64
import json
import re
import shlex
from collections.abc import Mapping

from fxtrain.errors import LaunchError

Hosts = dict[str, tuple[int, ...]]  # name of a machine to the slots in use, in order

# No machine has 10,000 slots: they are listed one by one.
_LINE = re.compile(r"(\S{1,255})\s+slots=(\d{1,4})(?:\s.*)?")
_SHOWN = 200  # characters of a line
_FAN_OUT = 1024  # as in DeepSpeed's runner


def read_hosts(text: str, what: str = "the hostfile") -> Hosts:
    """Machines and their slots from the text of a hostfile.

    Args:
        text: Lines such as `worker-0 slots=8`; empty lines and comments after # are ignored.
        what: Its name in messages.

    Raises:
        LaunchError: a line is invalid, a name appears twice, or there is none.

    Example:
        >>> from fxtrain.launchers.built_in.deepspeed.hostfile import read_hosts
        >>> read_hosts("a slots=2\\nb slots=1  # the small one")
        {'a': (0, 1), 'b': (0,)}
    """
    hosts: Hosts = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = _LINE.fullmatch(words)
        if found is None or found[1] in hosts:
            problem = (
                "not a machine and its slots" if found is None else f"{found[1]} appears twice"
            )
            raise LaunchError(
                f"Line {number} of {what} is {line.strip()[:_SHOWN]!r}: {problem}. Write one "
                f"line per machine, its name and its slots: `worker-0 slots=8`."
            )
        hosts[found[1]] = tuple(range(int(found[2])))
    if not hosts:
        raise LaunchError(f"No machine in {what}. Add lines such as: worker-0 slots=8")
    return hosts


def filter_hosts(
    hosts: Mapping[str, tuple[int, ...]], include: str = "", exclude: str = ""
) -> Hosts:
    """The machines that remain after the filters, in the order of the hostfile.

    Args:
        hosts: Machines and slots.
        include: Only these, `worker-0@worker-1:0,2`: all slots of one, two of the other.
        exclude: All but these.

    Raises:
        LaunchError: both filters are given, they name unknown machines, or nothing remains.

    Example:
        >>> from fxtrain.launchers.built_in.deepspeed.hostfile import filter_hosts
        >>> filter_hosts({"a": (0, 1), "b": (0, 1)}, exclude="a@b:0")
        {'b': (1,)}
    """
    if include and exclude:
        raise LaunchError(
            f"include={include!r} and exclude={exclude!r} cannot be combined. Use one of them."
        )
    named = {host: _slots(host, slots, hosts) for host, slots in _parts(include or exclude)}
    left: Hosts = {}
    for host, slots in hosts.items():
        if include:
            left[host] = named.get(host, ())
        else:
            left[host] = tuple(slot for slot in slots if slot not in named.get(host, ()))
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise LaunchError(f"include={include!r}, exclude={exclude!r} leave no slot to run on.")
    return left


def deepspeed_argv(
    hosts: Mapping[str, tuple[int, ...]],
    command: tuple[str, ...],
    *,
    folder: str,
    python: str = "python3",
    main_address: str = "",
    main_port: int = 29500,
    exports: Mapping[str, str] | None = None,
    module: bool = False,
    executable: bool = False,
    ssh_port: int | None = None,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command line that starts every rank over pdsh and ssh, and its own environment.

    Each machine runs `deepspeed.launcher.launch`, which sets the variables that `detect`
    reads and starts one process per slot.

    Args:
        hosts: Machines and the slots to use.
        command: The script or module, and its arguments.
        folder: Working folder on every machine.
        python: The interpreter there.
        main_address: Where ranks connect; by default the first machine.
        main_port: The port there.
        exports: Variables for the ranks.
        module: Whether the first word of the command is a module.
        executable: Whether the first word of the command is a program to start without Python.
        ssh_port: Port of ssh; by default as ssh is configured.

    Returns:
        The command line, and variables for pdsh.

    Raises:
        LaunchError: there is no machine or nothing to run.

    Example:
        >>> from fxtrain.launchers.built_in.deepspeed.hostfile import deepspeed_argv
        >>> argv, env = deepspeed_argv({"a": (0,)}, ("train.py",), folder="/work")
        >>> argv[:6], env
        (('pdsh', '-S', '-f', '1024', '-w', 'a'), {'PDSH_RCMD_TYPE': 'ssh'})
    """
    if not hosts or not command:
        raise LaunchError(
            f"DeepSpeed's launcher needs machines and a script: found {len(hosts)} machines and "
            f"{len(command)} words of a command."
        )
    variables = (exports or {}).items()
    environment = {"PDSH_RCMD_TYPE": "ssh"}
    if ssh_port is not None:
        environment["PDSH_SSH_ARGS_APPEND"] = f"-p {ssh_port}"
    argv = (
        *("pdsh", "-S", "-f", str(_FAN_OUT), "-w", ",".join(hosts)),
        "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables),
        f"cd {shlex.quote(folder)};",
        *(shlex.quote(python), "-u", "-m", "deepspeed.launcher.launch"),
        world_info(hosts),
        "--node_rank=%n",
        f"--master_addr={main_address or next(iter(hosts))}",
        f"--master_port={main_port}",
        *(("--module",) if module else ()),
        *(("--no_python",) if executable else ()),
        "--no_local_rank",
        *map(shlex.quote, command),  # the remote shell splits them again
    )
    return argv, environment


def world_info(hosts: Mapping[str, tuple[int, ...]]) -> str:
    """Machines and slots, encoded for `deepspeed.launcher.launch`."""
    slots = json.dumps({host: list(used) for host, used in hosts.items()})
    return f"--world_info={base64.urlsafe_b64encode(slots.encode()).decode()}"


def _parts(text: str) -> list[tuple[str, tuple[int, ...] | None]]:
    found: list[tuple[str, tuple[int, ...] | None]] = []
    for part in filter(None, text.split("@")):
        host, colon, slots = part.partition(":")
        if not colon:
            found.append((host, None))
        elif re.fullmatch(r"\d+(,\d+)*", slots):
            found.append((host, tuple(sorted({int(slot) for slot in slots.split(",")}))))
        else:
            raise LaunchError(
                f"{part!r} is not a valid filter. Write a machine, or a machine and its "
                f"slots: worker-1:0,2"
            )
    return found


def _slots(
    host: str, slots: tuple[int, ...] | None, hosts: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    if host not in hosts:
        raise LaunchError(f"The filter names {host!r}, but the hostfile has {', '.join(hosts)}.")
    unknown = [str(slot) for slot in slots or () if slot not in hosts[host]]
    if unknown:
        raise LaunchError(
            f"The filter names slots {', '.join(unknown)} of {host!r}, which has "
            f"{len(hosts[host])} slots, numbered from 0."
        )
    return hosts[host] if slots is None else slots
