"""Launch files: the record, reading and writing it, and its values after variables and flags."""

import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain._record import few, record, shown
from fxtrain.errors import LaunchError, PlanError
from fxtrain.launchers import LAUNCHERS, LaunchSpec, find_launcher, options_from
from fxtrain.state import Plan, structure, unstructure
from fxtrain.state.files import read_data, text_of
from fxtrain.state.parsing import (
    Format,
    from_environment,
    leaves,
    merge,
    near,
    parse_text,
    put,
    value_of,
)
from fxtrain.state.registry import installed_configs

# The script while checking a file that names none.
NO_TARGET = "train.py"

_KEY = re.compile(r"\['(.*?)'\]")  # of a table, in a path of cattrs
_TABLE = {"choose": "a table"}
# In the current folder; these come before the user's own file.
HERE = ("fxtrain.toml", "fxtrain.yaml", "fxtrain.yml")
_TEMPLATE = Path(__file__).with_name("launch_template.toml")
_UNSET_FIELD = re.compile(r"# (\w+)[\w.]* = .*")


@record
class Section:
    """The values of one profile; an absent field is unset.

    Attributes:
        launch: Fields of `fxtrain.launchers.LaunchSpec`, as plain data.
        plan: Fields of `fx.Plan`, as plain data.
    """

    launch: Mapping[str, Any] = attrs.field(factory=dict, metadata=_TABLE)
    plan: Mapping[str, Any] = attrs.field(factory=dict, metadata=_TABLE)


def _are_named(_: Any, __: Any, profiles: Mapping[str, Section]) -> None:
    if "" in profiles:
        raise ValueError("choose a word as the name of each profile.")


@record
class LaunchFile:
    """A launch file: common values, and named setups that change some of them.

    Attributes:
        default: The profile used if none is requested; empty for none.
        launch: Fields of `fxtrain.launchers.LaunchSpec` that all profiles share, as plain data.
        plan: Fields of `fx.Plan` that all profiles share, as plain data.
        profiles: By name, the values that differ.
    """

    default: str = ""
    launch: Mapping[str, Any] = attrs.field(factory=dict, metadata=_TABLE)
    plan: Mapping[str, Any] = attrs.field(factory=dict, metadata=_TABLE)
    profiles: Mapping[str, Section] = attrs.field(
        factory=dict, validator=_are_named, metadata={"choose": "a table of profiles"}
    )

    def __attrs_post_init__(self) -> None:
        if self.default and self.default not in self.profiles:
            known = ", ".join(self.profiles) or "none"
            raise PlanError(f"default: no profile {shown(self.default)}; the file has {known}.")

    def section(self, profile: str) -> Section:
        """A profile's values merged over the common ones; for "", the common values."""
        own = self.profiles[profile] if profile else Section()
        return Section(launch=merge(self.launch, own.launch), plan=merge(self.plan, own.plan))


def read_launch_file(path: str | Path) -> LaunchFile:
    """Read and check a launch file.

    Raises:
        PlanError: it does not exist, is not TOML, YAML or JSON, or contains fields that neither a
            launch nor a plan has; one line per problem, each with its path in the file.

    Example:
        >>> import pathlib, tempfile
        >>> from fxtrain.launchers.config import read_launch_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "fxtrain.toml")
        ...     _ = path.write_text("[profiles.two.launch]\\nranks = 2\\n")
        ...     read_launch_file(path).profiles["two"].launch
        {'ranks': 2}
    """
    if not os.path.exists(path):
        raise PlanError(
            f"{path}: no such launch file. Create one with `fxtrain config`.", code="FX201"
        )
    data = read_data(path)
    try:
        return _launch_file(data)
    except PlanError as error:
        raise PlanError(f"{path}:\n{error}") from None


def parse(text: str, form: Format) -> LaunchFile:
    """A launch file from its text.

    Raises:
        PlanError: as `read_launch_file`.
    """
    return _launch_file(parse_text(text, form))


def _launch_file(data: Any) -> LaunchFile:
    """A checked launch file from plain data."""
    data = {} if data is None else data
    problems: list[str] = []
    if isinstance(data, Mapping):
        if foreign := _foreign(data):
            raise PlanError(foreign)
        owners = {key: owner for key in data if (owner := _owner(key))}
        problems = [f"the file: unknown key {key!r}. Use {owners[key]}.{key}." for key in owners]
        data = {key: data[key] for key in data if key not in owners}
    try:
        file = structure(data, LaunchFile, ())
        more = installed_configs()
        problems += problems_of(file.section(""), more=more)
        for name in file.profiles:
            problems += problems_of(file.section(name), at=f"profiles.{name}", more=more)
    except RecursionError:
        raise PlanError("The file is nested too deeply, or contains itself.") from None
    except PlanError as error:
        problems += [_placed(line, LaunchFile, "") for line in error.message.splitlines()]
        raise PlanError("\n".join(few(problems))) from None
    if problems:
        raise PlanError("\n".join(few(problems)))
    return file


def _foreign(data: Mapping[Any, Any]) -> str:
    """What to do with a config file of another library; empty for any other file."""
    if "compute_environment" in data:
        return "This is a config of Accelerate. Convert it with `fxtrain config convert FILE`."
    if not data.keys().isdisjoint(("zero_optimization", "train_micro_batch_size_per_gpu")):
        return (
            "This is a config of DeepSpeed. Name it in the plan of a launch file: "
            "plan.strategy.kind = 'deepspeed' and plan.strategy.config = 'FILE'."
        )
    return ""


def _owner(key: Any) -> str:
    """Where a field belongs that is written beside launch and plan; empty for any other key."""
    if near(key, list(attrs.fields_dict(LaunchFile))):
        return ""
    owners = {"plan": Plan, "launch": LaunchSpec}
    return next((name for name in owners if key in attrs.fields_dict(owners[name])), "")


def problems_of(
    section: Section, *, at: str = "", more: tuple[type, ...] | None = None
) -> list[str]:
    """Problems with the values of a section, one line each, with paths.

    Args:
        section: Complete values, including the common ones.
        at: Path of the section in its file.
        more: Strategy configs of installed packages; searched for by default.
    """
    more = installed_configs() if more is None else more
    prefix = f"{at}." if at else ""
    launch = {"target": NO_TARGET, **section.launch}
    problems: list[str] = []
    for name in _options_beside(launch):
        launch.pop(name)
        problems.append(
            f"{prefix}launch: unknown key {shown(name)}. Options of the launcher "
            f"{launch['launcher']} belong in launch.options."
        )
    for name, data, cls in (("launch", launch, LaunchSpec), ("plan", section.plan, Plan)):
        try:
            checked = structure(dict(data), cls, more)
        except (PlanError, LaunchError) as error:
            problems += [_placed(line, cls, prefix + name) for line in error.message.splitlines()]
        else:
            if isinstance(checked, LaunchSpec):
                problems += _launcher_problems(checked, prefix + name)
    return problems


def _options_beside(launch: Mapping[str, Any]) -> list[str]:
    """Options of a launch's own launcher that are written beside its common fields."""
    row = LAUNCHERS.get(str(launch.get("launcher")))
    options = () if row is None or row.options is None else attrs.fields_dict(row.options)
    names = attrs.fields_dict(LaunchSpec)
    return [name for name in launch if name in options and name not in names]


def _launcher_problems(spec: LaunchSpec, where: str) -> list[str]:
    """What a spec's launcher does not support, and problems with its own options."""
    options = {} if spec.options is None else spec.options
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        return [f"{where}.options: expected a table, found {shown(options)}"]
    try:
        row = find_launcher(spec)
    except LaunchError as error:
        return [f"{where}: {error.message}"]
    try:
        options_from(row.options, options, launcher=row.name)
    except LaunchError as error:
        return [f"{where}.options: {error.message}"]
    return []


def _placed(line: str, cls: type, where: str) -> str:
    """A problem whose path begins with its place in the file, in place of the record's name."""
    path, _, rest = line.partition(": ")
    own, dot, inner = path.partition(".")
    if own != cls.__name__.lower():
        return f"{where}: {line}"
    place = (where + dot + _KEY.sub(r".\1", inner)).strip(".")
    return f"{place or 'the file'}: {rest}"


@attrs.frozen(kw_only=True)
class Setting:
    """One value and where it came from.

    Attributes:
        path: Such as `launch.ranks` or `plan.strategy.kind`.
        value: Plain data.
        origin: default, `file`, `file, profile NAME`, `environment NAME` or `flag`.
    """

    path: str
    value: Any
    origin: str


@attrs.frozen(kw_only=True)
class Settings:
    """The resolved values of one launch.

    Attributes:
        values: The launch values and plan fields that are not defaults.
        launch: The spec; its target is a placeholder if nothing names a script.
        plan: The plan.
        origins: By path, the origin of each value that was set.
        file: The file that was read; empty for none.
        profile: The profile that was used; empty for none.
    """

    values: Section
    launch: LaunchSpec
    plan: Plan
    origins: Mapping[str, str]
    file: str = ""
    profile: str = ""

    def every(self) -> tuple[Setting, ...]:
        """Every value with its origin, including defaults."""
        launch = unstructure(self.launch)
        if "target" not in self.values.launch:
            launch["target"] = ""
        data = {"launch": launch, "plan": unstructure(self.plan)}
        return tuple(
            Setting(path=path, value=value, origin=_origin(path, self.origins))
            for path, value in leaves(data)
        )


def find_file(env: Mapping[str, str], *, folder: Path | None = None) -> str:
    """The launch file to use if no flag names one; empty if there is none.

    FXTRAIN_CONFIG, else `fxtrain.toml` or `.yaml` in the current folder, else
    `fxtrain/launch.toml` in the user's configuration folder (XDG_CONFIG_HOME, ~/.config).

    Example:
        >>> from fxtrain.launchers.config import find_file
        >>> find_file({"FXTRAIN_CONFIG": "cluster.toml"})
        'cluster.toml'
    """
    if env.get("FXTRAIN_CONFIG"):
        return env["FXTRAIN_CONFIG"]
    home = env.get("XDG_CONFIG_HOME") or (env["HOME"] + "/.config" if env.get("HOME") else "")
    own = [Path(home, "fxtrain", "launch.toml")] if home else []
    here = [(folder or Path()) / name for name in HERE]
    return next((str(path) for path in (*here, *own) if path.is_file()), "")


def from_flags(words: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Values by path from words such as `plan.accumulate=4`.

    Raises:
        PlanError: a word has another form.

    Example:
        >>> from fxtrain.launchers.config import from_flags
        >>> from_flags(["launch.ranks=4"])
        {'launch.ranks': (4, 'flag')}
    """
    values: dict[str, tuple[Any, str]] = {}
    for word in words:
        path, equals, text = word.partition("=")
        parts = path.split(".")
        if not equals or len(parts) < 2 or parts[0] not in ("launch", "plan") or "" in parts:
            raise PlanError(
                f"--set {word}: write a value as launch.ranks=4 or plan.precision=bf16."
            )
        values[path] = (value_of(text), "flag")
    return values


def resolve(
    *,
    file: str = "",
    profile: str = "",
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[Any, str]] | None = None,
) -> Settings:
    """Resolve values: flags override the environment, a profile, and the file, in this order.

    Args:
        file: Path of the launch file; empty finds one, see `find_file`.
        profile: Name of the profile; empty takes FXTRAIN_PROFILE, then the file's default.
        env: Variables by name; not changed. None for none.
        flags: By path, value and origin, see `from_flags`.

    Raises:
        PlanError: the file, the profile or a value is invalid; one line per problem, with its path
            and its origin.

    Example:
        >>> from fxtrain.launchers.config import resolve
        >>> resolve(env={"FXTRAIN_LAUNCH__RANKS": "2"}).launch.ranks
        2
    """
    env = env or {}
    path = file or find_file(env)
    launch_file = read_launch_file(path) if path else LaunchFile()
    name = profile or env.get("FXTRAIN_PROFILE", "") or launch_file.default
    if name and name not in launch_file.profiles:
        names = list(launch_file.profiles)
        has = f"{path} has {', '.join(names) or 'none'}" if path else "there is no file"
        raise PlanError(f"No profile {name!r}{near(name, names)}: {has}.")
    origins = _origins_of(launch_file.section(""), f"file {path}")
    if name:
        origins |= _origins_of(launch_file.profiles[name], f"file {path}, profile {name}")
    section = launch_file.section(name)
    data = {"launch": section.launch, "plan": section.plan}
    for where, (value, origin) in {**from_environment(env), **(flags or {})}.items():
        data = merge(data, put({}, where, value))
        origins[where] = origin
    section = Section(launch=data["launch"], plan=data["plan"])
    if problems := problems_of(section):
        raise PlanError("\n".join(_with_origin(line, origins) for line in problems))
    return Settings(
        values=section,
        launch=structure({"target": NO_TARGET, **section.launch}, LaunchSpec, ()),
        plan=structure(dict(section.plan), Plan),
        origins=origins,
        file=path,
        profile=name,
    )


def _origins_of(section: Section, origin: str) -> dict[str, str]:
    """The origin of each value of a section, by path."""
    parts = {"launch": section.launch, "plan": section.plan}
    used = {name: values for name, values in parts.items() if values}
    return {path: origin for path, _ in leaves(used)}


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Expand a short form in a file, such as precision = "bf16", into the fields below it."""
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return "default"


def _with_origin(line: str, origins: Mapping[str, str]) -> str:
    path = line.partition(": ")[0].replace("[", ".").replace("]", "")
    origin = _origin(path, origins)
    return line if origin == "default" else f"{line} ({origin})"


def render(
    file: LaunchFile, form: Format, *, notes: Sequence[str] = (), brief: bool = False
) -> str:
    """The text of a launch file.

    Args:
        file: Its content.
        form: toml, with a comment on every field, or yaml or json, with values only.
        notes: Sentences for the top of the file, where the format has comments.
        brief: Write values only, also in TOML.

    Raises:
        MissingPackageError: TOML needs tomlkit and YAML pyyaml (the extra `files`).

    Example:
        >>> from fxtrain.launchers.config import LaunchFile, render
        >>> print(render(LaunchFile(launch={"ranks": 2}), "toml", brief=True))
        [launch]
        ranks = 2
    """
    data: dict[str, Any] = {"default": file.default, "launch": file.launch, "plan": file.plan}
    data["profiles"] = {name: _values(section) for name, section in file.profiles.items()}
    data = {name: value for name, value in data.items() if value}
    if brief or form != "toml":
        text = text_of(data, form)
    else:
        default = {"default": data.pop("default")} if file.default else {}
        tables = _TEMPLATE.read_text(encoding="utf-8").split("\n\n")
        parts = [_explained(data.pop(table[1 : table.index("]")], {}), table) for table in tables]
        text = "\n\n".join([*([text_of(default, form)] if default else []), *parts])
        text += "\n" + text_of(data, form)
    wrapped = [] if brief or form == "json" else [_comment(note) for note in notes]
    return "\n".join([*wrapped, text.strip("\n")]) + "\n"


def render_profile(name: str, section: Section) -> str:
    """The tables of one profile, in TOML."""
    return text_of({"profiles": {name: _values(section)}}, "toml")


def _values(section: Section) -> dict[str, Any]:
    return {name: values for name, values in attrs.asdict(section).items() if values}


def _explained(values: Mapping[str, Any], table: str) -> str:
    """A table of the template, with values in place of the unset fields."""
    head, *lines = table.strip("\n").splitlines()
    tomlkit = optional("tomlkit", extra="files", needed_by="a launch file in TOML")
    inside = {name for name, value in values.items() if isinstance(value, Mapping)}
    set_here = {name: values[name] for name in values if name not in inside}
    name = head.strip("[]")

    def filled() -> Iterator[str]:
        for line in lines:
            field = _UNSET_FIELD.fullmatch(line)
            if field and field[1] in set_here:
                yield _assignment(tomlkit, field[1], set_here.pop(field[1]))
            elif field and field[1] in inside:
                yield f"# {field[1]}: see the table below."
            else:
                yield line

    text = [head, *filled(), *(_assignment(tomlkit, *each) for each in set_here.items())]
    tables = text_of({name: {key: values[key] for key in values if key in inside}}, "toml")
    return "\n".join([*text, "", tables] if inside else text)


def _assignment(tomlkit: Any, name: str, value: Any) -> str:
    """A line of TOML; a comment for a value that is None, which TOML does not have."""
    if value is None:
        return f"# {name} = (not set)"
    return f"{tomlkit.key(name).as_string()} = {tomlkit.item(value).as_string()}"


def _comment(note: str) -> str:
    return textwrap.fill(note, 96, initial_indent="# ", subsequent_indent="# ")


@attrs.frozen(kw_only=True)
class Machine:
    """Properties of a machine that matter for a launch file.

    Attributes:
        cores: Cores available to a process.
        kind: Device type of its accelerators, as torch names it; cpu without any.
        count: Number of accelerators.
        bf16: Whether they compute in bf16.
        slurm: Whether a SLURM cluster accepts jobs here.
        tpu: Name of the TPU in the environment; empty without one.
        strategies: Strategy configs of installed packages.
    """

    cores: int = 1
    kind: str = "cpu"
    count: int = 0
    bf16: bool = False
    slurm: bool = False
    tpu: str = ""
    strategies: tuple[type, ...] = ()

    @property
    def summary(self) -> str:
        """The machine in a few words."""
        some = f"{self.count} {self.kind} devices" if self.count else "no accelerator"
        return f"a machine with {some} and {self.cores} cores"


def detect_machine(env: Mapping[str, str] | None = None) -> Machine:
    """Inspect this machine.

    Effects:
        Imports torch and asks it for devices. Loads the strategies of installed packages.

    Example:
        >>> from fxtrain.launchers.config import detect_machine
        >>> detect_machine().cores >= 1
        True
    """
    env = os.environ if env is None else env
    torch = import_module("torch")
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    kind = accelerator.type if accelerator else "cpu"
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        kind=kind,
        count=torch.accelerator.device_count() if accelerator else 0,
        bf16=_bf16(torch, kind),
        slurm=bool(shutil.which("sbatch", path=env.get("PATH"))),
        tpu=env.get("TPU_NAME", ""),
        strategies=installed_configs(),
    )


def suggested(machine: Machine) -> Section:
    """A setup for this machine alone: one rank per accelerator, bf16 if it is fast.

    Example:
        >>> from fxtrain.launchers.config import Machine, suggested
        >>> suggested(Machine(kind="cuda", count=8, bf16=True))
        Section(launch={'ranks': 8}, plan={'precision': 'bf16'})
    """
    precision = {"precision": "bf16"} if machine.bf16 else {}
    return Section(launch={"ranks": max(1, machine.count)}, plan=precision)


def _bf16(torch: Any, kind: str) -> bool:
    module = getattr(torch, kind, None)
    fast = getattr(module, "is_bf16_supported", None)
    return bool(kind != "cpu" and fast and fast())
