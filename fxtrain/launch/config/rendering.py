"""Launch files as text, with the meaning of each field as a comment."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from fxtrain._optional import optional
from fxtrain.launch import LaunchSpec, known_launchers
from fxtrain.launch.config.launch_file import LaunchFile, Section
from fxtrain.state import Plan, installed_configs, unstructure
from fxtrain.state.parsing import leaves
from fxtrain.state.registry import BUILT_IN, kind_of

__all__ = ["Line", "meanings", "render"]

# Given on the command line, not in a file that several scripts share.
_NOT_OFFERED = ("target", "args", "module")
_ONE_LINE = 1 << 20


@attrs.frozen(kw_only=True)
class Line:
    """One line of a launch file.

    Attributes:
        kind: table: what follows is in it; value: a key with its value; offer: an unset value,
            shown as a comment; note: a comment.
        path: Names of the table, or of the table and the key.
        value: Plain data of a value or offer, or the text of a note.
    """

    kind: Literal["table", "value", "offer", "note"]
    path: tuple[str, ...] = ()
    value: Any = None


def render(
    file: LaunchFile,
    form: str,
    *,
    notes: Sequence[str] = (),
    offers: bool = True,
    brief: bool = False,
) -> str:
    """The text of a launch file.

    Args:
        file: Its content.
        form: toml or yaml.
        notes: Sentences for the top of the file.
        offers: Whether to show unset fields, as comments with their defaults.
        brief: Whether to write values only, without comments.

    Raises:
        MissingPackageError: TOML needs tomlkit and YAML pyyaml (the extra `files`).

    Example:
        >>> from fxtrain.launch.config import LaunchFile, Section, render
        >>> print(render(LaunchFile(common=Section(launch={"ranks": 2})), "toml", offers=False))
        [launch]
        # Processes ...
        ranks = 2
    """
    lines = [Line(kind="note", value=note) for note in notes]
    if file.default:
        lines.append(Line(kind="note", value="The profile used if none is requested."))
        lines.append(Line(kind="value", path=("default",), value=file.default))
    lines += _section(file.common, (), offers=offers and not brief)
    for name, section in file.profiles.items():
        lines += _section(section, ("profiles", name), offers=False)
    if brief:
        lines = [line for line in lines if line.kind != "note"]
    return (_toml if form == "toml" else _yaml)(lines)


def meanings(cls: type) -> dict[str, str]:
    """The meanings of a record's fields, from its docstring.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.launch.config import meanings
        >>> meanings(fx.Plan)["accumulate"]
        'Micro-batches per optimizer update.'
    """
    found: dict[str, str] = {}
    part = (cls.__doc__ or "").partition("Attributes:\n")[2]
    name = ""
    for line in part.splitlines():
        start = re.match(r" {8}(\w+): (.*)", line)
        if start:
            name, text = start[1], start[2]
            found[name] = text
        elif name and line.startswith(" " * 12):
            found[name] += " " + line.strip()
        else:
            break
    return found


def _section(section: Section, path: tuple[str, ...], *, offers: bool) -> Iterator[Line]:
    if section.launch or offers:
        yield from _table(section.launch, LaunchSpec, (*path, "launch"), offers=offers)
    if section.plan or offers:
        yield from _table(section.plan, Plan, (*path, "plan"), offers=offers)


def _table(
    said: Mapping[str, Any], cls: Any, path: tuple[str, ...], *, offers: bool
) -> Iterator[Line]:
    """Values first, then nested tables, as TOML requires."""
    yield Line(kind="table", path=path)
    told = meanings(cls) if cls else {}
    inner: dict[str, Any] = {}
    for name in dict.fromkeys([*(_names(cls) if cls else ()), *said]):
        if isinstance(said.get(name), Mapping):
            inner[name] = said[name]
        elif name in said:
            yield from _explained(told.get(name, ""))
            yield Line(kind="value", path=(*path, name), value=said[name])
        elif offers and cls and name not in _NOT_OFFERED:
            yield from _offer(cls, name, told.get(name, ""), path)
    for name, data in inner.items():
        of_launcher = cls is LaunchSpec and name == "options"
        own = _options(said.get("launcher")) if of_launcher else _class_of(cls, name, data)
        yield from _table(data, own, (*path, name), offers=False)


def _offer(cls: type, name: str, told: str, path: tuple[str, ...]) -> Iterator[Line]:
    default = attrs.fields_dict(cls)[name].default
    if default is attrs.NOTHING:
        return
    yield from _explained(told)
    plain = unstructure(default) if attrs.has(type(default)) else default
    if isinstance(plain, Mapping):
        first = dict(list(leaves(plain))[:1])
        for inside, value in first.items():
            yield Line(kind="offer", path=(*path, *f"{name}.{inside}".split(".")), value=value)
    else:
        value = list(plain) if isinstance(plain, tuple) else plain
        yield Line(kind="offer", path=(*path, name), value=value)


def _explained(told: str) -> Iterator[Line]:
    if told:
        yield Line(kind="note", value=told)


def _names(cls: type) -> list[str]:
    return [field.name for field in attrs.fields(cls) if field.init]


def _options(launcher: Any) -> Any:
    row = known_launchers().get(launcher) if isinstance(launcher, str) else None
    return row.options if row else None


def _class_of(cls: Any, name: str, data: Mapping[str, Any]) -> Any:
    """The record of a nested table; None if the docstrings do not name it."""
    if cls is None or name not in attrs.fields_dict(cls):
        return None
    field = attrs.fields_dict(cls)[name]
    if "kind" in data:
        return {kind_of(config): config for config in (*BUILT_IN, *installed_configs())}.get(
            data["kind"]
        )
    kinds: tuple[Any, ...] = getattr(field.type, "__args__", (field.type,))
    return next((kind for kind in kinds if attrs.has(kind)), None)


def _toml(lines: list[Line]) -> str:
    item = optional("tomlkit", extra="files", needed_by="a launch file in TOML").item
    text: list[str] = []
    table: tuple[str, ...] = ()
    for line in lines:
        if line.kind == "note":
            text += _wrapped(line.value, "")
        elif line.kind == "table":
            table = line.path
            text += ["", f"[{'.'.join(map(_key, line.path))}]"]
        else:
            own = ".".join(map(_key, line.path[len(table) :]))
            if line.value is None:
                text.append(f"# {own} = (not set)")
            else:
                said = f"{own} = {item(line.value).as_string()}"
                text.append(said if line.kind == "value" else f"# {said}")
    return "\n".join(text).strip("\n") + "\n"


def _yaml(lines: list[Line]) -> str:
    full = [line.path for line in lines if line.kind == "value"]
    text: list[str] = []
    seen: set[tuple[str, ...]] = set()
    depth = 0
    for line in lines:
        indent = "  " * depth
        if line.kind == "note":
            text += _wrapped(line.value, indent)
        elif line.kind == "table":
            depth = len(line.path)
            heads = [line.path[:end] for end in range(1, depth + 1)]
            for head in [head for head in heads if head not in seen]:
                seen.add(head)
                holds = any(path[: len(head)] == head for path in full)
                mark = "" if holds else "# "
                text.append("  " * (len(head) - 1) + f"{mark}{_flow(head[-1])}:")
        else:
            mark = "" if line.kind == "value" else "# "
            key = ".".join(map(_flow, line.path[depth:]))
            text.append(f"{indent}{mark}{key}: {_flow(line.value)}")
    return "\n".join(text) + "\n"


def _flow(value: Any) -> str:
    """A value on one line of YAML."""
    yaml = optional("yaml", extra="files", needed_by="a launch file in YAML")
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str) and not value.isprintable():  # otherwise it takes several lines
        return yaml.safe_dump(value, default_style='"', width=_ONE_LINE).strip()
    return yaml.safe_dump([value], default_flow_style=True, width=_ONE_LINE).strip()[1:-1]


def _wrapped(note: str, indent: str) -> list[str]:
    return textwrap.wrap(note, 96, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _key(name: str) -> str:
    """A name as a TOML key: bare where that is allowed."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return optional("tomlkit", extra="files", needed_by="a launch file").item(name).as_string()
