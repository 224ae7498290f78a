"""Launch files as text: the values of a file in a template that explains every field."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fxtrain._optional import optional
from fxtrain.launchers.config.launch_file import LaunchFile, Section

_TEMPLATE = Path(__file__).with_name("template.toml")
_UNSET_FIELD = re.compile(r"# (\w+)([\w.]*) = (.*)")


def render(file: LaunchFile, form: str, *, notes: Sequence[str] = (), brief: bool = False) -> str:
    """The text of a launch file.

    Args:
        file: Its content.
        form: toml or yaml.
        notes: Sentences for the top of the file.
        brief: Write values only, without comments and without the fields that are not set.

    Raises:
        MissingPackageError: TOML needs tomlkit and YAML pyyaml (the extra `files`).

    Example:
        >>> from fxtrain.launchers.config import LaunchFile, Section, render
        >>> print(render(LaunchFile(common=Section(launch={"ranks": 2})), "toml", brief=True))
        [launch]
        ranks = 2
    """
    lines = [] if brief else [line for note in notes for line in _comment(note)]
    if file.default:
        lines += _comment("The profile used if none is requested.") if not brief else []
        lines.append(_assignment(("default",), file.default, form))
    template = "[launch]\n[plan]" if brief else _TEMPLATE.read_text(encoding="utf-8")
    write = _toml if form == "toml" else _yaml
    return "\n".join([*lines, *write(file, template)]).strip("\n") + "\n"


def render_profile(name: str, section: Section) -> str:
    """The tables of one profile, in TOML."""
    return "\n".join(_toml_profile(name, section)).strip("\n") + "\n"


def _toml(file: LaunchFile, template: str) -> Iterator[str]:
    for name, offered in _tables(template):
        values: Mapping[str, Any] = getattr(file.common, name)
        if values or offered:
            yield from _toml_table((name,), values, offered)
    for name, section in file.profiles.items():
        yield from _toml_profile(name, section)


def _toml_profile(name: str, section: Section) -> Iterator[str]:
    for part, values in (("launch", section.launch), ("plan", section.plan)):
        if values:
            yield from _toml_table(("profiles", name, part), values)


def _toml_table(
    path: tuple[str, ...], values: Mapping[str, Any], offered: Sequence[str] = ()
) -> Iterator[str]:
    """A table, its values in the lines that offer them, and then the tables in it."""
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    yield from ("", f"[{_key(path)}]")
    yield from _filled(offered, plain, values.keys() - plain.keys(), "toml")
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _toml_table((*path, name), value)


def _yaml(file: LaunchFile, template: str) -> Iterator[str]:
    for name, offered in _tables(template):
        values: Mapping[str, Any] = getattr(file.common, name)
        if values or offered:
            yield f"{name}:" if values else f"# {name}:"
            yield from (f"  {line}" for line in _filled(offered, values, set(), "yaml"))
    if file.profiles:
        yield "profiles:"
    for name, section in file.profiles.items():
        parts = {"launch": section.launch, "plan": section.plan}
        used = {part: values for part, values in parts.items() if values}
        yield f"  {_flow(name)}:" if used else f"  {_flow(name)}: {{}}"
        for part, values in used.items():
            yield f"    {part}:"
            yield from (f"      {_assignment((key,), values[key], 'yaml')}" for key in values)


def _tables(template: str) -> Iterator[tuple[str, list[str]]]:
    """The lines of each table of the template."""
    _, *parts = re.split(r"^\[(\w+)\]$", template, flags=re.MULTILINE)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        yield name, text.strip("\n").splitlines() if text.strip("\n") else []


def _filled(
    offered: Sequence[str], values: Mapping[str, Any], elsewhere: set[str], form: str
) -> Iterator[str]:
    """Lines of a template with values in place of the unset fields, then the other values."""
    left = dict(values)
    for line in offered:
        field = _UNSET_FIELD.fullmatch(line)
        if field is None:
            yield line
        elif field[1] in left:
            yield _assignment((field[1],), left.pop(field[1]), form)
        elif field[1] not in elsewhere:
            yield line if form == "toml" else f"# {field[1]}{field[2]}: {field[3]}"
        else:
            yield f"# {field[1]}: see the table below."
    yield from (_assignment((name,), value, form) for name, value in left.items())


def _assignment(path: tuple[str, ...], value: Any, form: str) -> str:
    if form == "yaml":
        return f"{_flow(path[0])}: {_flow(value)}"
    if value is None:  # which TOML does not have
        return f"# {_key(path)} = (not set)"
    tomlkit = optional("tomlkit", extra="files", needed_by="a launch file in TOML")
    return f"{_key(path)} = {tomlkit.item(value).as_string()}"


def _key(path: tuple[str, ...]) -> str:
    tomlkit = optional("tomlkit", extra="files", needed_by="a launch file in TOML")
    return ".".join(tomlkit.key(name).as_string() for name in path)


def _flow(value: Any) -> str:
    """A value on one line of YAML."""
    yaml = optional("yaml", extra="files", needed_by="a launch file in YAML")
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(value[key])}' for key in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str) and not value.isprintable():  # otherwise it takes several lines
        return yaml.safe_dump(value, default_style='"', width=1 << 20).strip()
    return yaml.safe_dump([value], default_flow_style=True, width=1 << 20).strip()[1:-1]


def _comment(note: str) -> list[str]:
    return textwrap.wrap(note, 96, initial_indent="# ", subsequent_indent="# ")
