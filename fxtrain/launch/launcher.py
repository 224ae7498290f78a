"""The launcher record: the functions by which one launcher starts ranks."""

from collections.abc import Callable

import attrs

from fxtrain.launch.invocation import Invocation
from fxtrain.launch.machine import Machine
from fxtrain.launch.outcome import LaunchResult
from fxtrain.launch.process import run_program
from fxtrain.launch.spec import LaunchSpec

__all__ = ["COMMON", "PER_NODE", "RENDEZVOUS_FIELDS", "Launcher"]

# Fields of a spec, by name: those that every launcher honours, ...
COMMON = frozenset(
    ("target", "args", "ranks", "module", "executable", "launcher", "options", "nodes", "env",
     "cpu", "gpus", "threads")
)  # fmt: skip
# ... where the ranks meet, and what torch's elastic launcher does on each node.
RENDEZVOUS_FIELDS = ("main_address", "main_port")
PER_NODE = (
    "connect_timeout_s", "monitor_interval_s", "shutdown_s", "role", "log_dir", "redirect", "tee",
    "show_ranks", "bind", "restarts",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Launcher:
    """How one launcher starts ranks: functions of a spec, no state.

    A package adds one by an entry point in the group `fxtrain.launchers` that loads to it.

    Attributes:
        name: By which it is chosen.
        help: What it does, in one line.
        invocation: (spec, machine) → what to start; pure.
        run: (spec, invocation) → how it ended: starts the invocation and waits for its end.
        options: The record of options that only this launcher has, or None.
        uses: Fields of `LaunchSpec` beyond the common ones that it honours; another field
            that is set is an error.
        here: The program is on this machine, so that it can be looked for.
        needs: Facts of the machine that cost something to find out: mpi, port, hosts, and the
            route to the main address of several nodes.
    """

    name: str
    help: str
    invocation: Callable[[LaunchSpec, Machine], Invocation]
    run: Callable[[LaunchSpec, Invocation], LaunchResult] = run_program
    options: type | None = None
    uses: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    here: bool = True
    needs: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
