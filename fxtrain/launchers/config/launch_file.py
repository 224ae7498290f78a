"""The launch file as a record, and reading it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from fxtrain._other_names import hint
from fxtrain._reading import read_text
from fxtrain.errors import LaunchError, PlanError
from fxtrain.launchers import LAUNCHERS, LaunchSpec, find_launcher, options_from
from fxtrain.state import Format, Plan, few, installed_configs, parse_text, shown, structure
from fxtrain.state.parsing import merge, near

_FORMATS: dict[str, Format] = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}

# The script while checking a file that names none.
NO_TARGET = "train.py"


@attrs.frozen(kw_only=True)
class Section:
    """The values of one profile; an absent field is unset.

    Attributes:
        launch: Fields of `fxtrain.launchers.LaunchSpec`, as plain data.
        plan: Fields of `fx.Plan`, as plain data.
    """

    launch: Mapping[str, Any] = attrs.field(factory=dict)
    plan: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class LaunchFile:
    """A launch file: common values, and named setups that change some of them.

    Attributes:
        path: Where it was read from; empty for one made in memory.
        common: Values of every profile.
        profiles: By name, the values that differ.
        default: The profile used if none is requested; empty for none.
    """

    path: str = ""
    common: Section = Section()
    profiles: Mapping[str, Section] = attrs.field(factory=dict)
    default: str = ""

    def section(self, profile: str) -> Section:
        """A profile's values merged over the common ones."""
        own = self.profiles[profile] if profile else Section()
        return Section(
            launch=merge(self.common.launch, own.launch), plan=merge(self.common.plan, own.plan)
        )


def read_launch_file(path: str | Path) -> LaunchFile:
    """Read and check a launch file.

    Raises:
        PlanError: it does not exist, is not TOML or YAML, or contains fields that neither a launch
            nor a plan has; one line per problem, each with its path in the file.

    Example:
        >>> import pathlib, tempfile
        >>> from fxtrain.launchers.config import read_launch_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "fxtrain.toml")
        ...     _ = path.write_text("[profiles.two.launch]\\nranks = 2\\n")
        ...     read_launch_file(path).profiles["two"].launch
        {'ranks': 2}
    """
    form = form_of(path)
    text = _text(path)
    try:
        return attrs.evolve(parse(text, form), path=str(path))
    except PlanError as error:
        raise PlanError(f"{path}:\n{error}") from None


def form_of(path: str | Path) -> Format:
    """The format of a launch file, by its suffix.

    Raises:
        PlanError: the suffix is another.
    """
    form = _FORMATS.get(Path(path).suffix.lower())
    if form is None:
        raise PlanError(
            f"{path}: the name of a launch file ends in {', '.join(_FORMATS)}.", code="FX201"
        )
    return form


def read_data(path: str | Path, form: Format) -> Any:
    """The data of a file in TOML or YAML.

    Raises:
        PlanError: it does not exist, or is not a file.
    """
    return parse_text(_text(path), form)


def _text(path: str | Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise PlanError(
            f"{path}: cannot read the launch file: {error}. Create one with `fxtrain config`.",
            code="FX201",
        ) from error


def parse(text: str, form: Format) -> LaunchFile:
    """A launch file from its text.

    Args:
        text: The file.
        form: toml or yaml.

    Raises:
        PlanError: as `read_launch_file`.
    """
    try:
        data = parse_text(text, form)
        file, problems = _file(data)
        if not problems:
            more = installed_configs()
            for name in ("", *file.profiles):
                at = f"profiles.{name}" if name else ""
                problems += problems_of(file.section(name), at=at, more=more)
    except RecursionError:
        raise PlanError(
            "The file is nested too deeply, or contains itself.", code="FX201"
        ) from None
    if problems:
        raise PlanError("\n".join(few(problems)))
    return file


def problems_of(
    section: Section, *, at: str = "", more: tuple[type, ...] | None = None
) -> list[str]:
    """Problems with the values of a section, one line each, with paths.

    Args:
        section: Complete values, including the common ones.
        at: Path of the section in its file.
        more: Strategy configs of installed packages; searched for by default.
    """
    problems: list[str] = []
    more = installed_configs() if more is None else more
    launch = {"target": NO_TARGET, **section.launch}
    for name in _options_beside(launch):
        launch.pop(name)
        problems.append(
            f"{at + '.' if at else ''}launch: unknown key {shown(name)}. Options of the "
            f"launcher {launch['launcher']} belong in launch.options."
        )
    for name, data, cls in (("launch", launch, LaunchSpec), ("plan", section.plan, Plan)):
        where = f"{at}.{name}" if at else name
        try:
            record = structure(dict(data), cls, more)
        except (PlanError, LaunchError) as error:
            problems += [_placed(line, cls, where) for line in error.message.splitlines()]
        else:
            problems += _launcher_problems(record, where) if isinstance(record, LaunchSpec) else []
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
    """Replace the record's name, with which the converter begins a path, by the section."""
    own = cls.__name__.lower()
    if line.startswith((f"{own}.", f"{own}:", f"{own}[")):
        return f"{where}{line.removeprefix(own)}"
    return f"{where}: {line}"


def _file(data: Any) -> tuple[LaunchFile, list[str]]:
    """The record, and problems with everything but launch and plan values."""
    problems: list[str] = []
    data = {} if data is None else data
    if isinstance(data, Mapping) and (foreign := _foreign(data)):
        return LaunchFile(), [foreign]
    top = _table(data, ("default", "launch", "plan", "profiles"), "", problems)
    default = top.get("default", "")
    if not isinstance(default, str):
        problems.append(f"default: expected the name of a profile, found {shown(default)}")
    named = top.get("profiles", {})
    if not isinstance(named, Mapping):
        problems.append(f"profiles: expected a table of profiles, found {shown(named)}")
        named = {}
    profiles: dict[str, Section] = {}
    for name, section in named.items():
        if not isinstance(name, str) or not name:
            problems.append(f"profiles: a profile's name is a word, found {shown(name)}")
        else:
            profiles[name] = _section(section, f"profiles.{name}", problems)
    if isinstance(default, str) and default and default not in profiles:
        known = ", ".join(profiles) or "none"
        problems.append(f"default: no profile {shown(default)}; the file has {known}")
    common = _section({key: top[key] for key in ("launch", "plan") if key in top}, "", problems)
    return LaunchFile(common=common, profiles=profiles, default=str(default)), problems


def _section(data: Any, at: str, problems: list[str]) -> Section:
    both = _table(data, ("launch", "plan"), at, problems)
    for name, values in both.items():
        if name in ("launch", "plan") and not isinstance(values, Mapping):
            place = f"{at}.{name}" if at else name
            problems.append(f"{place}: expected a table, found {shown(values)}")
    parts = {name: both.get(name, {}) for name in ("launch", "plan")}
    return Section(**{name: part for name, part in parts.items() if isinstance(part, Mapping)})


def _table(data: Any, known: tuple[str, ...], at: str, problems: list[str]) -> Mapping[str, Any]:
    """The table at a place of the file, whose unknown keys are problems."""
    where = at or "the file"
    if not isinstance(data, Mapping):
        problems.append(f"{where}: expected a table of {', '.join(known)}, found {shown(data)}")
        return {}
    for key in data:
        if key not in known:
            close = near(key, known)
            other = hint(key, at="file") or ("" if close else _own_field(key, at))
            rest = f".{other}" if other else f"{close}; known are {', '.join(known)}"
            problems.append(f"{where}: unknown key {shown(key)}{rest}")
    return data


def _own_field(key: Any, at: str) -> str:
    """Where a field of a plan or a launch belongs that is written beside both."""
    owners = (("plan", Plan), ("launch", LaunchSpec))
    found = next((name for name, cls in owners if key in attrs.fields_dict(cls)), "")
    return f" Use {at + '.' if at else ''}{found}.{key}." if found else ""


def _foreign(data: Mapping[Any, Any]) -> str:
    """What to do with a config file of another library."""
    if "compute_environment" in data:
        return "This is a config of Accelerate. Convert it with `fxtrain config convert FILE`."
    if not data.keys().isdisjoint(("zero_optimization", "train_micro_batch_size_per_gpu")):
        return (
            "This is a config of DeepSpeed. Name it in the plan of a launch file: "
            "plan.strategy.kind = 'deepspeed' and plan.strategy.config = 'FILE'."
        )
    return ""
