"""Launch files: reading, checking and writing them, and their values after variables and flags."""

import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain._other_names import hint
from fxtrain._record import few, shown
from fxtrain.errors import LaunchError, PlanError
from fxtrain.launchers.spec import FLAGS, LaunchSpec
from fxtrain.launchers.table import with_options
from fxtrain.state import Plan, structure, unstructure
from fxtrain.state.files import read_data, text_of
from fxtrain.state.parsing import (
    Format,
    from_environment,
    leaves,
    merge_tables,
    near,
    put,
    value_of,
)

# In the current folder; these come before the user's own file.
HERE = ("fxtrain.toml", "fxtrain.yaml", "fxtrain.yml")
# The script while checking a file that names none.
NO_TARGET = "train.py"
_TEMPLATE = Path(__file__).with_name("launch_template.toml")
_TABLES: Mapping[str, type] = {"launch": LaunchSpec, "plan": Plan}


@attrs.frozen(kw_only=True)
class LaunchConfig:
    """A launch and its plan, as a file, variables and flags set them."""

    # Its target is a placeholder if nothing names a script.
    launch: LaunchSpec = attrs.field(factory=lambda: LaunchSpec(target=NO_TARGET))
    plan: Plan = attrs.field(factory=Plan)
    values: Mapping[str, Mapping[str, Any]] = attrs.field(  # what was set, as plain data
        factory=lambda: {"launch": {}, "plan": {}}
    )
    file: str = ""  # that was read

    def by_path(self, *, set_only: bool = False) -> dict[str, Any]:
        """Every value by its path, such as `launch.ranks`; with `set_only`, without defaults.

        A short form that was set, such as precision = "bf16", is every field below it.
        """
        data = {"launch": unstructure(self.launch), "plan": unstructure(self.plan)}
        if "target" not in self.values["launch"]:
            del data["launch"]["target"]
        used = {name: table for name, table in self.values.items() if table}
        chosen = tuple(f"{path}." for path, _ in leaves(used))
        return {
            path: value
            for path, value in leaves(data)
            if not set_only or f"{path}.".startswith(chosen)
        }


def launch_config(values: Any, *, file: str = "") -> LaunchConfig:
    """A launch and its plan from the data of a launch file; a PlanError has a line per problem."""
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise PlanError(f"the file: found {shown(values)}; choose a table of launch and plan.")
    if foreign := _foreign(values):
        raise PlanError(foreign)
    values = {"launch": {}, "plan": {}, **values}
    problems = [_unknown(key) for key in values if key not in _TABLES]
    made: dict[str, Any] = {}
    for name, cls in _TABLES.items():
        data = values[name]
        if cls is LaunchSpec and isinstance(data, Mapping):
            data = {"target": NO_TARGET, **data}
        try:
            made[name] = structure(data, cls, () if cls is LaunchSpec else None)
            if cls is LaunchSpec:
                with_options(made[name])
        except RecursionError:
            problems.append(f"{name}: nested too deeply, or contains itself.")
        except LaunchError as error:
            problems.append(f"{name}: {error.message}")
        except PlanError as error:
            start = cls.__name__.lower()
            problems += [name + line.removeprefix(start) for line in error.message.splitlines()]
    if problems:
        raise PlanError("\n".join(few(problems)))
    return LaunchConfig(**made, values=values, file=file)


def _foreign(values: Mapping[Any, Any]) -> str:
    """What to do with a config file of another library; empty for any other file."""
    if "compute_environment" in values:
        return "This is a config of Accelerate. Convert it with `fxtrain config convert FILE`."
    if not values.keys().isdisjoint(("zero_optimization", "train_micro_batch_size_per_gpu")):
        return (
            "This is a config of DeepSpeed. Name it in the plan of a launch file: "
            "plan.strategy.kind = 'deepspeed' and plan.strategy.config = 'FILE'."
        )
    return ""


def _unknown(key: Any) -> str:
    """A problem with a key beside launch and plan, which may belong in one of them."""
    owner = next((name for name, cls in _TABLES.items() if key in attrs.fields_dict(cls)), "")
    use = f" Use {owner}.{key}." if owner else hint(key, at="file")
    words = use or f"{near(key, list(_TABLES))}; a launch file has launch and plan."
    return f"the file: unknown key {shown(key)}{'.' if use else ''}{words}"


def read_launch_file(path: str | Path) -> LaunchConfig:
    """Read and check a launch file; a PlanError has a line per problem."""
    if not os.path.exists(path):
        raise PlanError(
            f"{path}: no such launch file. Create one with `fxtrain config`.", code="FX201"
        )
    data = read_data(path)
    try:
        return launch_config(data, file=str(path))
    except PlanError as error:
        raise PlanError(f"{path}:\n{error}") from None


def find_file(env: Mapping[str, str]) -> str:
    """The launch file to use if no flag names one; empty if there is none.

    FXTRAIN_CONFIG, else `fxtrain.toml` or `.yaml` in the current folder, else
    `fxtrain/launch.toml` in the user's configuration folder (XDG_CONFIG_HOME, ~/.config).
    """
    if env.get("FXTRAIN_CONFIG"):
        return env["FXTRAIN_CONFIG"]
    home = env.get("XDG_CONFIG_HOME") or (env["HOME"] + "/.config" if env.get("HOME") else "")
    own = [Path(home, "fxtrain", "launch.toml")] if home else []
    return next((str(path) for path in (*map(Path, HERE), *own) if path.is_file()), "")


def from_flags(words: Sequence[str]) -> dict[str, Any]:
    """Values by path from words such as `plan.accumulate=4`."""
    values: dict[str, Any] = {}
    for word in words:
        path, equals, text = word.partition("=")
        parts = path.split(".")
        if not equals or len(parts) < 2 or parts[0] not in _TABLES or "" in parts:
            raise PlanError(
                f"--set {word}: write a value as launch.ranks=4 or plan.precision=bf16."
            )
        values[path] = value_of(text)
    return values


def resolve(
    *,
    file: str = "",
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> LaunchConfig:
    """Resolve values: flags (`from_flags`) override the environment, which overrides the file.

    `find_file` finds a file if none is named. A PlanError has a line per problem, with its path.
    """
    env = env or {}
    path = file or find_file(env)
    config = read_launch_file(path) if path else LaunchConfig()
    variables = from_environment(env)
    values = dict(config.values)
    for where, value in {**variables, **(flags or {})}.items():
        values = merge_tables(values, put({}, where, value))
    try:
        return launch_config(values, file=path)
    except PlanError as error:
        names = ", ".join(f"FXTRAIN_{where.upper().replace('.', '__')}" for where in variables)
        if not names:
            raise
        raise PlanError(f"With the variables {names}:\n{error.message}") from None


def render(
    values: Mapping[str, Mapping[str, Any]],
    form: Format,
    *,
    notes: Sequence[str] = (),
    brief: bool = False,
) -> str:
    """The text of a launch file with the tables `launch` and `plan`, as plain data.

    TOML has a comment on every field, unless `brief`; yaml and json have values only. Notes are
    sentences for the top of the file, where the format has comments.
    """
    if brief or form != "toml":
        text = text_of({name: table for name, table in values.items() if table}, form)
    else:
        text = _TEMPLATE.read_text(encoding="utf-8")
        text = text.replace("[launch]\n", f"[launch]\n{_launch_fields()}", 1)
        for table, fields in values.items():
            for name, value in fields.items():
                text = _with_value(text, table, name, value)
    head = () if brief or form == "json" else notes
    lines = [textwrap.fill(note, 96, initial_indent="# ", subsequent_indent="# ") for note in head]
    return "\n".join([*lines, text.strip("\n")]) + "\n"


def _launch_fields() -> str:
    """The fields of a launch as comments: what the flag of each does, and its default."""
    defaults = {field.name: field.default for field in attrs.fields(LaunchSpec)}
    lines: list[str] = []
    for flag in FLAGS:
        default = defaults[flag.field]
        offer = "(not set)" if default is None else json.dumps(default)
        lines.append(f"# {flag.help}\n# {flag.field} = {offer}\n")
    return "".join(lines)


def _with_value(text: str, table: str, name: str, value: Any) -> str:
    """The template with a value in the place of a field's default, or at the top of its table."""
    if value is None:  # which TOML does not have
        return text
    tomlkit: Any = optional("tomlkit", extra="files", needed_by="a launch file in TOML")
    line = f"{tomlkit.key(name).as_string()} = {_inline(tomlkit, value).as_string()}"
    filled, count = re.subn(
        rf"^# {re.escape(name)}(\.\w+)? = .*$", lambda _: line, text, count=1, flags=re.MULTILINE
    )
    return filled if count else text.replace(f"[{table}]\n", f"[{table}]\n{line}\n", 1)


def _inline(tomlkit: Any, value: Any) -> Any:
    """A value that fits on the line of its key, tables included."""
    if not isinstance(value, Mapping):
        return tomlkit.item(value)
    table = tomlkit.inline_table()
    for key, entry in value.items():
        if entry is not None:
            table.append(key, _inline(tomlkit, entry))
    return table
