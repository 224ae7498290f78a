"""What to launch, as a value, and what follows from it: arguments and environment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from fxtrain._errors import LaunchError

__all__ = [
    "LaunchSpec",
    "check_ranks",
    "child_arguments",
    "child_environment",
    "elastic_options",
    "rank_environment",
]

_CHILD = Path(__file__).with_name("_child.py")


def check_ranks(ranks: Any, *, said: str) -> None:
    """Refuse what is not a number of ranks.

    Raises:
        LaunchError: `ranks` is not a whole number of at least 1.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise LaunchError(
            f"{said}: the number of ranks is a whole number of at least 1. "
            f"Use one per accelerator, or as many as the machine has cores to spare."
        )


def _positive(spec: "LaunchSpec", _: Any, value: Any) -> None:
    check_ranks(value, said=f"LaunchSpec(ranks={value!r})")


def _not_negative(spec: "LaunchSpec", _: Any, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LaunchError(
            f"LaunchSpec(restarts={value!r}): a whole number of restarts was expected, 0 for none."
        )


@attrs.frozen(kw_only=True)
class LaunchSpec:
    """A program to run on several ranks of this machine.

    Attributes:
        target: Path of a Python script, or the dotted name of a module.
        args: What the program finds after its name in `sys.argv`.
        ranks: Processes to start.
        module: `target` is a module, as after `python -m`.
        restarts: Times to start all ranks again after one has failed.

    Example:
        >>> from fxtrain.launch import LaunchSpec
        >>> LaunchSpec(target="train.py", args=("--lr", "0.1"), ranks=2).ranks
        2
    """

    target: str
    args: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    ranks: int = attrs.field(default=1, validator=_positive)
    module: bool = False
    restarts: int = attrs.field(default=0, validator=_not_negative)


def child_arguments(spec: LaunchSpec) -> tuple[str, ...]:
    """Arguments of the Python interpreter that becomes one rank.

    Output is unbuffered, so that lines of several ranks keep their order.
    """
    how = "module" if spec.module else "script"
    given = ("-u", str(_CHILD), how, spec.target, *spec.args)
    # The elastic launcher replaces ${local_rank} in arguments; a user's $ is only a $.
    return tuple(argument.replace("$", "$$") for argument in given)


def child_environment(spec: LaunchSpec, env: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """Variables to add for the ranks: the cores are shared out, unless the user chose.

    Args:
        spec: What is launched.
        env: The variables that are there; not changed.
        cores: Cores that this process may use.

    Example:
        >>> from fxtrain.launch import LaunchSpec, child_environment
        >>> child_environment(LaunchSpec(target="train.py", ranks=2), {}, cores=8)
        {'OMP_NUM_THREADS': '4'}
    """
    if "OMP_NUM_THREADS" in env:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // spec.ranks))}


def elastic_options(spec: LaunchSpec, *, run_id: str) -> dict[str, Any]:
    """Keyword arguments for `torch.distributed.launcher.api.LaunchConfig`.

    The launcher serves the store at a port that the system chooses on loopback, so that
    several launches on one machine do not meet, and no port is free only until it is used.
    """
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": spec.ranks,
        "run_id": run_id,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
        "max_restarts": spec.restarts,
        "monitor_interval": 0.1,
    }


def rank_environment(rank: int, ranks: int, *, port: int) -> dict[str, str]:
    """The variables by which a rank on this machine finds its place and the store.

    Example:
        >>> from fxtrain.launch import rank_environment
        >>> from fxtrain.state import read_topology
        >>> read_topology(rank_environment(1, 2, port=4711)).local_rank
        1
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store
    }
