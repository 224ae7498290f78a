"""Launch files as text: the values of a file, in TOML in a template that explains every field."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain.launchers.config.launch_file import LaunchFile, Section
from fxtrain.state.files import text_of
from fxtrain.state.parsing import Format

_TEMPLATE = Path(__file__).with_name("template.toml")
_UNSET_FIELD = re.compile(r"# (\w+)[\w.]* = .*")


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
