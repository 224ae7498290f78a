"""The fields of a spec as flags of `fxtrain launch`, in both directions."""

from typing import Any

import attrs

from fxtrain.launchers.spec import LaunchSpec


@attrs.frozen(kw_only=True)
class Flag:
    """One option of `fxtrain launch`.

    Attributes:
        field: The field of `LaunchSpec` that it sets, or the path of a field of the plan.
        flag: The flag on the command line.
        help: A one-line description.
        metavar: Name of its value; empty for a switch.
        many: "" for one value, "," for several separated by commas, "again" for a repeated flag.
    """

    field: str
    flag: str
    help: str
    metavar: str = ""
    many: str = ""


FLAGS: tuple[Flag, ...] = (
    Flag(field="launcher", flag="--launcher", metavar="NAME", help="how to start the ranks"),
    Flag(
        field="ranks", flag="--ranks", metavar="N",
        help="processes per node; by default one per accelerator, or one without any",
    ),
    Flag(field="nodes", flag="--nodes", metavar="M", help="number of machines"),
    Flag(
        field="min_nodes", flag="--min-nodes", metavar="M",
        help="minimum number of machines; the run then grows and shrinks",
    ),
    Flag(
        field="node_rank", flag="--node-rank", metavar="K", help="number of this machine, from 0"
    ),
    Flag(
        field="main_address", flag="--main-address", metavar="HOST",
        help="address of node 0, the same on every node",
    ),
    Flag(
        field="main_port", flag="--main-port", metavar="PORT",
        help="its TCP port; 29500 with several nodes",
    ),
    Flag(
        field="local_address", flag="--local-address", metavar="HOST",
        help="address by which other nodes reach this one",
    ),
    Flag(
        field="rendezvous", flag="--rendezvous", metavar="KIND",
        help="static: numbered nodes; c10d: nodes join in any order, and again after a failure",
    ),
    Flag(
        field="rendezvous_options", flag="--rendezvous-option", metavar="KEY=VALUE", many="again",
        help="an option of torch's rendezvous",
    ),
    Flag(
        field="connect_timeout_s", flag="--connect-timeout", metavar="SECONDS",
        help="maximum wait for the other nodes",
    ),
    Flag(field="run_id", flag="--run-id", metavar="NAME", help="name shared by the nodes of a run"),
    Flag(
        field="restarts", flag="--restarts", metavar="N",
        help="maximum restarts of all ranks after one has failed",
    ),
    Flag(
        field="spares", flag="--spares", metavar="N",
        help="processes kept ready for each rank, for restarts",
    ),
    Flag(
        field="monitor_interval_s", flag="--monitor-interval", metavar="SECONDS",
        help="interval between checks of the ranks",
    ),
    Flag(
        field="shutdown_s", flag="--shutdown", metavar="SECONDS",
        help="time for ranks to exit after a signal",
    ),
    Flag(field="role", flag="--role", metavar="NAME", help="name of the ranks in their log"),
    Flag(field="log_dir", flag="--log-dir", metavar="FOLDER", help="folder for the ranks' output"),
    Flag(
        field="redirect", flag="--redirect", metavar="STREAMS",
        help="out, err or both: write to files only",
    ),
    Flag(
        field="tee", flag="--tee", metavar="STREAMS",
        help="out, err or both: write to files and here, with the rank before each line",
    ),
    Flag(
        field="show_ranks", flag="--show-ranks", metavar="K,...", many=",",
        help="show the output of these ranks of each node only",
    ),
    Flag(field="cpu", flag="--cpu", help="hide the accelerators"),
    Flag(field="gpus", flag="--gpus", metavar="K,...", many=",", help="use these GPUs only"),
    Flag(
        field="bind", flag="--numa-binding", metavar="MODE",
        help="cores for each rank: node, socket, exclusive or core-complex",
    ),
    Flag(
        field="threads", flag="--threads", metavar="N",
        help="OMP_NUM_THREADS of each rank; by default an equal share of the cores",
    ),
    Flag(
        field="env", flag="--env", metavar="NAME[=VALUE]", many="again",
        help="a variable for the ranks; NAME alone takes the value from here",
    ),
    Flag(field="executable", flag="--no-python", help="the program is not a Python script"),
    Flag(field="module", flag="-m", help="the program is a module, not a script"),
)  # fmt: skip


PLAN_FLAGS: tuple[Flag, ...] = (
    Flag(
        field="plan.mesh", flag="--mesh", metavar="AXIS=N,...",
        help="ranks per axis, such as shard=4,tensor=2",
    ),
    Flag(field="plan.strategy.kind", flag="--strategy", metavar="KIND", help="such as ddp or fsdp"),
    Flag(field="plan.precision", flag="--precision", metavar="NAME", help="fp32, bf16, fp16, fp8"),
    Flag(
        field="plan.accumulate", flag="--accumulate", metavar="N",
        help="micro-batches per optimizer update",
    ),
    Flag(
        field="plan.clip_norm", flag="--clip-norm", metavar="X",
        help="maximum total gradient norm",
    ),
    Flag(
        field="plan.batch", flag="--batch", metavar="HOW",
        help="whether batch sizes are per_rank or global",
    ),
    Flag(field="plan.compile", flag="--compile", help="compile the model"),
)  # fmt: skip


def flag_words(spec: LaunchSpec) -> tuple[str, ...]:
    """The words after `fxtrain launch` that describe a spec, without the launcher's own options.

    Example:
        >>> from fxtrain.launchers import LaunchSpec, flag_words
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
        return [f"{flag.flag}={entry}" for entry in value]
    return [f"{flag.flag}={','.join(map(str, value)) if flag.many else value}"]
