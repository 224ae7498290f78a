"""The fields of a spec as flags of `fxtrain launch`, in both directions, and its launch file.

Reading that file takes time, so a launch without one does not import what reads it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from fxtrain.launchers.spec import LaunchSpec


def _flag_of(row: Any) -> str:
    return f"--{row.field.rpartition('.')[2].replace('_', '-')}"


# In the current folder; these come before the user's own file.
HERE = ("fxtrain.toml", "fxtrain.yaml", "fxtrain.yml")


@attrs.frozen
class Flag:
    """One option of `fxtrain launch`.

    Attributes:
        field: The field of `LaunchSpec` that it sets, or the path of a field of the plan.
        metavar: Name of its value; empty for a switch.
        help: A one-line description.
        flag: The flag on the command line; by default the field's name, with hyphens.
        many: "" for one value, "," for several separated by commas, "again" for a repeated flag.
    """

    field: str
    metavar: str
    help: str
    flag: str = attrs.field(default=attrs.Factory(_flag_of, takes_self=True), kw_only=True)
    many: str = attrs.field(default="", kw_only=True)


FLAGS: tuple[Flag, ...] = (
    Flag("launcher", "NAME", "how to start the ranks"),
    Flag("ranks", "N", "processes per node; by default one per accelerator, or one without any"),
    Flag("nodes", "M", "number of machines"),
    Flag("min_nodes", "M", "minimum number of machines; the run then grows and shrinks"),
    Flag("node_rank", "K", "number of this machine, from 0"),
    Flag("main_address", "HOST", "address of node 0, the same on every node"),
    Flag("main_port", "PORT", "its TCP port; 29500 with several nodes"),
    Flag("local_address", "HOST", "address by which other nodes reach this one"),
    Flag("rendezvous", "KIND",
         "static: numbered nodes; c10d: they join in any order, and again after a failure"),
    Flag("rendezvous_options", "KEY=VALUE",
         "an option of torch's rendezvous", flag="--rendezvous-option", many="again"),
    Flag("connect_timeout_s", "SECONDS",
         "maximum wait for the other nodes", flag="--connect-timeout"),
    Flag("run_id", "NAME", "name shared by the nodes of a run"),
    Flag("restarts", "N", "maximum restarts of all ranks after one has failed"),
    Flag("spares", "N", "processes kept ready for each rank, for restarts"),
    Flag("monitor_interval_s", "SECONDS",
         "interval between checks of the ranks", flag="--monitor-interval"),
    Flag("shutdown_s", "SECONDS", "time for ranks to exit after a signal", flag="--shutdown"),
    Flag("role", "NAME", "name of the ranks in their log"),
    Flag("log_dir", "FOLDER", "folder for the ranks' output"),
    Flag("redirect", "STREAMS", "out, err or both: write to files in the log folder only"),
    Flag("tee", "STREAMS",
         "out, err or both: write to files and here, with the rank before each line"),
    Flag("show_ranks", "K,...", "show the output of these ranks of each node only", many=","),
    Flag("cpu", "", "hide the accelerators"),
    Flag("gpus", "K,...", "use these GPUs only", many=","),
    Flag("bind", "MODE",
         "cores for each rank: node, socket, exclusive or core-complex", flag="--numa-binding"),
    Flag("threads", "N", "OMP_NUM_THREADS of each rank; by default an equal share of the cores"),
    Flag("env", "NAME[=VALUE]",
         "a variable for the ranks; --env NAME takes the value from here", many="again"),
    Flag("executable", "", "the program is not a Python script", flag="--no-python"),
    Flag("module", "", "the program is a module, not a script", flag="-m"),
)  # fmt: skip
PLAN_FLAGS: tuple[Flag, ...] = (
    Flag("plan.mesh", "AXIS=N,...", "ranks per axis, such as shard=4,tensor=2"),
    Flag("plan.strategy.kind", "KIND", "such as ddp or fsdp", flag="--strategy"),
    Flag("plan.precision", "NAME", "fp32, bf16, fp16, fp8"),
    Flag("plan.accumulate", "N", "micro-batches per optimizer update"),
    Flag("plan.clip_norm", "X", "maximum total gradient norm"),
    Flag("plan.batch", "HOW", "whether batch sizes are per_rank or global"),
    Flag("plan.compile", "", "compile the model"),
)  # fmt: skip


def find_file(env: Mapping[str, str], *, folder: Path | None = None) -> str:
    """The launch file to use if no flag names one; empty if there is none.

    FXTRAIN_CONFIG, else `fxtrain.toml` or `.yaml` in the current folder, else
    `fxtrain/launch.toml` in the user's configuration folder (XDG_CONFIG_HOME, ~/.config).
    """
    if env.get("FXTRAIN_CONFIG"):
        return env["FXTRAIN_CONFIG"]
    home = env.get("XDG_CONFIG_HOME") or (env["HOME"] + "/.config" if env.get("HOME") else "")
    own = [Path(home, "fxtrain", "launch.toml")] if home else []
    here = [(folder or Path()) / name for name in HERE]
    return next((str(path) for path in (*here, *own) if path.is_file()), "")


def flag_words(spec: LaunchSpec) -> tuple[str, ...]:
    """The words after `fxtrain launch` that describe a spec, without the launcher's own options."""
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
