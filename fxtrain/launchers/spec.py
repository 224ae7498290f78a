"""What to launch, and what a launch will start: a command line, variables and files."""

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, dataclass_transform, get_origin

import attrs

from fxtrain._other_names import hint
from fxtrain._record import at_least, closest, members, record, shown
from fxtrain.errors import LaunchError, escape_unprintable
from fxtrain.state.parsing import value_of

T = TypeVar("T")


LONGEST_S = 1_000_000  # maximum timeout: systems count milliseconds in 31 bits
_LARGEST = 2**31 - 1  # maximum of processes, ports and seconds
Streams = Literal["none", "out", "err", "both"]
_PORT = 29_500  # torch's default
_MOST_RANKS = 2**20  # on one machine
_RANKS = "a whole number of at least 1: one per accelerator, or as many as there are spare cores"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field,))
def launch_record(cls: type[T]) -> type[T]:
    """A record, like those of plans, whose invalid values are a LaunchError."""
    return record(cls, error=LaunchError)


def number_from(least: float) -> Callable[[Any, Any, Any], None]:
    """A validator for numbers from this minimum up to the system's maximum."""
    return at_least(least, _LARGEST)


def each(fits: Callable[[str], object], *, expected: str) -> Callable[[Any, Any, Any], None]:
    """A validator for each of several strings, or for one non-empty string."""

    def check(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        for text in (value,) if isinstance(value, str) else value:
            if text and not fits(text):
                raise ValueError(f"expected {expected}, found {shown(text)}.")

    return check


def _is_host(text: str) -> bool:
    try:
        text.encode("idna")
    except UnicodeError:  # a part between dots is empty or too long
        return False
    return len(text) < 254 and re.fullmatch(r"[\w.:\[\]%-]+", text) is not None


def _some_ranks(_: Any, __: Any, value: int) -> None:
    if not 1 <= value < _MOST_RANKS:
        raise ValueError(f"choose {_RANKS}.")


_variable = each(
    re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0]*", re.DOTALL).fullmatch, expected="NAME=VALUE"
)
_device = each(
    re.compile(r"[0-9]+|[A-Z]+-[\w\-/]+").fullmatch, expected="a number or an identifier of a GPU"
)
_argument = each(lambda text: "\0" not in text, expected="an argument without a null character")
_host = each(_is_host, expected="a host name or address")
_setting = each(re.compile(r"\w+=[^,\0]+").fullmatch, expected="KEY=VALUE without a comma")
_word = each(re.compile(r"[\w.-]+").fullmatch, expected="a word of letters, digits, . _ and -")


@launch_record
class LaunchSpec:
    """A program, the ranks to run it on, and their settings.

    Attributes:
        target: Path of a Python script, the dotted name of a module, or an executable.
        args: What the program finds after its name in `sys.argv`.
        ranks: Processes on each node.
        module: `target` is a module, as after `python -m`.
        executable: `target` is a program to start without Python.
        launcher: How to start the ranks: a name in `fxtrain.launchers.LAUNCHERS`.
        options: The launcher's own options: a record of the launcher's type, a mapping that is
            converted to one, or None.
        nodes: Number of machines; the maximum, if `min_nodes` is given.
        min_nodes: Minimum number of machines; a native launch then grows and shrinks.
        node_rank: Number of this machine, from 0, in a static rendezvous.
        main_address: Host name or address of the machine of rank 0, to which all connect.
        main_port: TCP port there; 0 for one that is free, or 29500 with several nodes.
        local_address: Address by which the other nodes reach this one; its host name by default.
        rendezvous: How launchers connect: "static" with a fixed number for each node, or "c10d"
            in any order and again after a failure. By default static with several nodes, but
            c10d with `min_nodes`.
        rendezvous_options: KEY=VALUE of torch's rendezvous, such as keep_alive_interval=5.
        connect_timeout_s: Maximum wait for the main address and for the other nodes.
        run_id: A name that the nodes of one run share.
        restarts: Maximum restarts of all ranks after one has failed.
        spares: Processes kept for each rank that have imported torch and the packages of the
            script, and become the rank in a restart.
        monitor_interval_s: Time between checks of the ranks.
        shutdown_s: Time that ranks have to exit after a signal before they are killed.
        role: Name of the ranks for torch's elastic launcher.
        log_dir: Folder for the output of ranks; without one, no files are written.
        redirect: Streams of the ranks that are written to files in `log_dir` only.
        tee: Streams that are written to files in `log_dir` and here, with the rank before each
            line.
        show_ranks: Ranks of each node whose output is shown here; all by default.
        cpu: Hide the accelerators of the machine, so that ranks compute on the CPU.
        gpus: Numbers or identifiers of the GPUs to use; all by default.
        bind: Cores for each rank: those of its GPU's NUMA node or socket, a share of them, or
            those of one last-level cache; without GPUs, "node" or a share of all ("exclusive").
        threads: OMP_NUM_THREADS of each rank; by default an equal share of the cores.
        env: NAME=VALUE of variables for the ranks; never shown in a message or `repr`.

    Example:
        >>> from fxtrain.launchers import LaunchSpec
        >>> LaunchSpec(target="train.py", args=("--lr", "0.1"), ranks=2).world_size
        2
    """

    target: str = attrs.field(validator=_argument)
    args: tuple[str, ...] = attrs.field(default=(), validator=_argument)
    ranks: int = attrs.field(default=1, validator=_some_ranks, metadata={"choose": _RANKS})
    module: bool = False
    executable: bool = False
    launcher: str = "native"
    options: Any = None
    nodes: int = attrs.field(default=1, validator=number_from(1))
    min_nodes: int | None = attrs.field(default=None, validator=number_from(1))
    node_rank: int = attrs.field(default=0, validator=number_from(0))
    main_address: str = attrs.field(default="", validator=_host)
    main_port: int = attrs.field(default=0, validator=at_least(0, 65_535))
    local_address: str = attrs.field(default="", validator=_host)
    rendezvous: Literal["static", "c10d"] | None = None
    rendezvous_options: tuple[str, ...] = attrs.field(default=(), validator=_setting)
    connect_timeout_s: float = attrs.field(default=600.0, validator=at_least(0.1, LONGEST_S))
    run_id: str = attrs.field(default="", validator=_word)
    restarts: int = attrs.field(default=0, validator=number_from(0))
    spares: int = attrs.field(default=0, validator=number_from(0))
    monitor_interval_s: float = attrs.field(default=0.1, validator=number_from(0.001))
    shutdown_s: int = attrs.field(default=10, validator=number_from(0))
    role: str = attrs.field(default="default", validator=_word)
    log_dir: str = ""
    redirect: Streams = "none"
    tee: Streams = "none"
    show_ranks: tuple[int, ...] = ()
    cpu: bool = False
    gpus: tuple[str, ...] = attrs.field(default=(), validator=_device)
    bind: Literal["none", "node", "socket", "exclusive", "core-complex"] = "none"
    threads: int | None = attrs.field(default=None, validator=number_from(1))
    env: tuple[str, ...] = attrs.field(default=(), validator=_variable, repr=False)

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.ranks * self.nodes

    @property
    def rendezvous_backend(self) -> Literal["static", "c10d"]:
        """How launchers of several nodes connect."""
        fixed = self.nodes > 1 and self.min_nodes is None
        return self.rendezvous or ("static" if fixed else "c10d")

    @property
    def elastic(self) -> bool:
        """Whether nodes join and leave."""
        return self.nodes > 1 and self.rendezvous_backend == "c10d"

    @property
    def port(self) -> int:
        """The port at the main address; 0 for a free one."""
        return self.main_port or (_PORT if self.nodes > 1 else 0)

    def __attrs_post_init__(self) -> None:
        for problem in _problems(self):
            raise LaunchError(problem)


def _problems(spec: LaunchSpec) -> list[str]:
    """Problems between fields."""
    fewest = spec.min_nodes if spec.min_nodes is not None else spec.nodes
    problems = {
        "LaunchSpec(module=True, executable=True): a program cannot be both.": (
            spec.module and spec.executable
        ),
        f"LaunchSpec(min_nodes={spec.min_nodes}, nodes={spec.nodes}): the minimum exceeds "
        f"the maximum.": fewest > spec.nodes,
        f"LaunchSpec(node_rank={spec.node_rank}, nodes={spec.nodes}): nodes are numbered from 0 "
        f"to {spec.nodes - 1}.": spec.node_rank >= spec.nodes,
        f"LaunchSpec(cpu=True, gpus={spec.gpus!r}): choose either the CPU or GPUs.": (
            spec.cpu and bool(spec.gpus)
        ),
        f"LaunchSpec(ranks={spec.ranks}, gpus={','.join(spec.gpus)}): {spec.ranks} ranks need as "
        f"many GPUs, but {len(spec.gpus)} are chosen. Use ranks={len(spec.gpus)}, or choose "
        f"others.": bool(spec.gpus) and spec.ranks > len(spec.gpus),
        f"LaunchSpec(spares={spec.spares}, executable=True): a spare imports the packages of a "
        f"Python script or module, and {spec.target} is a program. Omit spares.": (
            bool(spec.spares) and spec.executable
        ),
        f"LaunchSpec(spares={spec.spares}, restarts=0): a spare is used when the ranks start "
        f"again. Set restarts.": bool(spec.spares) and not spec.restarts,
        "LaunchSpec(redirect=..., tee=...): output files need a folder. Set log_dir.": (
            not spec.log_dir and {spec.redirect, spec.tee} != {"none"}
        ),
    }
    return [problem for problem, wrong in problems.items() if wrong]


def name_values(pairs: tuple[str, ...]) -> dict[str, str]:
    """Variables of the form NAME=VALUE, by name."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def options_from(kind: type | None, options: Mapping[str, Any], *, launcher: str) -> Any:
    """Convert words of a command line, or values of a file, into a launcher's own options.

    `kind` is their record, or None for a launcher without options. A string is parsed as in
    TOML, unless the option is text.
    """
    types_of = {} if kind is None else {field.name: field.type for field in attrs.fields(kind)}
    for name in options:
        if name not in types_of:
            raise LaunchError(
                f"The launcher {launcher} has no option {name!r}."
                f"{hint(name, at='command') or closest(name, types_of)} "
                f"It has: {', '.join(types_of) or 'none'}."
            )
    read = {
        name: _read(value, types_of[name]) if isinstance(value, str) else value
        for name, value in options.items()
    }
    return None if kind is None else kind(**read)


def _read(text: str, annotation: Any) -> Any:
    kind = members(annotation)[0]
    if kind in (bool, int, float):
        return value_of(text)
    return (text,) if get_origin(kind) is tuple else text


@attrs.frozen(kw_only=True)
class Invocation:
    """What a launcher will start.

    Attributes:
        argv: The command line, word by word.
        env: Variables to add to the existing ones.
        files: Texts to write first, by path.
    """

    argv: tuple[str, ...] = attrs.field(converter=tuple)
    env: Mapping[str, str] = attrs.field(factory=dict)
    files: Mapping[str, str] = attrs.field(factory=dict)


def show(invocation: Invocation) -> str:
    """The invocation as a person reads it and a shell runs it; files come first.

    Example:
        >>> from fxtrain.launchers import Invocation, show
        >>> show(Invocation(argv=("python", "train.py", "a b"), env={"OMP_NUM_THREADS": "2"}))
        "OMP_NUM_THREADS=2 python train.py 'a b'"
    """
    written = [f"# {path}\n{text.rstrip()}\n" for path, text in invocation.files.items()]
    variables = [f"{name}={_quoted(value)}" for name, value in invocation.env.items()]
    return "\n".join([*written, " ".join([*variables, *map(_quoted, invocation.argv)])])


def _quoted(word: str) -> str:
    """A word for the shell; control characters are escaped as in bash and zsh."""
    if escape_unprintable(word) == word:
        return shlex.quote(word)
    plain = word.replace("\\", r"\\").replace("'", r"\'")
    letters = (
        letter if escape_unprintable(letter) == letter else _code(letter) for letter in plain
    )
    return f"$'{''.join(letters)}'"


def _code(letter: str) -> str:
    number = ord(letter)
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"


def _flag_of(row: Any) -> str:
    return f"--{row.field.rpartition('.')[2].replace('_', '-')}"


@attrs.frozen
class Flag:
    """One option of `fxtrain launch`."""

    field: str  # of `LaunchSpec`, which it sets, or the path of a field of the plan
    metavar: str  # name of its value; empty for a switch
    help: str
    flag: str = attrs.field(default=attrs.Factory(_flag_of, takes_self=True), kw_only=True)
    # "" for one value, "," for several separated by commas, "again" for a repeated flag.
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
