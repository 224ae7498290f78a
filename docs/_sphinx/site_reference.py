"""Pages of the reference, generated from the names that each package lists in `__all__`.

A public object is described once: names of `fxtrain` on the page of `fxtrain`, errors on their own
page. The page of a package describes its other names and links to those.
"""

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, get_args

import attrs
import click

import fxtrain
from fxtrain.cli import COMMANDS
from fxtrain.cli.app import load
from fxtrain.cli.explain_command import read_codes
from fxtrain.state.registry import BUILT_IN

__all__ = ["generated_pages", "public_names", "record_signature"]

_NO_PAGE = ("cli", "token_files")  # described by its commands; its names are in fx.data
_ROLE = "{py:obj}"
_WRITABLE = (bool, int, float, str, bytes, tuple, frozenset, list, dict)


def generated_pages(shown: Iterable[tuple[str, str, str, str]] = ()) -> dict[str, str]:
    """Markdown of the generated pages by their name relative to docs/.

    Args:
        shown: Errors that other pages explain: the code, a message, the page and an anchor on it.
    """
    modules = {f"reference/{module.__name__}": _module_page(module) for module in _modules()}
    return {
        **modules,
        "reference/modules": _list_of_modules(),
        "reference/plan_fields": _plan_page(),
        "reference/errors": _error_page(list(shown)),
        "reference/command_line": _command_page(),
    }


@functools.cache
def public_names() -> dict[str, str]:
    """The name under which the site describes an object, by every name that the code has for it."""
    found = {}
    for module in reversed(_modules()):  # fxtrain last: its names are the ones to use
        for name, value in _members(module):
            public = f"{module.__name__}.{name}"
            home = getattr(value, "__module__", None)
            qualified = f"{home}.{getattr(value, '__qualname__', name)}"
            found[public] = public
            if str(home).startswith("fxtrain."):  # an alias of another library's is not ours
                found[qualified] = public
            if _is_in_fxtrain(module, name, value):
                found[public] = f"fxtrain.{name}"
    found |= {f"fxtrain.{name}": f"fxtrain.{name}" for name, _ in _members(fxtrain)}
    found |= {name.replace("fxtrain.", "fx.", 1): public for name, public in found.items()}
    records = (name for name, value in _members(fxtrain) if isinstance(value, type))
    return found | {name: f"fxtrain.{name}" for name in records}


def _modules() -> list[ModuleType]:
    """fxtrain and its packages that have a name of their own to describe."""
    packages = [
        importlib.import_module(f"fxtrain.{one.name}")
        for one in pkgutil.iter_modules(fxtrain.__path__)
        if one.name in fxtrain._MODULES or (one.ispkg and one.name not in _NO_PAGE)
    ]
    own = [
        module
        for module in packages
        if any(not _is_in_fxtrain(module, *member) for member in _members(module))
    ]
    return [fxtrain, *own]


def _members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(module, name)) for name in module.__all__)


def _is_in_fxtrain(module: ModuleType, name: str, value: Any) -> bool:
    listed = module is not fxtrain and name in fxtrain.__all__
    return listed and getattr(fxtrain, name) is value


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, fxtrain.FxError)


def _described(*directives: str) -> str:
    """reStructuredText in a page of Markdown."""
    return "\n".join(["```{eval-rst}", *directives, "```", ""])


def _directive(module: ModuleType, name: str, value: Any) -> str:
    at = f"{module.__name__}.{name}"
    if isinstance(value, type):
        return f".. autoclass:: {at}\n   :members:\n"
    if inspect.isroutine(value):
        return f".. autofunction:: {at}\n"
    return f".. py:data:: {at}\n\n   {_constant(value)}\n"


def _constant(value: Any) -> str:
    """What a constant is: its value, or the names of the records or functions in it."""
    inside = value.values() if isinstance(value, Mapping) else value
    parts = list(inside) if isinstance(value, tuple | Mapping) else []
    if not parts or isinstance(parts[0], str):
        text = repr(value) if isinstance(value, str) else str(value)
        return f"``{re.sub(r'(?:[a-z_]+[.])+(?=[A-Z])', '', text)}``"
    names = [getattr(one, "flag", getattr(one, "name", "")) or one.__name__ for one in parts]
    kind = "mapping" if isinstance(value, Mapping) else "tuple"
    return f"A {kind} of {len(names)}: {', '.join(f'``{one}``' for one in names)}."


def _module_page(module: ModuleType) -> str:
    """The docstring of a package, links to what is described elsewhere, and every other name."""
    page = [f"# {module.__name__}", "", _described(f".. automodule:: {module.__name__}")]
    if module is fxtrain:
        page += ["`import fxtrain as fx` has every name that a training script needs.", ""]
    elsewhere = [
        f"{_ROLE}`{name} <fxtrain.{name}>`"
        for name, value in _members(module)
        if _is_in_fxtrain(module, name, value) or _is_error(value) or inspect.ismodule(value)
    ]
    if elsewhere:
        page += [f"Described on other pages: {', '.join(elsewhere)}.", ""]
    for name, value in _members(module):
        others = _is_in_fxtrain(module, name, value) or _is_error(value)
        if not others and not inspect.ismodule(value):
            page += [f"## {name}", "", _described(_directive(module, name, value))]
    return "\n".join(page)


def _list_of_modules() -> str:
    rows = [
        f"| [{module.__name__}]({module.__name__}.md) | {_first_line(module)} |"
        for module in _modules()[1:]
    ]
    tree = ["```{toctree}", ":hidden:", *(module.__name__ for module in _modules()[1:]), "```", ""]
    return "\n".join(["# Packages", "", "| Package | Contains |", "|---|---|", *rows, "", *tree])


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")


def record_signature(kind: type) -> str:
    """How a frozen record is constructed, with short defaults: `DDP()`, not all fields of it.

    Empty for records with fields of their own use, which functions construct and users do not.
    """
    if any(field.name.startswith("_") or field.repr is False for field in attrs.fields(kind)):
        return ""
    public = public_names()
    given: list[str] = []
    for field in attrs.fields(kind):
        if not field.init:
            continue
        if field.kw_only and "*" not in given:
            given.append("*")
        default = _default_of(field)
        given.append(
            f"{field.alias}: {_short(_type_of(field), public)}{default and f' = {default}'}"
        )
    return f"({', '.join(given)})"


def _entries(value: Any, section: str) -> dict[str, str]:
    """The entries of a section of a docstring, such as Attributes or Raises."""
    text = (inspect.getdoc(value) or "") + "\n"
    body = text.partition(f"\n{section}:\n")[2]
    lines = list(_until_outdented(body.splitlines()))
    found: dict[str, str] = {}
    for line in lines:
        entry = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if entry:
            found[entry[1]] = entry[2]
        elif found:
            found[list(found)[-1]] += " " + line.strip()
    return {name: text.strip() for name, text in found.items()}


def _until_outdented(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if line.strip() and not line.startswith("    "):
            return
        yield line


def _plan_page() -> str:
    """The fields of a plan and of the records that it may contain, as tables."""
    records = _records_of(fxtrain.Plan)
    page = [
        "# Fields of a plan",
        "",
        "A plan file has the same names and values; [plans](../plan.md) says how to write one.",
        "",
    ]
    for kind in records:
        texts = _entries(kind, "Attributes")
        page += [f"## {kind.__name__}", "", f"{_first_line(kind)} Described under "]
        page[-1] += f"{_ROLE}`fxtrain.{kind.__name__}`."
        page += ["", "| Field | Type | Default | Meaning |", "|---|---|---|---|"]
        for field in attrs.fields(kind):
            cells = (f"`{field.name}`", _code(_short(_type_of(field))), _code(_default_of(field)))
            meaning = texts.get(field.name, "Tag of this record in files." * (field.name == "kind"))
            page.append(f"| {' | '.join(cells)} | {_cell(meaning)} |")
        page.append("")
    return "\n".join(page)


def _records_of(kind: type) -> list[type]:
    """The public records that fields of a plan may contain, directly or not."""
    found: list[type] = []
    waiting = [kind, *BUILT_IN]
    while waiting:
        record = waiting.pop(0)
        public = getattr(fxtrain, record.__name__, None) is record
        if attrs.has(record) and public and record not in found:
            found.append(record)
            waiting += [one for field in attrs.fields(record) for one in _parts_of(field.type)]
    return found


def _parts_of(annotation: Any) -> list[type]:
    """The classes in an annotation."""
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [one for part in get_args(annotation) for one in _parts_of(part)]


def _type_of(field: Any) -> str:
    return field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)


def _default_of(field: Any) -> str:
    """The default of a field as one would write it; three dots where that is not a value."""
    default = field.default
    if default is attrs.NOTHING:
        return ""
    if isinstance(default, attrs.Factory):
        if default.takes_self:
            return "..."
        default = default.factory()
    kind = type(default)
    if attrs.has(kind) and _needs_nothing(kind) and default == kind():
        return f"{kind.__name__}()"
    return repr(default) if default is None or isinstance(default, _WRITABLE) else "..."


def _needs_nothing(kind: type) -> bool:
    return all(one.default is not attrs.NOTHING for one in attrs.fields(kind) if one.init)


def _short(annotation: str, kept: Container[str] = ()) -> str:
    """An annotation without the modules of its names, except for names that become links."""
    return re.sub(
        r"\b(?:[a-z_]\w*\.)+(\w+)", lambda at: at[0] if at[0] in kept else at[1], annotation
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _error_page(shown: list[tuple[str, str, str, str]]) -> str:
    """Every code of errors: cause, cure, messages and where they are explained, what raises it."""
    raised = _raised_by()
    page = [
        "# Errors",
        "",
        "Every error that fxtrain raises on purpose is an `FxError`. Its message says what was "
        "asked, what was found and what to do. It ends with a code, such as `[FX602]`, which is an "
        "anchor of this page: each section has the cause and the cure. `fxtrain explain FX602` "
        "prints the section in a terminal. An error that quotes another one has the code of that "
        "one.",
        "",
    ]
    for one in read_codes():
        level, name = ("###", f"{one.code}: {one.title}") if one.title else ("##", one.error)
        page += [f"({one.code.lower()})=", f"{level} {name}", ""]
        if not one.title:
            home = "fxtrain" if one.error in fxtrain.__all__ else "fxtrain.errors"
            directive = f".. autoexception:: {home}.{one.error}\n   :show-inheritance:\n"
            page += [f"Code: `{one.code}`", "", _described(directive)]
        see = f" See [{_page_name(one.see)}](../{_with_suffix(one.see)})." if one.see else ""
        page += [f"**Cause:** {one.cause}", "", f"**Cure:** {one.cure}{see}", ""]
        messages = [message for message in shown if message[0] == one.code]
        if messages:
            page += ["Messages, and where they are explained:", ""]
            page += [
                f"- `` {text} `` ([{_page_name(at)}](../{at}.md#{anchor}))"
                for _, text, at, anchor in messages
            ]
            page.append("")
        causes = [] if one.title else raised.get(one.error, [])
        if causes:
            page += ["Raised by:", ""]
            page += [f"- {_ROLE}`{at}`: {when}" for at, when in causes]
            page.append("")
    return "\n".join(page)


def _page_name(at: str) -> str:
    return at.partition("#")[0].rpartition("/")[2].replace("_", " ")


def _with_suffix(at: str) -> str:
    """The file of a page, before the anchor if there is one."""
    page, mark, anchor = at.partition("#")
    return f"{page}.md{mark}{anchor}"


def _raised_by() -> dict[str, list[tuple[str, str]]]:
    """Public functions and what their docstrings say of each error."""
    found: dict[str, list[tuple[str, str]]] = {}
    for module in _modules():
        for name, value in _members(module):
            if _is_in_fxtrain(module, name, value) or inspect.ismodule(value):
                continue
            for errors, when in _entries(value, "Raises").items():
                for error in errors.split(", "):
                    found.setdefault(error, []).append((f"{module.__name__}.{name}", when))
    return found


def _command_page() -> str:
    """What `--help` prints for every command."""
    page = ["# Commands", "", "What `fxtrain COMMAND --help` prints.", ""]
    for name in COMMANDS:
        page += _help_of(load(name), f"fxtrain {name}", "##")
    return "\n".join(page)


def _help_of(command: click.Command, path: str, level: str) -> list[str]:
    context = click.Context(command, info_name=path, max_content_width=100)
    found = [f"{level} {path}", "", "```text", command.get_help(context), "```", ""]
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            found += _help_of(inner, f"{path} {name}", level + "#")
    return found
