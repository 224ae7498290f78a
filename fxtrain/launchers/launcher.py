"""The launcher record: the functions by which one launcher starts ranks."""

from collections.abc import Callable

import attrs

from fxtrain.launchers.machine import Machine
from fxtrain.launchers.outcome import LaunchResult
from fxtrain.launchers.process import run_program
from fxtrain.launchers.spec import Invocation, LaunchSpec

# Fields of a spec that every launcher supports, ...
COMMON = frozenset(
    ("target", "args", "ranks", "module", "executable", "launcher", "options", "nodes", "env",
     "cpu", "gpus", "threads")
)  # fmt: skip
# ... and those for how ranks connect, and what torch's elastic launcher does on each node.
RENDEZVOUS_FIELDS = ("main_address", "main_port")
PER_NODE = (
    "connect_timeout_s", "monitor_interval_s", "shutdown_s", "role", "log_dir", "redirect", "tee",
    "show_ranks", "bind", "restarts",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class Launcher:
    """How one launcher starts ranks: functions of a spec, no state.

    A package adds one with an entry point in the group `fxtrain.launchers` that loads it.

    Attributes:
        name: The name to choose it by.
        help: A one-line description.
        invocation: (spec, machine) → what to start; pure.
        run: (spec, invocation) → how it ended: starts the invocation and waits for its end.
        options: The record of options that only this launcher has, or None.
        uses: Fields of `LaunchSpec` beyond the common ones that it supports; setting another
            field is an error.
        here: Whether the program is on this machine, so that it can be checked.
        needs: Facts of the machine that are expensive to find: mpi, port, and the route to
            the main address of several nodes.
    """

    name: str
    help: str
    invocation: Callable[[LaunchSpec, Machine], Invocation]
    run: Callable[[LaunchSpec, Invocation], LaunchResult] = run_program
    options: type | None = None
    uses: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    here: bool = True
    needs: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
