"""What to launch, and what each rank's process is told: pure functions."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from fxtrain._errors import LaunchError

__all__ = ["LaunchSpec", "command", "rank_variables", "shared_variables"]


@attrs.frozen(kw_only=True)
class LaunchSpec:
    """Ranks of one script on one machine.

    Attributes:
        target: Path of a script, or name of a module.
        args: Its arguments.
        ranks: Processes to start.
        is_module: The target is a module, as for `python -m`.
        restarts: Times that all ranks are started anew after a failure.
    """

    target: str
    args: tuple[str, ...] = ()
    ranks: int = 1
    is_module: bool = False
    restarts: int = 0


def command(spec: LaunchSpec) -> tuple[str, ...]:
    """Arguments for the Python interpreter of each rank.

    Raises:
        LaunchError: the script is not there, or the ranks are not a positive number.

    Example:
        >>> from fxtrain.launch import LaunchSpec, command
        >>> command(LaunchSpec(target="app.train", args=("--lr", "1"), is_module=True))
        ('-u', '-m', 'app.train', '--lr', '1')
    """
    if spec.ranks < 1:
        raise LaunchError(f"--ranks {spec.ranks}: start at least one rank.")
    if spec.is_module:
        return ("-u", "-m", spec.target, *spec.args)
    path = Path(spec.target)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        names = [str(found) for found in sorted(folder.glob("*.py"))]
        near = difflib.get_close_matches(str(path), names, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise LaunchError(f"There is no script {spec.target!r}.{hint}")
    return ("-u", spec.target, *spec.args)


def shared_variables(env: Mapping[str, str], ranks: int, cores: int) -> dict[str, str]:
    """Variables that every rank gets beside its parent's.

    Ranks share the cores: without a limit each would start a thread per core.

    Example:
        >>> from fxtrain.launch import shared_variables
        >>> shared_variables({}, ranks=2, cores=8)
        {'OMP_NUM_THREADS': '4'}
    """
    return {} if "OMP_NUM_THREADS" in env else {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The place of one rank among ranks on this machine, as `detect` reads it."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def tail(lines: Sequence[str], most: int = 60) -> str:
    """The last lines of a long output."""
    cut = [f"... {len(lines) - most} lines before"] if len(lines) > most else []
    return "\n".join([*cut, *lines[-most:]])
