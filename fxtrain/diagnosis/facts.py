"""Facts that each rank gathers about itself, and problems between ranks."""

import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fxtrain import __version__

# What must agree, since otherwise ranks run different code, and what to do if it does not.
_MUST_MATCH = {
    **dict.fromkeys(
        ("python", "fxtrain", "torch", "CUDA", "NCCL"), "Install the same version everywhere."
    ),
    "device": "Give each node the same devices, or set launch.cpu.",
}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# With larger differences between nodes, logs, file times and certificates are unreliable.
_MAX_CLOCK_SKEW_S = 1.0


def facts_here(env: Mapping[str, str], torch: Any) -> dict[str, Any]:
    """Plain data about this process and its machine.

    Effects:
        Resolves the machine's own name.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "fxtrain": __version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        "interfaces": interfaces,
        "asked": {name: env[name] for name in _INTERFACES if env.get(name)},
        "own_address": _own_address(),
        "device": str(torch.accelerator.current_accelerator(check_available=True) or "cpu"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "time": time.time(),
    }


def fact_problems(facts: Sequence[Mapping[str, Any]], *, nodes: int) -> list[str]:
    """Incompatibilities between ranks, as text.

    Args:
        facts: By rank, from `facts_here`.
        nodes: Number of machines.
    """
    problems: list[str] = []
    for name, advice in _MUST_MATCH.items():
        hosts: dict[str, set[str]] = {}
        for fact in facts:
            hosts.setdefault(str(fact.get(name, "")), set()).add(str(fact["host"]))
        if len(hosts) > 1:
            values = [f"{value or 'none'} on {_list(hosts[value])}" for value in sorted(hosts)]
            problems.append(f"{name} differs: {', '.join(values)}. {advice}")
    for fact in {str(fact["host"]): fact for fact in facts}.values():
        problems += _interface_problems(fact)
        named = bool(fact.get("asked", {}).get("GLOO_SOCKET_IFNAME"))  # gloo then uses that
        if nodes > 1 and not named and str(fact.get("own_address", "")).startswith("127."):
            problems.append(
                f"{fact['host']} resolves its own name to {fact['own_address']}, where other nodes "
                f"cannot reach it. Set launch.local_address, or correct /etc/hosts."
            )
    return problems


def clock_problems(times: Sequence[float], hosts: Sequence[str]) -> list[str]:
    """Hosts whose clocks differ, from times that were read at the same moment."""
    problems: list[str] = []
    for host, ahead in {host: at - times[0] for host, at in zip(hosts, times, strict=True)}.items():
        if abs(ahead) > _MAX_CLOCK_SKEW_S:
            word = "ahead of" if ahead > 0 else "behind"
            problems.append(
                f"The clock of {host} is {abs(ahead):.1f} s {word} {hosts[0]}. Set the time by NTP "
                f"(timedatectl)."
            )
    return problems


def _interface_problems(fact: Mapping[str, Any]) -> list[str]:
    """Interfaces that a variable names and the machine does not have."""
    there = [str(name) for name in fact.get("interfaces", ())]
    problems: list[str] = []
    for variable, asked in dict(fact.get("asked", {})).items():
        wanted = [name.partition(":")[0] for name in asked.lstrip("=").split(",")]
        # NCCL accepts prefixes, and ^ to exclude; gloo accepts full names.
        exact = asked.startswith("=") or not variable.startswith("NCCL")
        if asked.startswith("^") or any(
            name == interface if exact else name.startswith(interface)
            for interface in wanted
            for name in there
        ):
            continue
        problems.append(
            f"{variable}={asked} on {fact['host']}: no such interface. Available: "
            f"{', '.join(there)}."
        )
    return problems


def _list(hosts: set[str]) -> str:
    shown = sorted(hosts)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
