"""The fields of a spec as flags of `fxtrain launch`, in both directions."""

from typing import Any

import attrs

from fxtrain.launch.spec import LaunchSpec

__all__ = ["FLAGS", "Flag", "flag_words"]


@attrs.frozen(kw_only=True)
class Flag:
    """One option of `fxtrain launch`.

    Attributes:
        field: The field of `LaunchSpec` that it sets.
        flag: The word on the command line.
        help: What it does, in one line.
        metavar: What stands after it; empty for a switch.
        many: "" for one value, "," for several between commas, "again" for one each time.
    """

    field: str
    flag: str
    help: str
    metavar: str = ""
    many: str = ""


FLAGS: tuple[Flag, ...] = (
    Flag(field="launcher", flag="--launcher", metavar="NAME", help="who starts the ranks"),
    Flag(
        field="ranks", flag="--ranks", metavar="N",
        help="processes per node; one per accelerator by default, or one without any",
    ),
    Flag(field="nodes", flag="--nodes", metavar="M", help="machines that take part"),
    Flag(
        field="min_nodes", flag="--min-nodes", metavar="M",
        help="the fewest machines to run with; the run then grows and shrinks",
    ),
    Flag(
        field="node_rank", flag="--node-rank", metavar="K", help="number of this machine, from 0"
    ),
    Flag(
        field="main_address", flag="--main-address", metavar="HOST",
        help="where node 0 is, the same on every node",
    ),
    Flag(
        field="main_port", flag="--main-port", metavar="PORT",
        help="its TCP port; 29500 with several nodes",
    ),
    Flag(
        field="local_address", flag="--local-address", metavar="HOST",
        help="by which other nodes reach this one",
    ),
    Flag(
        field="rendezvous", flag="--rendezvous", metavar="KIND",
        help="static: nodes have numbers; c10d: any order, and again after a failure",
    ),
    Flag(
        field="rendezvous_options", flag="--rendezvous-option", metavar="KEY=VALUE", many="again",
        help="of torch's rendezvous",
    ),
    Flag(
        field="connect_timeout_s", flag="--connect-timeout", metavar="SECONDS",
        help="longest wait for the other nodes",
    ),
    Flag(field="run_id", flag="--run-id", metavar="NAME", help="what nodes of one run share"),
    Flag(
        field="restarts", flag="--restarts", metavar="N",
        help="times to start all ranks again after one has failed",
    ),
    Flag(
        field="monitor_interval_s", flag="--monitor-interval", metavar="SECONDS",
        help="between two looks at the ranks",
    ),
    Flag(
        field="shutdown_s", flag="--shutdown", metavar="SECONDS",
        help="time for ranks to end after a signal",
    ),
    Flag(field="role", flag="--role", metavar="NAME", help="name of the ranks in their log"),
    Flag(field="log_dir", flag="--log-dir", metavar="FOLDER", help="files of what ranks write"),
    Flag(
        field="redirect", flag="--redirect", metavar="STREAMS",
        help="out, err or both: to files only",
    ),
    Flag(
        field="tee", flag="--tee", metavar="STREAMS",
        help="out, err or both: to files and here, with the rank before each line",
    ),
    Flag(
        field="show_ranks", flag="--show-ranks", metavar="K,...", many=",",
        help="show the output of these ranks of a node only",
    ),
    Flag(field="cpu", flag="--cpu", help="hide the accelerators"),
    Flag(field="gpus", flag="--gpus", metavar="K,...", many=",", help="use these GPUs only"),
    Flag(
        field="bind", flag="--numa-binding", metavar="MODE",
        help="cores for each rank: node, socket, exclusive or core-complex",
    ),
    Flag(
        field="threads", flag="--threads", metavar="N",
        help="OMP_NUM_THREADS of each rank; a share of the cores by default",
    ),
    Flag(
        field="env", flag="--env", metavar="NAME[=VALUE]", many="again",
        help="a variable for the ranks; NAME alone is taken from here",
    ),
    Flag(field="executable", flag="--no-python", help="the program is not a Python script"),
    Flag(field="module", flag="-m", help="what follows is a module, not a script"),
)  # fmt: skip


def flag_words(spec: LaunchSpec) -> tuple[str, ...]:
    """The words after `fxtrain launch` that mean a spec; the launcher's own options aside.

    Example:
        >>> from fxtrain.launch import LaunchSpec, flag_words
        >>> flag_words(LaunchSpec(target="train.py", ranks=2, gpus=["0", "1"], args=["--lr=1"]))
        ('--ranks=2', '--gpus=0,1', '--', 'train.py', '--lr=1')
    """
    defaults = {field.name: field.default for field in attrs.fields(LaunchSpec)}
    words: list[str] = []
    for flag in FLAGS:
        value = getattr(spec, flag.field)
        if value != defaults[flag.field]:
            words += _words(flag, value)
    return (*words, "--", spec.target, *spec.args)


def _words(flag: Flag, value: Any) -> list[str]:
    if not flag.metavar:
        return [flag.flag]
    if flag.many == "again":
        return [f"{flag.flag}={one}" for one in value]
    return [f"{flag.flag}={','.join(map(str, value)) if flag.many else value}"]
