"""Resolves values from defaults, file, profile, environment and flags, each with its origin."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fxtrain.errors import PlanError
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.config.launch_file import (
    NO_TARGET,
    LaunchFile,
    Section,
    problems_of,
    read_launch_file,
)
from fxtrain.state import Plan, structure, unstructure
from fxtrain.state.parsing import (
    from_environment,
    leaves,
    merge,
    near,
    put,
    value_of,
)

# In the current folder; these come before the user's own file.
HERE = ("fxtrain.toml", "fxtrain.yaml", "fxtrain.yml")


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
