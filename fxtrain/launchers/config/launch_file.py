"""The launch file as a record, and reading it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from fxtrain._record import few, record, shown
from fxtrain.errors import LaunchError, PlanError
from fxtrain.launchers import LAUNCHERS, LaunchSpec, find_launcher, options_from
from fxtrain.state import Plan, structure
from fxtrain.state.files import read_data
from fxtrain.state.parsing import Format, merge, near, parse_text
from fxtrain.state.registry import installed_configs

# The script while checking a file that names none.
NO_TARGET = "train.py"

_KEY = re.compile(r"\['(.*?)'\]")  # of a table, in a path of cattrs
_TABLE = {"choose": "a table"}


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
